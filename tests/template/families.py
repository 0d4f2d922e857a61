"""Chat formats of well-known model families, each written down twice: as a Jinja template in that family's style, and as a
plain Python renderer that knows nothing of Jinja. All text is the tests' own.

A family says how a conversation reads (``before``: all that a sampler sees before an assistant turn, ``turn``: what it then
generates), which roles it has, and how its tokenizer splits.
"""

from chatml_families import (
    CHATML_TOKENS,
    NO_THINKING,
    QWEN35_CALLS,
    QWEN_CALLS,
    Family,
    Qwen3,
    Qwen25,
    Qwen35,
    SmolLM2,
    call_of,
    chatml,
    dumps,
    jinja,
    qwen3,
    thought_of,
)  # fmt: skip

# --- Llama, Mistral, Gemma, DeepSeek, Phi, Zephyr, Granite, Command-R -----------------------------------------------------


class Llama2(Family):
    def before(self, messages, tools, thought):
        system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n" if messages[0]["role"] == "system" else ""
        text = ""
        for message in messages:
            content = message["content"] or ""
            if message["role"] == "user":
                text += f"<s>[INST] {(system + content).strip()} [/INST]"
                system = ""
            elif message["role"] == "assistant":
                text += self.turn(message)
        return text

    def turn(self, message):
        thought, content = thought_of(message)
        inline = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
        return f" {inline.strip()} </s>"


LLAMA2 = jinja(r"""
    {%- set ns = namespace(system='') -%}
    {%- for m in messages -%}
        {%- if m.role == 'system' -%}{%- set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' -%}
        {%- elif m.role == 'user' -%}
            {{ '<s>[INST] ' + (ns.system + m.content) | trim + ' [/INST]' }}{%- set ns.system = '' -%}
        {%- else -%}{{ ' ' + m.content | trim + ' </s>' }}{%- endif -%}
    {%- endfor -%}""")


