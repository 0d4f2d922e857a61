"""The key of encoded rows: a hash of all that decides them. Another key is another folder of the cache."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from twinkle_research.dataset.rows import Processor
from twinkle_research.template.base import Template

_PACKAGE = "twinkle_research"
# The code that makes tokens of rows: folders and files of our package, and the libraries that it uses for it.
_OWN_CODE = ("template", "dataset", "dataset/tasks", "randomness.py", "symbols.py")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "numpy", "pyarrow", "datasets")
# What Template is made from is in its tokenizer; the rest of its arguments are settings.
_NOT_SETTINGS = {"self", "model_id", "tokenizer", "revision", "trust_remote_code"}
# Where a tokenizer was loaded from and how says nothing about what it does.
_WHEREABOUTS = {
    "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "tokenizer_object", "auto_map",
    "is_local", "local_files_only", "_commit_hash", "chat_template",
}  # fmt: skip


def encoding_key(
    source: str | None, data_slice: Iterable[int] | None, processors: Sequence[Processor], on_error: str, template: Template
) -> str | None:
    """SHA-256, or None where code that is not ours takes part, which may change without a sign.

    ``source``: hash of what the rows are read from, None where that cannot be known.
    """
    settings = template_settings(template)
    if source is None or settings is None or not all(processor.own for processor in processors):
        return None
    parts = {
        "source": source,
        "slice": _slice(data_slice),
        "processors": [[processor.name, processor.init_args] for processor in processors],
        "on_error": on_error,
        "template": settings,
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stream_fingerprint(
    source: str | Sequence[str], data_slice: Iterable[int] | None, processors: Sequence[Processor], template: Template
) -> str:
    """SHA-256 over what features are made of. Code that is not ours has its name, since rows must not be read for this."""
    cls = type(template)
    parts = {
        "source": source,
        "slice": _slice(data_slice),
        "processors": [[processor.name, processor.init_args] for processor in processors],
        "template": template_settings(template) or f"{cls.__module__}.{cls.__qualname__}",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _slice(data_slice: Iterable[int] | None) -> str | list[int] | None:
    return None if data_slice is None else repr(data_slice) if isinstance(data_slice, range) else list(data_slice)


def template_settings(template: Template) -> dict[str, Any] | None:
    """All of a template that decides tokens; None for a class or tokenizer that is not known to the last line.

    A template keeps each of its settings under the name of the argument that gives it.
    """
    cls, tokenizer = type(template), template.tokenizer
    is_ours = all(base.__module__.split(".")[0] == _PACKAGE for base in cls.__mro__[:-1])
    # A slow tokenizer, or one that came with code of its own, does what that code says.
    is_known = isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer).__module__.split(".")[0] == "transformers"
    if not is_ours or not is_known:
        return None
    names = set(inspect.signature(cls).parameters) - _NOT_SETTINGS
    return {
        "class": cls.__qualname__,
        "settings": {name: getattr(template, name) for name in sorted(names)},
        "tokenizer": _tokenizer_digest(tokenizer),
        "split_special_tokens": tokenizer.split_special_tokens,
        "tokenizer_class": type(tokenizer).__qualname__,
        "tokenizer_settings": {
            name: repr(value) for name, value in sorted(tokenizer.init_kwargs.items()) if name not in _WHEREABOUTS
        },
        "special_tokens": {name: repr(value) for name, value in tokenizer.special_tokens_map.items()},
        "chat_template": repr(tokenizer.chat_template),
    }


def _tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # what the last call asked for
        content.pop(state)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@cache
def code_digest() -> str:
    """Over the source text of our modules that decide tokens, and the versions of the libraries that they use."""
    package = Path(__file__).resolve().parents[1]
    files = [file for name in _OWN_CODE for file in ([package / name] if name.endswith(".py") else (package / name).glob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(package)}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()
