"""Small tokenizers with chat templates of many styles, all written for these tests."""

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from twinkle_research.data_format import IGNORE_INDEX

BOS, EOS = "<bos>", "<eos>"
SPECIAL = f"{BOS} {EOS} <|start|> <|end|> <|head|> <|/head|> <|turn_end|> [INST] [/INST] <turn> </turn> <|return|>".split()
PLAIN_ADDED = ["<think>", "</think>", "<call>", "</call>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital of France.",
    "user assistant system tool model\n\nHello! How are you today? I am fine, thank you.\n1 2 3 4 5 6 7 8 9 10",
    '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n\nYou are a helpful assistant.   \n\n\n',
] * 3


def _jinja(lines: str) -> str:
    """One template from indented lines; line breaks and indentation are not part of it."""
    return "".join(line.strip() for line in lines.strip().splitlines())


_CALLS = _jinja(r"""
    {%- for c in m.tool_calls or [] -%}
        {{ '\n<call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</call>' }}
    {%- endfor -%}""")
_TOOLS = _jinja(r"""
    {%- if tools -%}
        {{ '<|start|>system\nTools:\n' }}{%- for t in tools -%}{{ t | tojson + '\n' }}{%- endfor -%}{{ '<|end|>\n' }}
    {%- endif -%}""")
_PROMPT = r"{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' }}{%- endif -%}"

CHATML = _TOOLS + _jinja(rf"""
    {{%- for m in messages -%}}
        {{{{ '<|start|>' + m.role + '\n' + m.content }}}}{_CALLS}{{{{ '<|end|>\n' }}}}
    {{%- endfor -%}}{_PROMPT}""")
CHATML_MARKED = _TOOLS + _jinja(rf"""
    {{%- for m in messages -%}}
        {{{{ '<|start|>' + m.role + '\n' }}}}
        {{%- if m.role == 'assistant' -%}}
            {{%- generation -%}}{{{{ m.content }}}}{_CALLS}{{{{ '<|end|>' }}}}{{%- endgeneration -%}}
        {{%- else -%}}{{{{ m.content + '<|end|>' }}}}{{%- endif -%}}
        {{{{ '\n' }}}}
    {{%- endfor -%}}{_PROMPT}""")
# Markers as careless authors set them: one leaves the end marker out, the other takes header and line break in.
CHATML_MARKED_SHORT = CHATML_MARKED.replace("{{ '<|end|>' }}{%- endgeneration -%}", "{%- endgeneration -%}{{ '<|end|>' }}")
CHATML_MARKED_WIDE = _TOOLS + _jinja(rf"""
    {{%- for m in messages -%}}
        {{%- if m.role == 'assistant' -%}}
            {{%- generation -%}}{{{{ '<|start|>assistant\n' + m.content }}}}{_CALLS}{{{{ '<|end|>\n' }}}}{{%- endgeneration -%}}
        {{%- else -%}}{{{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}}}{{%- endif -%}}
    {{%- endfor -%}}{_PROMPT}""")
# Adds its own system message where there is none.
AUTO_SYSTEM = r"{%- if messages[0].role != 'system' -%}{{ '<|start|>system\nYou are helpful.<|end|>\n' }}{%- endif -%}" + CHATML
# Begin-of-text in the template, headers, contents trimmed, tools inside the first user message.
HEADERS = _jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}
        {{ '<|head|>' + m.role + '<|/head|>\n\n' }}
        {%- if tools and m.role == 'user' and loop.index0 <= 1 -%}{{ tools | tojson + '\n' }}{%- endif -%}
        {{ m.content | trim }}
        {%- for c in m.tool_calls or [] -%}
            {{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}
        {%- endfor -%}
        {{ '<|turn_end|>' }}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|head|>assistant<|/head|>\n\n' }}{%- endif -%}""")
# No system role, no generation prompt, a space before the answer.
INST = _jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}
        {%- elif m.role == 'assistant' -%}{{ ' ' + m.content + eos_token }}
        {%- else -%}{{ raise_exception('Only user and assistant roles are supported') }}{%- endif -%}
    {%- endfor -%}""")
# The system text moves to the last user message: earlier turns look different once there is a later one.
INST_SYSTEM_LAST = _jinja(r"""
    {{- bos_token -}}{%- set ns = namespace(system='', last=-1) -%}
    {%- for m in messages -%}
        {%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- endif -%}
        {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
    {%- endfor -%}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}
            {{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + ' [/INST]' }}
        {%- elif m.role == 'assistant' -%}{{ ' ' + m.content + eos_token }}{%- endif -%}
    {%- endfor -%}""")
# The assistant is called model, contents trimmed, no system role.
MODEL_ROLE = _jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}
        {%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
        {{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}""")
_SPLIT_THINKING = _jinja(r"""
    {%- set content = m.content -%}{%- set thought = m.reasoning_content or '' -%}
    {%- if not thought and '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}""")
_last_query = _jinja(r"""
    {%- set ns = namespace(last=-1) -%}
    {%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}""")


def _thinking(prompt: str) -> str:
    """Old thinking is dropped; the last turn always shows a block, empty where there is no thinking."""
    turn = _jinja(r"""
        {%- if loop.index0 > ns.last and (loop.last or thought) -%}
            {{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif -%}{{ content }}""")
    return (
        _TOOLS
        + _last_query
        + _jinja(rf"""
        {{%- for m in messages -%}}
            {{{{ '<|start|>' + m.role + '\n' }}}}
            {{%- if m.role == 'assistant' -%}}{_SPLIT_THINKING}{turn}{_CALLS}{{%- else -%}}{{{{ m.content }}}}{{%- endif -%}}
            {{{{ '<|end|>\n' }}}}
        {{%- endfor -%}}
        {{%- if add_generation_prompt -%}}{{{{ '<|start|>assistant\n' }}}}{prompt}{{%- endif -%}}""")
    )