class Llama3(Family):
    def head(self, role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    def before(self, messages, tools, thought):
        has_system = messages[0]["role"] == "system"
        system = messages[0]["content"].strip() if has_system else ""
        text = f"<|begin_of_text|>{self.head('system')}Cutting Knowledge Date: December 2023\n\n{system}<|eot_id|>"
        rest, asked = messages[has_system:], False
        for message in rest:
            role, content = message["role"], (message["content"] or "").strip()
            if role == "assistant":
                text += self.head(role) + self.turn(message)
            elif role == "tool":
                text += self.head("ipython") + content + "<|eot_id|>"
            else:
                listed = "".join(dumps(tool) + "\n\n" for tool in tools) if tools and not asked else ""
                asked = True
                text += self.head(role) + listed + content + "<|eot_id|>"
        return text + self.head("assistant")

    def turn(self, message):
        thought, content = thought_of(message)
        text = (f"<think>\n{thought}\n</think>\n\n{content}" if thought else content).strip()
        calls = "".join(dumps(call_of(call, "parameters")) for call in message.get("tool_calls", []))
        return text + calls + self.end


LLAMA3 = jinja(r"""
    {{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' -}}
    {%- if messages[0].role == 'system' -%}{{ messages[0].content | trim }}{%- endif -%}{{ '<|eot_id|>' }}
    {%- set ns = namespace(asked=false) -%}
    {%- for m in messages if m.role != 'system' -%}
        {{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
        {%- if m.role == 'user' and not ns.asked -%}
            {%- set ns.asked = true -%}{%- for t in tools or [] -%}{{ t | tojson + '\n\n' }}{%- endfor -%}
        {%- endif -%}
        {{ m.content | trim }}
        {%- for c in m.tool_calls or [] -%}
            {{ '{"name": "' + c.function.name + '", "parameters": ' }}{{ c.function.arguments | tojson }}{{ '}' }}
        {%- endfor -%}{{ '<|eot_id|>' }}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}""")


class Mistral(Family):
    """The tools stand before the last user message, so they move with each new one."""

    def before(self, messages, tools, thought):
        system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        text = "<s>"
        for i, message in enumerate(messages):
            if message["role"] == "user":
                listed = f"[AVAILABLE_TOOLS] {dumps(tools)}[/AVAILABLE_TOOLS]" if tools and i == users[-1] else ""
                text += f"{listed}[INST] {system if i == users[0] else ''}{message['content']}[/INST]"
            elif message["role"] == "tool":
                text += f"[TOOL_RESULTS] {message['content']}[/TOOL_RESULTS]"
            elif message["role"] == "assistant":
                text += self.turn(message)
        return text

    def turn(self, message):
        thought, content = thought_of(message)
        text = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
        calls = [call_of(call) for call in message.get("tool_calls", [])]
        text = f" {text}" if text or not calls else ""
        return text + (f"[TOOL_CALLS] {dumps(calls)}" if calls else "") + self.end


MISTRAL = jinja(r"""
    {{- bos_token -}}
    {%- set ns = namespace(last=-1, first=-1, system='') -%}
    {%- for m in messages -%}
        {%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- endif -%}
        {%- if m.role == 'user' -%}
            {%- set ns.last = loop.index0 -%}{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}
            {%- if tools and loop.index0 == ns.last -%}
                {{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
            {%- endif -%}
            {{ '[INST] ' + (ns.system if loop.index0 == ns.first else '') + m.content + '[/INST]' }}
        {%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
        {%- elif m.role == 'assistant' -%}
            {%- if m.content or not m.tool_calls -%}{{ ' ' + m.content }}{%- endif -%}
            {%- if m.tool_calls -%}
                {{ '[TOOL_CALLS] [' }}
                {%- for c in m.tool_calls -%}
                    {{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}
                    {%- if not loop.last -%}{{ ', ' }}{%- endif -%}
                {%- endfor -%}{{ ']' }}
            {%- endif -%}{{ eos_token }}
        {%- endif -%}
    {%- endfor -%}""")


class Gemma(Family):
    """The assistant is called model; system text goes before the first user message; contents are trimmed."""

    def before(self, messages, tools, thought):
        has_system = messages[0]["role"] == "system"
        prefix = messages[0]["content"] + "\n\n" if has_system else ""
        text = "<bos>"
        for message in messages[has_system:]:
            role = "model" if message["role"] == "assistant" else message["role"]
            body = self.turn(message) + "\n" if role == "model" else f"{prefix}{message['content'].strip()}<end_of_turn>\n"
            prefix = "" if role == "user" else prefix
            text += f"<start_of_turn>{role}\n{body}"
        return text + "<start_of_turn>model\n"

    def turn(self, message):
        thought, content = thought_of(message)
        return (f"<think>\n{thought}\n</think>\n\n{content}" if thought else content).strip() + self.end


GEMMA = jinja(r"""
    {{- bos_token -}}{%- set ns = namespace(prefix='') -%}
    {%- for m in messages -%}
        {%- if m.role == 'system' -%}{%- set ns.prefix = m.content + '\n\n' -%}
        {%- else -%}
            {{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
            {%- if m.role == 'user' -%}{{ ns.prefix }}{%- set ns.prefix = '' -%}{%- endif -%}
            {{ m.content | trim + '<end_of_turn>\n' }}
        {%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""")


class DeepSeek(Family):
    """Full-width markers, no line breaks; thinking is taken out of every turn that is shown, and yet sampled and trained."""

    def before(self, messages, tools, thought):
        text = "<｜begin▁of▁sentence｜>" + (messages[0]["content"] if messages[0]["role"] == "system" else "")
        for message in messages:
            if message["role"] == "user":
                text += "<｜User｜>" + message["content"] + "<｜Assistant｜>"
            elif message["role"] == "assistant":
                text += thought_of(message)[1] + self.end
        return text


DEEPSEEK = jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}{%- if m.role == 'system' -%}{{ m.content }}{%- endif -%}{%- endfor -%}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
        {%- elif m.role == 'assistant' -%}
            {{ '<｜Assistant｜>' + (m.content.split('</think>')[-1] if '</think>' in m.content else m.content) + eos_token }}
        {%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}""")


class Bracketed(Family):
    """Each message between a header and an end marker: ``form`` has {role} and {content}."""

    form = ""
    start = ""

    def before(self, messages, tools, thought):
        header, _, rest = self.form.partition("{content}")
        text = self.start
        for message in messages:
            body = (
                self.turn(message) + rest.removeprefix(self.end) if message["role"] == "assistant" else message["content"] + rest
            )
            text += header.format(role=self.role(message["role"])) + body
        return text + header.format(role=self.role("assistant"))

    def role(self, name: str) -> str:
        return name


def bracketed(form: str, start: str = "", final: str = "") -> str:
    header, _, rest = (part.replace("\n", r"\n") for part in form.partition("{content}"))
    left, _, right = header.partition("{role}")
    return jinja(rf"""
        {{{{- '{start}' -}}}}
        {{%- for m in messages -%}}{{{{ '{left}' + m.role + '{right}' + m.content + '{rest}' }}}}{{%- endfor -%}}
        {{%- if add_generation_prompt -%}}{{{{ '{left}assistant{right}' }}}}{{%- else -%}}{{{{ '{final}' }}}}{{%- endif -%}}""")


class Phi3(Bracketed):
    form = "<|{role}|>\n{content}<|end|>\n"


class Phi4(Bracketed):
    form = "<|im_start|>{role}<|im_sep|>{content}<|im_end|>"


class Zephyr(Bracketed):
    form = "<|{role}|>\n{content}</s>\n"


class Granite(Bracketed):
    form = "<|start_of_role|>{role}<|end_of_role|>{content}<|end_of_text|>\n"


class CommandR(Bracketed):
    form = "<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{content}<|END_OF_TURN_TOKEN|>"
    start = "<BOS_TOKEN>"

    def role(self, name):
        return {"assistant": "CHATBOT"}.get(name, name.upper())


COMMAND_R = jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}
        {{ '<|START_OF_TURN_TOKEN|><|' + ('CHATBOT' if m.role == 'assistant' else m.role | upper) + '_TOKEN|>' }}
        {{ m.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif -%}""")


