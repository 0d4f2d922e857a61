"""What the config group ``data`` says, carried out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_research.dataset.base import Dataset
from twinkle_research.dataset.cache import EncodedCache
from twinkle_research.dataset.config import (
    DataConfig,
    GeneratedDataConfig,
    Gsm8kDataConfig,
    MathDataConfig,
    MixDataConfig,
    PromptsDataConfig,
    ReadDataConfig,
    eval_path_of,
)
from twinkle_research.dataset.encoding import EncodeOptions
from twinkle_research.dataset.interleave import interleaving
from twinkle_research.dataset.mix import MixedDataset
from twinkle_research.dataset.pairs import Pairs
from twinkle_research.dataset.rows import Processor
from twinkle_research.dataset.sources import DatasetMeta
from twinkle_research.dataset.stream import IterableDataset
from twinkle_research.dataset.tasks.base import TaskSource
from twinkle_research.dataset.tasks.build import build_task
from twinkle_research.dataset.tasks.written import Gsm8kRows, MathRows, PromptRows
from twinkle_research.errors import ConfigError
from twinkle_research.template.base import build_template

if TYPE_CHECKING:
    from twinkle_research.dataset.config import CommonDataConfig, MixSource, SourceConfig
    from twinkle_research.dataset.features import Features
    from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)


def encoded_cache(config: CommonDataConfig, session: str | None = None, first: bool = True) -> EncodedCache:
    """The cache that ``config`` asks for. ``session``, ``first``: for the ranks of a run (see EncodedCache)."""
    folder = {} if config.cache_dir is None else {"root": Path(config.cache_dir).expanduser().resolve()}
    return EncodedCache(**folder, keep=config.cache, session=session, first=first)


def build_datasets(
    config: CommonDataConfig, template: Template, seed: int, cache: EncodedCache | None = None
) -> tuple[Features | IterableDataset, Features | None]:
    """(training data, held-out data or None), both encoded, except with ``data.streaming``; Pairs where the rows are preferences.

    It is rows that are held out, so no part of a split row is on both sides. Which ones depends on ``seed`` and the number
    of rows only; of tasks whose questions are made here, on the config alone.
    """
    eval_path = eval_path_of(config)
    if eval_path is not None and config.eval_rows:
        raise ConfigError("data.eval_rows has no effect when data.eval_path is set; give one of them")
    cache = cache or encoded_cache(config)
    builder = _Builder(config, template, seed, cache)
    if isinstance(config, MixDataConfig):
        train, held_out = builder.mixture(config)
    elif isinstance(config, GeneratedDataConfig):
        train, held_out = builder.generated(config)
    elif isinstance(config, DataConfig) and config.streaming:
        train, held_out = builder.stream(config), None
    else:
        train, held_out = builder.single(config)
    if eval_path is not None:
        processors = [] if isinstance(config, MixDataConfig) else processors_of(config, "data")
        held_out = builder.encoded(DatasetMeta(eval_path), template, processors)
    if config.pairs:
        train, held_out = Pairs(train), None if held_out is None else Pairs(held_out)
    sets, size = cache.size()
    if sets:
        logger.info("encoded rows are kept in %s (%d data set%s, %s)", cache.root, sets, "s" * (sets > 1), _bytes(size))
    return train, held_out


class _Builder:
    def __init__(self, config: CommonDataConfig, template: Template, seed: int, cache: EncodedCache):
        self.config = config
        self.template = template
        self.seed = seed
        self.cache = cache

    def generated(self, config: GeneratedDataConfig) -> tuple[Dataset, Dataset | None]:
        splits = ["train", "eval"] if config.eval_rows else ["train"]
        sources = [TaskSource(build_task(config, split)) for split in splits]
        found = [self.encoded(DatasetMeta(source.name, data=source), self.template, []) for source in sources]
        logger.info("%s: %d rows, %d tokens", found[0].meta.name, len(found[0]), found[0].tokens)
        return found[0], found[1] if config.eval_rows else None

    def single(self, config: DataConfig) -> tuple[Dataset, Dataset | None]:
        train = self.encoded(meta_of(config, "data"), self.template, processors_of(config, "data"))
        logger.info("%s: %d %s, %d tokens", train.meta.name, len(train), "answers" if config.pairs else "rows", train.tokens)
        return train, train.hold_out(config.eval_rows, self.seed) if config.eval_rows else None

    def stream(self, config: DataConfig) -> IterableDataset:
        if config.shuffle or config.eval_rows:
            key = "shuffle" if config.shuffle else "eval_rows"
            raise ConfigError(f"data.{key} needs all rows at hand, which data.streaming=true does not have")
        meta, processors = meta_of(config, "data"), processors_of(config, "data")
        return IterableDataset(meta, config.on_error.name, config.num_proc, processors).set_template(self.template)

    def mixture(self, config: MixDataConfig) -> tuple[MixedDataset, MixedDataset | None]:
        if not config.sources:
            raise ConfigError("data=mix needs data.sources")
        parts = []
        for number, source in enumerate(config.sources):
            key = f"data.sources[{number}]"
            parts.append(self.encoded(meta_of(source, key), self.template_of(source), processors_of(source, key)))
        weights = [source.weight for source in config.sources]
        held_out = self.held_out_of(parts, weights) if config.eval_rows else None
        train = MixedDataset(parts, weights, config.stop.name)
        for number, (part, taken) in enumerate(zip(parts, train.rows_of_sources, strict=True)):
            logger.info(
                "data.sources[%d] (%s): %d rows, %d tokens; an epoch takes %d rows of it, %.4g %%",
                number, part.meta.name, len(part), part.tokens, taken, 100 * taken / train.rows_per_epoch,
            )  # fmt: skip
        return train, held_out

    def held_out_of(self, parts: Sequence[Dataset], weights: Sequence[float]) -> MixedDataset:
        """``eval_rows`` rows, of each source as many as the mixture has among its first ``eval_rows``."""
        pattern = interleaving(weights, [self.config.eval_rows] * len(parts))[: self.config.eval_rows]
        counts = np.bincount(pattern, minlength=len(parts)).tolist()
        held = [part.hold_out(count, self.seed) for part, count in zip(parts, counts, strict=True) if count]
        return MixedDataset(held)

    def template_of(self, source: MixSource) -> Template:
        own = {name: getattr(source, name) for name in ("default_system", "enable_thinking", "train_on")}
        changed = {name: value for name, value in own.items() if value is not None}
        if not changed:
            return self.template
        return build_template(replace(self.config, **changed), tokenizer=self.template.tokenizer)

    def encoded(self, meta: DatasetMeta, template: Template, processors: Sequence[Processor]) -> Dataset:
        return Dataset.encoded_from(
            meta,
            template,
            processors=processors,
            on_error=self.config.on_error.name if isinstance(self.config, ReadDataConfig) else "raise",
            options=EncodeOptions(num_proc=self.config.num_proc),
            cache=self.cache,
        )


def meta_of(source: SourceConfig, key: str) -> DatasetMeta:
    if (source.path is None) == (source.dataset_id is None):
        raise ConfigError(f"give one of {key}.path and {key}.dataset_id")
    limit = None if source.limit is None else range(source.limit)
    place: Any = source.path if source.path is not None else source.dataset_id
    return DatasetMeta(place, source.subset, source.split, data_slice=limit)


def processors_of(source: SourceConfig, key: str) -> list[Processor]:
    """The user's own, then the one that the option itself has."""
    found = []
    if source.processor is not None:
        found.append(Processor(source.processor, dict(source.processor_args), f"{key}.processor"))
    elif source.processor_args:
        raise ConfigError(f"{key}.processor_args has no effect without {key}.processor")
    if isinstance(source, Gsm8kDataConfig):
        found.append(Processor(Gsm8kRows, {"prompt": source.prompt}))
    elif isinstance(source, MathDataConfig):
        found.append(Processor(MathRows, {"prompt": source.prompt}))
    elif isinstance(source, PromptsDataConfig):
        found.append(Processor(PromptRows, {"prompt_key": source.prompt_key, "answer_key": source.answer_key}))
    return found


def _bytes(size: int) -> str:
    for unit, amount in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= amount:
            return f"{size / amount:.3g} {unit}"
    return f"{size} B"