_EMPTY_BLOCK = r"{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}"
THINKING = _thinking(_EMPTY_BLOCK + "{%- endif -%}")
# With markers, which take the injected block in.
THINKING_MARKED = THINKING.replace("{%- if loop.index0 > ns.last", "{%- generation -%}{%- if loop.index0 > ns.last").replace(
    "{%- else -%}{{ m.content }}{%- endif -%}{{ '<|end|>\\n' }}",
    "{{ '<|end|>' }}{%- endgeneration -%}{%- else -%}{{ m.content + '<|end|>' }}{%- endif -%}{{ '\\n' }}",
)
# The generation prompt opens the thinking.
THINKING_OPEN = _thinking(_EMPTY_BLOCK + r"{%- else -%}{{ '<think>\n' }}{%- endif -%}")
# Thinking is always dropped from what is shown, though the generation prompt opens it.
THINKING_LOST = _jinja(r"""
    {{- bos_token -}}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}{{ '[INST]' + m.content }}
        {%- elif m.role == 'assistant' -%}{{ '[/INST]' + m.content.split('</think>')[-1] + eos_token }}{%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '[/INST]<think>\n' }}{%- endif -%}""")
# One marker inside the conversation, another at its end; a turn's header says more than the generation prompt.
CHANNELS = _jinja(r"""
    {%- for m in messages -%}
        {%- if m.role == 'assistant' -%}
            {{ '<|start|>assistant<|head|>final<|/head|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
        {%- else -%}{{ '<|start|>' + m.role + '<|/head|>' + m.content + '<|end|>' }}{%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}""")
# The same with thinking under another key, in a channel of its own that is dropped from all turns but the last.
CHANNELS_THINKING = CHANNELS.replace(
    "'<|start|>assistant<|head|>final",
    "('<|start|>assistant<|head|>analysis<|/head|>' + m.thinking + '<|end|>' if m.thinking and loop.last else '')"
    " + '<|start|>assistant<|head|>final",
)
# An end-of-text token after the whole conversation.
FINAL_EOS = CHATML.removesuffix("{%- endif -%}") + "{%- else -%}{{ eos_token }}{%- endif -%}"
# Headers and markers are plain text, so they may merge with contents.
PLAIN_TEXT = _jinja(r"""
    {%- for m in messages -%}{{ m.role + ': ' + m.content + '###\n' }}{%- endfor -%}
    {%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}""")
# Headers, but add_generation_prompt is ignored.
NO_PROMPT = CHATML.removesuffix(_PROMPT)
NO_END = CHATML.replace(r"{{ '<|end|>\n' }}", "")
# Tool-call arguments are joined as text, as some templates do.
TEXT_ARGUMENTS = CHATML.replace(
    "{'name': c.function.name, 'arguments': c.function.arguments} | tojson",
    "'{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}'",
)
# Tool calls are shown only where there is no content at all.
NULL_CONTENT = TEXT_ARGUMENTS.replace("m.content }}", "(m.content if m.content is not none else '') }}").replace(
    "m.tool_calls or []", "(m.tool_calls or [] if m.content is none else [])"
)

STYLES = {key.lower(): text for key, text in list(globals().items()) if key.isupper() and "for m in messages" in str(text)}


def byte_level(special: list[str], size: int) -> Tokenizer:
    """As GPT-2, Qwen and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(special: list[str], size: int, prepend_scheme: str) -> Tokenizer:
    """In the manner of sentencepiece, with bytes as a last resort."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = ["<unk>", *special, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in CORPUS], trainer)
    return tokenizer


@lru_cache
def _backend() -> str:
    tokenizer = byte_level(SPECIAL, 420)
    # Adds a begin-of-text token and trims offsets, as real tokenizers do.
    frame = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame])
    return tokenizer.to_str()


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A fresh byte-level tokenizer, pad = eos, with the given chat template (a key of STYLES, a template, or None)."""
    backend = Tokenizer.from_str(_backend())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    tokenizer.add_tokens(PLAIN_ADDED)
    if template is not None:
        tokenizer.chat_template = STYLES.get(template, template)
    return tokenizer


def make_metaspace_tokenizer(template: str, prepend_scheme: str) -> PreTrainedTokenizerFast:
    backend = metaspace(SPECIAL, 700, prepend_scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = STYLES[template]
    return tokenizer


WORD_CHATML = (
    r"{%- for m in messages -%}{{ '<S> ' + m.role + ' \n ' + m.content + ' <E> \n ' }}{%- endfor -%}"
    r"{%- if add_generation_prompt -%}{{ '<S> assistant \n ' }}{%- endif -%}"
)


def word_tokenizer(template: str, words: str = "u1 a1 u2 a2 a b c t1 t2") -> PreTrainedTokenizerFast:
    """One token a word, as in the cases."""
    names = f"<unk> <E> <S> system user assistant \n <B> {words}".split(" ")
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(dict.fromkeys(names))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    special = {"unk_token": "<unk>", "bos_token": "<B>", "eos_token": "<E>", "pad_token": "<E>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    return ["IGN" if i == IGNORE_INDEX else tokenizer.convert_ids_to_tokens(i) for i in ids]


def chat(*contents: str) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def trained(feature: dict) -> list[int]:
    return [label for label in feature["labels"] if label != IGNORE_INDEX]
