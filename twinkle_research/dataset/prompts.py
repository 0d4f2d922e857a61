"""Prompts with answers: what reinforcement learning samples from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_research.data_format import InputFeature, Message, Trajectory
from twinkle_research.dataset.build import meta_of, processors_of
from twinkle_research.dataset.config import GeneratedDataConfig
from twinkle_research.dataset.encoding import EncodeOptions, encode_rows
from twinkle_research.dataset.features import Features
from twinkle_research.dataset.formats import to_trainable
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.dataset.pipeline import processed, read_rows
from twinkle_research.dataset.rows import DroppedRow, Origin, Row, RowReport, SourceRow
from twinkle_research.dataset.sources import DatasetMeta, find_source
from twinkle_research.dataset.store import MemoryWriter
from twinkle_research.dataset.tasks.base import TaskSource
from twinkle_research.dataset.tasks.build import build_task
from twinkle_research.errors import ConfigError, DataError

if TYPE_CHECKING:
    from twinkle_research.dataset.config import CommonDataConfig, PromptsDataConfig
    from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)

_PROMPT = ("messages", "prompt", "system", "tools")  # what a prompt is made of; ``completion`` is left out


class PromptDataset(Features):
    """Prompts, encoded with the generation prompt, and the other columns of their rows. ``[i]`` is an InputFeature.

    A prompt that is too long is refused, cut or left out, as the template's truncation strategy says; ``dropped`` lists those
    that were left out. ``shuffle`` and ``seed`` decide the order in which ``take`` gives them.
    """

    def __init__(
        self,
        name: str,
        rows: Iterable[SourceRow],
        template: Template,
        *,
        shuffle: bool = True,
        seed: int = 0,
        on_error: str = "raise",
        num_proc: int = 1,
    ):
        self.name = name
        self.shuffle = shuffle
        self.seed = seed
        self.dropped: list[DroppedRow] = []
        self._rows: list[Row] = []
        report = RowReport(on_error, lambda origin, reason: self.dropped.append(DroppedRow(str(origin), reason)))
        writer, stage = MemoryWriter(), report.stage("encoding prompts")
        given: list[Row] = []
        options = EncodeOptions(num_proc=num_proc)
        asked = _prompts(_asked(rows, report), given)
        for keys, chunk in encode_rows(template, asked, report, stage, options, add_generation_prompt=True):
            writer.add(keys, chunk)
            done = given[: len(keys)]
            del given[: len(keys)]
            self._rows += [row for row, count in zip(done, chunk.counts, strict=True) if count]
        for text in report.warnings():
            logger.warning("%s: %s", name, text)
        if not self._rows:
            raise DataError(
                f"{name}: none of {stage.total} prompts can be used" + (f": {report.summary()}" if stage.total else "")
            )
        self._store = writer.store()
        self._order = lru_cache(maxsize=2)(lambda epoch: self.epoch_order(epoch, self.shuffle, self.seed))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> InputFeature:
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        return self._store.feature(index % len(self))

    @property
    def encoded(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokens of the prompts and the columns that rewards see."""
        digest = hashlib.sha256(self._store.fingerprint.encode())
        for row in self._rows:
            digest.update(json.dumps(row, ensure_ascii=True, default=str).encode() + b"\n")
        return digest.hexdigest()

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self._store.lengths(numbers)

    def prompt_ids(self, index: int) -> list[int]:
        """Token ids, generation prompt included."""
        return self[index]["input_ids"]

    def origin(self, index: int) -> str:
        """Where the row came from: "file:line" or "task/split[number]"."""
        return str(self._store.origin(index))

    def row(self, index: int) -> Row:
        """``messages`` (and ``tools``) of the prompt, ``answer`` where there is one, and the row's other columns."""
        row = self._rows[index]
        prompt = to_trainable(_prompt_of(row), prompt_only=True)
        messages: list[Message] = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
        tools = {"tools": prompt["tools"]} if "tools" in prompt else {}
        return {"messages": messages, **tools, **_columns(row)}

    def trajectory(self, index: int) -> Trajectory:
        """The row as rollouts and rewards know it: columns other than the prompt are ``user_data``; ``row`` says which it is."""
        row = self.row(index)
        trajectory: Trajectory = {"messages": row["messages"], "row": self.origin(index)}
        if "tools" in row:
            trajectory["tools"] = row["tools"]
        trajectory["user_data"] = [[key, value] for key, value in _columns(self._rows[index]).items()]
        return trajectory

    def take(self, start: int, count: int) -> list[int]:
        """Numbers of the prompts at ``start``, ``start + 1``, ... of the endless sequence of epochs, ``count`` of them.

        Epoch e has an order of its own, keyed by (seed, e); the position is all that must be kept to continue.
        """
        return [int(self._order(at // len(self))[at % len(self)]) for at in range(start, start + count)]


def build_prompts(config: CommonDataConfig, template: Template, seed: int) -> tuple[PromptDataset, PromptDataset | None]:
    """(training prompts, held-out prompts or None) of a task (see ``dataset.config.TASKS``).

    The two have no row in common. Of generated tasks the config alone decides which are held out, of others (config, seed).
    """

    def prompts(name: str, rows: Iterable[SourceRow], on_error: str) -> PromptDataset:
        made = PromptDataset(name, rows, template, shuffle=config.shuffle, seed=seed, on_error=on_error, num_proc=config.num_proc)
        logger.info("%s: %d prompts, %d tokens", name, len(made), int(made.lengths(np.arange(len(made))).sum()))
        return made

    if isinstance(config, GeneratedDataConfig):
        splits = ["train", "eval"] if config.eval_rows else ["train"]
        sources = [TaskSource(build_task(config, split)) for split in splits]
        found = [prompts(source.name, _numbered(source), "raise") for source in sources]
        return found[0], found[1] if config.eval_rows else None
    train, name = _read(config, meta_of(config, "data")), meta_of(config, "data").name
    on_error = config.on_error.name
    if config.eval_path is not None:
        if config.eval_rows:
            raise ConfigError("data.eval_rows has no effect when data.eval_path is set; give one of them")
        held = _read(config, DatasetMeta(config.eval_path))
        return prompts(name, train, on_error), prompts(config.eval_path, held, on_error)
    if not config.eval_rows:
        return prompts(name, train, on_error), None
    if config.eval_rows >= len(train):
        raise DataError(f"data.eval_rows={config.eval_rows} leaves none of the {len(train)} rows of {name} to train on")
    chosen = set(keyed_permutation(len(train), seed, "hold_out")[: config.eval_rows].tolist())
    held = [row for i, row in enumerate(train) if i in chosen]
    rest = [row for i, row in enumerate(train) if i not in chosen]
    return prompts(name, rest, on_error), prompts(f"{name} (held out)", held, on_error)


def _read(config: PromptsDataConfig, meta: DatasetMeta) -> list[SourceRow]:
    report = RowReport(config.on_error.name, lambda origin, reason: None)
    reading = report.stage("reading")
    rows = list(processed(read_rows(find_source(meta), meta, report, reading), processors_of(config, "data"), report))
    for text in report.warnings():
        logger.warning("%s: %s", meta.name, text)
    if not rows:
        summary = report.summary()
        raise DataError(f"{meta.name}: no rows" + (f": {summary}" if summary else ""))
    return rows


def _numbered(source: TaskSource) -> Iterator[SourceRow]:
    return (SourceRow(i, origin, row) for i, (origin, row) in enumerate(source.rows(_no_bad_row)))


def _no_bad_row(origin: Origin, reason: str) -> None:
    raise DataError(f"{origin}: {reason}")


def _prompts(rows: Iterable[SourceRow], given: list[Row]) -> Iterator[SourceRow]:
    """The prompts of rows, which are appended to ``given`` as they pass."""
    for number, origin, row in rows:
        given.append(row)
        yield SourceRow(number, origin, _prompt_of(row))


def _asked(rows: Iterable[SourceRow], report: RowReport) -> Iterator[SourceRow]:
    """Those whose prompt says something."""
    stage = report.stage("looking at prompts")
    for source in rows:
        stage.total += 1
        prompt = source.row.get("prompt")
        if isinstance(prompt, str) and not prompt.strip():
            report.bad(stage, source.origin, "the prompt is empty")
        else:
            yield source


def _prompt_of(row: Row) -> Row:
    return {key: row[key] for key in _PROMPT if key in row}


def _columns(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in (*_PROMPT, "completion")}
