"""The tokenizer of model=tiny: a small byte-level BPE, trained here on text generated here.

Nothing random and no trainer of a library takes part (ties are broken by the pair itself), so ids are the same on
every machine and with every version of ``tokenizers``. Every byte has an id: any text encodes and decodes exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from twinkle_research.model.prepare.chat_template import CHAT_TEMPLATE

VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2
PAD_ID, END_ID = 0, 2

_SUBJECTS = "I you we they the model the teacher a child my friend the team someone this answer that question".split()
_VERBS = "is was has can will asks says knows makes trains learns writes helps gives finds thinks wants calls".split()
_OBJECTS = (
    "the name the number the sum the word the city the country the capital the question the answer the weather "
    "a story a list a tool a reason a result an example an assistant good morning your help two apples"
).split()
_ENDINGS = "for you with me in the end of the day to the user and then from here because it is so about this".split()
_QUESTIONS = "What Who Where When Why How Which Can Could Please Tell Write Explain Compute Reverse Sort Count".split()
_FRAGMENTS = (
    "system\n user\n assistant\n tool\n",
    "<think>\n</think>\n\n<tool_call>\n</tool_call>\n<tools>\n</tools>\n",
    '{"name": "add", "arguments": {"a": "b"}}\n',
    '{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}\n',
    "+ - * / = ( ) , . ! ? : ; ' \" \n",
)


def training_text() -> str:
    """Plain sentences built from fixed word lists, plus the pieces that chat templates are made of."""
    lines = []
    for i, verb in enumerate(_VERBS):
        for j, obj in enumerate(_OBJECTS):
            subject, ending = _SUBJECTS[(i + j) % len(_SUBJECTS)], _ENDINGS[(i * 3 + j) % len(_ENDINGS)]
            lines.append(f"{subject} {verb} {obj} {ending}.")
            lines.append(f"{_QUESTIONS[(i + 2 * j) % len(_QUESTIONS)]} {verb} {subject} {obj}?")
    lines.extend(_FRAGMENTS * 40)
    return "\n".join(lines)


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged, i = [], 0
    while i < len(symbols):
        if symbols[i : i + 2] == pair:
            merged.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return tuple(merged)


def train_bpe(words: Counter[str], num_merges: int) -> list[tuple[str, str]]:
    """Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909); equal counts: the lexicographically first pair."""
    split = {tuple(word): count for word, count in words.items()}
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for symbols, count in split.items():
            for pair in zip(symbols, symbols[1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = {_merge(symbols, best): count for symbols, count in split.items()}
    return merges


def _pre_tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}


def byte_level_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]], special: dict[str, int]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE with single digits and no automatic special tokens."""
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, i in special.items()
    ]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [list(m) for m in merges],
    }  # fmt: skip
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(), "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip


def write_tokenizer(folder: Path, tokenizer: dict[str, Any], settings: dict[str, Any]) -> None:
    """Writes tokenizer.json and tokenizer_config.json as transformers reads them."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False), encoding="utf-8")
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "add_prefix_space": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fixed | settings, indent=1, ensure_ascii=False), encoding="utf-8")


def write_tiny_tokenizer(folder: Path, max_length: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    splitter = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    words = Counter(word for word, _ in splitter.pre_tokenize_str(training_text()))
    alphabet = sorted(ByteLevel.alphabet())
    merges = train_bpe(words, VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet))
    special = {text: i for i, text in enumerate(SPECIAL_TOKENS)}
    vocab = dict(special)
    for token in [*alphabet, *(a + b for a, b in merges)]:
        vocab[token] = len(vocab)
    settings = {
        "bos_token": None, "eos_token": TURN_END, "pad_token": END_OF_TEXT, "unk_token": END_OF_TEXT,
        "model_max_length": max_length, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    write_tokenizer(folder, byte_level_tokenizer(vocab, merges, special), settings)
