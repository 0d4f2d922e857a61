"""What a family of chat formats is for the tests, and the families that use ChatML's markers. See families.py."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from chat_styles import byte_level, metaspace
from transformers import PreTrainedTokenizerFast


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_of(call: dict, key: str = "arguments") -> dict:
    arguments = call["function"]["arguments"]
    return {"name": call["function"]["name"], key: json.loads(arguments) if isinstance(arguments, str) else arguments}


def thought_of(message: dict) -> tuple[str, str]:
    """(thinking, content) of an assistant message, wherever the thinking stands."""
    content = message["content"] or ""
    if content.startswith("<think>\n"):
        thought, content = content.removeprefix("<think>\n").split("\n</think>\n\n", 1)
        return thought, content
    return message.get("reasoning_content", ""), content


@dataclass
class Family(ABC):
    """``thinking``: "own" (a place for it), "inline" (part of the content), "no" (not shown, so refused)."""

    template: str
    special: str  # added tokens, separated by spaces
    end: str  # of an assistant turn
    bos: str | None = None
    eos: str | None = None
    system: bool = True
    tools: bool = False
    thinking: str = "inline"
    metaspace: bool = False

    @abstractmethod
    def before(self, messages: list[dict], tools: list | None, thought: bool) -> str:
        """``thought``: whether the turn that comes has thinking."""

    def turn(self, message: dict) -> str:
        thought, content = thought_of(message)
        return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + content + self.calls(message) + self.end

    def calls(self, message: dict) -> str:
        return ""

    @lru_cache  # noqa: B019 (one of each family, for the whole test run)
    def tokenizer(self) -> PreTrainedTokenizerFast:
        special = self.special.split()
        backend = metaspace(special, 800, "first") if self.metaspace else byte_level(special, 500)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=self.bos, eos_token=self.eos or self.end)
        tokenizer.chat_template = self.template
        return tokenizer

    __hash__ = object.__hash__


def jinja(lines: str) -> str:
    """One template from indented lines; line breaks and indentation are not part of it."""
    return "".join(line.strip() for line in lines.strip().splitlines())


# --- ChatML: Qwen2.5, SmolLM2, Qwen3, Qwen3.5 -------------------------------------------------------------------------

_QWEN_TOOLS = r"""
    {%- if tools -%}
        {{ '\n\n# Tools\n\nSignatures of the functions, within <tools></tools>:\n<tools>' }}
        {%- for t in tools -%}{{ '\n' + t | tojson }}{%- endfor -%}{{ '\n</tools>\n\nAnswer with <tool_call></tool_call>.' }}
    {%- endif -%}"""
QWEN_CALLS = r"""
    {%- for c in m.tool_calls or [] -%}
        {%- if (loop.first and content) or not loop.first -%}{{ '\n' }}{%- endif -%}
        {{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
        {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor -%}"""
_QWEN_RESULTS = r"""
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"""


class ChatML(Family):
    automatic = ""  # system text where the conversation has none

    def opening(self, messages, tools) -> str:
        first = messages[0]["content"] if messages[0]["role"] == "system" else self.automatic
        if not first and not tools:
            return ""
        listed = "".join("\n" + dumps(tool) for tool in tools or ())
        section = (
            "\n\n# Tools\n\nSignatures of the functions, within <tools></tools>:\n<tools>"
            + listed
            + "\n</tools>\n\nAnswer with <tool_call></tool_call>."
        )
        return f"<|im_start|>system\n{first}{section if tools else ''}<|im_end|>\n"

    def history(self, messages, tools) -> str:
        text = self.opening(messages, tools)
        last_query = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "tool":
                opens = messages[i - 1]["role"] != "tool"
                closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
                text += ("<|im_start|>user" if opens else "") + f"\n<tool_response>\n{content}\n</tool_response>"
                text += "<|im_end|>\n" if closes else ""
            elif role == "assistant":
                text += "<|im_start|>assistant\n" + self.past(message, i > last_query) + "\n"
            elif role != "system":
                text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
        return text

    def past(self, message, recent: bool) -> str:
        return self.turn(message)

    def before(self, messages, tools, thought):
        return self.history(messages, tools) + "<|im_start|>assistant\n"

    def calls(self, message):
        thought, content = thought_of(message)
        content = content or (thought if self.thinking == "inline" else "")  # which is then part of the content
        texts = [f"<tool_call>\n{dumps(call_of(c))}\n</tool_call>" for c in message.get("tool_calls", [])]
        return ("\n" if texts and content else "") + "\n".join(texts)


def chatml(automatic: str, tools: bool) -> str:
    return jinja(rf"""
        {{%- if messages[0].role == 'system' or {"true" if automatic else "false"} or tools -%}}
            {{{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '{automatic}') }}}}
            {_QWEN_TOOLS if tools else ""}{{{{ '<|im_end|>\n' }}}}
        {{%- endif -%}}
        {{%- for m in messages -%}}
            {{%- set content = m.content -%}}
            {{%- if m.role == 'assistant' -%}}{{{{ '<|im_start|>assistant\n' + content }}}}{QWEN_CALLS}{{{{ '<|im_end|>\n' }}}}
            {{%- elif m.role == 'tool' -%}}{_QWEN_RESULTS}
            {{%- elif m.role != 'system' -%}}{{{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}}}{{%- endif -%}}
        {{%- endfor -%}}
        {{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\n' }}}}{{%- endif -%}}""")


CHATML_TOKENS = "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <think> </think>"


class Qwen25(ChatML):
    automatic = "You are a helpful assistant."


class SmolLM2(ChatML):
    automatic = "You are a small and helpful assistant."


_QWEN3_TURN = r"""
    {%- set thought = m.reasoning_content or '' -%}
    {%- if not thought and '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{ '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
        {{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else -%}{{ content }}{%- endif -%}"""


def qwen3(calls: str, prompt: str) -> str:
    return jinja(rf"""
        {{%- set ns = namespace(last=-1) -%}}
        {{%- for m in messages -%}}{{%- if m.role == 'user' -%}}{{%- set ns.last = loop.index0 -%}}{{%- endif -%}}{{%- endfor -%}}
        {{%- if messages[0].role == 'system' or tools -%}}
            {{{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}}}
            {_QWEN_TOOLS}{{{{ '<|im_end|>\n' }}}}
        {{%- endif -%}}
        {{%- for m in messages -%}}
            {{%- set content = m.content -%}}
            {{%- if m.role == 'assistant' -%}}{_QWEN3_TURN}{calls}{{{{ '<|im_end|>\n' }}}}
            {{%- elif m.role == 'tool' -%}}{_QWEN_RESULTS}
            {{%- elif m.role != 'system' -%}}{{{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}}}{{%- endif -%}}
        {{%- endfor -%}}
        {{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\n' }}}}{prompt}{{%- endif -%}}""")


NO_THINKING = r"{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}"


class Qwen3(ChatML):
    """Old thinking is dropped; a turn after the last user message shows it."""

    def past(self, message, recent):
        thought, content = thought_of(message)
        if recent and thought:
            return self.turn(message)
        return content + self.calls(message) + self.end

    def before(self, messages, tools, thought):
        # A turn without thinking follows the block that switches it off.
        return super().before(messages, tools, thought) + ("" if thought else "<think>\n\n</think>\n\n")


QWEN35_CALLS = r"""
    {%- for c in m.tool_calls or [] -%}
        {%- if loop.first and content -%}{{ '\n\n' }}{%- elif not loop.first -%}{{ '\n' }}{%- endif -%}
        {{ '<tool_call>\n<function=' + c.function.name + '>\n' }}
        {%- for name, value in c.function.arguments | items -%}
            {{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
        {%- endfor -%}
        {{ '</function>\n</tool_call>' }}
    {%- endfor -%}"""


class Qwen35(Qwen3):
    """As Qwen3, but the generation prompt opens the thinking, and calls are not JSON."""

    def turn(self, message):
        return super().turn(message).removeprefix("<think>\n")

    def past(self, message, recent):
        thought, content = thought_of(message)
        if recent and thought:
            return "<think>\n" + self.turn(message)
        return content + self.calls(message) + self.end

    def before(self, messages, tools, thought):
        return ChatML.before(self, messages, tools, thought) + ("<think>\n" if thought else "<think>\n\n</think>\n\n")

    def calls(self, message):
        texts = []
        for call in map(call_of, message.get("tool_calls", [])):
            text = f"<tool_call>\n<function={call['name']}>\n"
            for name, value in call["arguments"].items():
                text += f"<parameter={name}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"
            texts.append(text + "</function>\n</tool_call>")
        content = thought_of(message)[1]
        return ("\n\n" if texts and content else "") + "\n".join(texts)