class SmolLM3(Family):
    """Its own system block says which mode of thinking is on, and on which day; contents are shown with their thinking."""

    def before(self, messages, tools, thought):
        has_system = messages[0]["role"] == "system"
        own = messages[0]["content"].rstrip() if has_system else "You are SmolLM."
        text = f"<|im_start|>system\n## Metadata\n\nToday: 01 January 2025\nReasoning Mode: /think\n\n{own}<|im_end|>\n"
        for message in messages[has_system:]:
            body = self.turn(message) if message["role"] == "assistant" else message["content"] + self.end
            text += f"<|im_start|>{message['role']}\n{body}\n"
        return text + "<|im_start|>assistant\n"

    def turn(self, message):
        return super().turn(message).lstrip("\n")


SMOLLM3 = jinja(r"""
    {%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' -%}
    {%- set block = '' if mode == '/think' else '<think>\n\n</think>\n' -%}
    {{ '<|im_start|>system\n## Metadata\n\nToday: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + mode + '\n\n' }}
    {{ (messages[0].content.rstrip() if messages[0].role == 'system' else 'You are SmolLM.') + '<|im_end|>\n' }}
    {%- for m in messages -%}
        {%- if m.role == 'assistant' -%}
            {%- generation -%}
                {{ '<|im_start|>assistant\n' + block + m.content.lstrip('\n') + '<|im_end|>\n' }}
            {%- endgeneration -%}
        {%- elif m.role != 'system' -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' + block }}{%- endif -%}""")


class GptOss(Family):
    """Thinking and answer in channels, one marker for the end of a turn and another for the end of an answer in the past."""

    def before(self, messages, tools, thought):
        text = "<|start|>system<|message|>Current date: 2025-01-01<|end|>"
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "assistant":
                text += f"<|start|>assistant<|channel|>final<|message|>{thought_of(message)[1]}<|end|>"
            else:
                text += f"<|start|>{'developer' if role == 'system' else role}<|message|>{content}<|end|>"
        return text + "<|start|>assistant"

    def turn(self, message):
        thought, content = thought_of(message)
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        return f"{analysis}<|channel|>final<|message|>{content}{self.end}"


GPT_OSS = jinja(r"""
    {{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' -}}
    {%- for m in messages -%}
        {%- if m.role == 'assistant' and loop.last and not add_generation_prompt -%}
            {%- if m.thinking -%}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}
            {{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- elif m.role == 'assistant' -%}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- else -%}
            {{ '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}
        {%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}""")

FAMILIES: dict[str, Family] = {
    "qwen2.5": Qwen25(chatml(Qwen25.automatic, True), CHATML_TOKENS, "<|im_end|>", tools=True),
    "smollm2": SmolLM2(chatml(SmolLM2.automatic, False), "<|im_start|> <|im_end|>", "<|im_end|>"),
    "qwen3": Qwen3(qwen3(QWEN_CALLS, NO_THINKING + "{%- endif -%}"), CHATML_TOKENS, "<|im_end|>", tools=True, thinking="own"),
    "qwen3.5": Qwen35(
        qwen3(QWEN35_CALLS, NO_THINKING + r"{%- else -%}{{ '<think>\n' }}{%- endif -%}"), CHATML_TOKENS, "<|im_end|>",
        tools=True, thinking="own",
    ),
    "smollm3": SmolLM3(SMOLLM3, "<|im_start|> <|im_end|>", "<|im_end|>"),
    "gpt-oss": GptOss(
        GPT_OSS, "<|start|> <|message|> <|channel|> <|end|> <|return|>", "<|return|>", thinking="own",
    ),
    "llama-2": Llama2(LLAMA2, "<s> </s>", "</s>", bos="<s>", metaspace=True),
    "llama-3": Llama3(
        LLAMA3, "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>",
        bos="<|begin_of_text|>", tools=True,
    ),
    "mistral": Mistral(
        MISTRAL, "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "</s>", bos="<s>", tools=True, metaspace=True,
    ),
    "gemma": Gemma(GEMMA, "<bos> <eos> <start_of_turn> <end_of_turn>", "<end_of_turn>", bos="<bos>", eos="<eos>", metaspace=True),
    "deepseek": DeepSeek(
        DEEPSEEK, "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>", "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>", thinking="own",
    ),
    "phi-3": Phi3(
        bracketed(Phi3.form, final="<|endoftext|>"), "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>", "<|end|>",
        eos="<|endoftext|>",
    ),
    "phi-4": Phi4(bracketed(Phi4.form), "<|im_start|> <|im_sep|> <|im_end|>", "<|im_end|>"),
    "zephyr": Zephyr(bracketed(Zephyr.form), "<s> </s>", "</s>", bos="<s>", metaspace=True),
    "granite": Granite(
        bracketed(Granite.form), "<|start_of_role|> <|end_of_role|> <|end_of_text|>", "<|end_of_text|>",
    ),
    "command-r": CommandR(
        COMMAND_R, "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
    ),
}  # fmt: skip
