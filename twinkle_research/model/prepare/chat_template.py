"""The chat template of the models this project makes itself: ChatML-style, written for this project.

It only ever appends: rendering a longer conversation starts with the rendering of a shorter one, so a multi-turn
rollout can go on from the tokens it has. Roles: system, user, assistant, tool. An assistant turn may carry
``reasoning_content`` (or ``thinking``) and ``tool_calls``; ``enable_thinking=false`` leaves reasoning out.
``{% generation %}`` marks what is trained: the assistant's text and its end-of-turn token.
"""

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
  {%- if content is none or content is not defined -%}
  {%- elif content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type != 'text' -%}
        {{- raise_exception("this model reads text only, got a content part of type '" ~ part.type ~ "'") -}}
      {%- endif -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='', rest=messages) -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set ns.system = text(messages[0].content) -%}
  {%- set ns.rest = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if ns.system -%}{{- ns.system ~ '\n\n' -}}{%- endif -%}
  {{- 'You can call these tools:\n<tools>\n' -}}
  {%- for tool in tools -%}{{- tool | tojson ~ '\n' -}}{%- endfor -%}
  {{- '</tools>\nCall one like this:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n' -}}
{%- elif ns.rest | length < messages | length -%}
  {{- '<|im_start|>system\n' ~ ns.system ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in ns.rest -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
    {%- set reasoning = text(message.reasoning_content or message.thinking) -%}
    {%- if reasoning and (enable_thinking is not defined or enable_thinking) -%}
      {{- '<think>\n' ~ reasoning ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {%- set answer = text(message.content) -%}
    {{- answer -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set call = call.function or call -%}
      {%- if answer or not loop.first -%}{{- '\n' -}}{%- endif -%}
      {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
      {{- '<tool_call>\n{"name": ' ~ call.name | tojson ~ ', "arguments": ' ~ arguments ~ '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- elif message.role in ['system', 'user', 'tool'] -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ text(message.content) ~ '<|im_end|>\n' -}}
  {%- else -%}
    {{- raise_exception("unknown role '" ~ message.role ~ "'; valid: system, user, assistant, tool") -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()
