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
from twinkle_research.dataset.config import MixDataConfig
from twinkle_research.dataset.encoding import EncodeOptions
from twinkle_research.dataset.interleave import interleaving
from twinkle_research.dataset.mix import MixedDataset
from twinkle_research.dataset.rows import Processor
from twinkle_research.dataset.sources import DatasetMeta
from twinkle_research.dataset.stream import IterableDataset
from twinkle_research.errors import ConfigError
from twinkle_research.template.base import build_template

if TYPE_CHECKING:
    from twinkle_research.dataset.config import CommonDataConfig, DataConfig, MixSource, SourceConfig
    from twinkle_research.dataset.features import Features
    from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)


def encoded_cache(config: CommonDataConfig, session: str | None = None, first: bool = True) -> EncodedCache:
    """The cache that ``config`` asks for. ``session``, ``first``: for the ranks of a run (see EncodedCache)."""
    folder = {} if config.cache_dir is None else {"root": Path(config.cache_dir).expanduser().resolve()}
    return EncodedCache(**folder, keep=config.cache, session=session, first=first)


def build_datasets(
    config: DataConfig | MixDataConfig, template: Template, seed: int, cache: EncodedCache | None = None
) -> tuple[Features | IterableDataset, Dataset | MixedDataset | None]:
    """(training data, held-out data or None), both encoded, except with ``data.streaming``.

    It is rows that are held out, so no part of a split row is on both sides. Which ones depends on ``seed`` and the number
    of rows only.
    """
    if config.eval_path is not None and config.eval_rows:
        raise ConfigError("data.eval_rows has no effect when data.eval_path is set; give one of them")
    cache = cache or encoded_cache(config)
    builder = _Builder(config, template, seed, cache)
    if isinstance(config, MixDataConfig):
        train, held_out = builder.mixture(config)
    elif config.streaming:
        train, held_out = builder.stream(config), None
    else:
        train, held_out = builder.single(config)
    if config.eval_path is not None:
        processors = [] if isinstance(config, MixDataConfig) else _processors(config, "data")
        held_out = builder.encoded(DatasetMeta(config.eval_path), template, processors)
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

    def single(self, config: DataConfig) -> tuple[Dataset, Dataset | None]:
        train = self.encoded(_meta(config, "data"), self.template, _processors(config, "data"))
        logger.info("%s: %d rows, %d tokens", train.meta.name, len(train), train.tokens)
        return train, train.hold_out(config.eval_rows, self.seed) if config.eval_rows else None

    def stream(self, config: DataConfig) -> IterableDataset:
        if config.shuffle or config.eval_rows:
            key = "shuffle" if config.shuffle else "eval_rows"
            raise ConfigError(f"data.{key} needs all rows at hand, which data.streaming=true does not have")
        meta, processors = _meta(config, "data"), _processors(config, "data")
        return IterableDataset(meta, config.on_error.name, config.num_proc, processors).set_template(self.template)

    def mixture(self, config: MixDataConfig) -> tuple[MixedDataset, MixedDataset | None]:
        if not config.sources:
            raise ConfigError("data=mix needs data.sources")
        parts = []
        for number, source in enumerate(config.sources):
            key = f"data.sources[{number}]"
            parts.append(self.encoded(_meta(source, key), self.template_of(source), _processors(source, key)))
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
            on_error=self.config.on_error.name,
            options=EncodeOptions(num_proc=self.config.num_proc),
            cache=self.cache,
        )


def _meta(source: SourceConfig, key: str) -> DatasetMeta:
    if (source.path is None) == (source.dataset_id is None):
        raise ConfigError(f"give one of {key}.path and {key}.dataset_id")
    limit = None if source.limit is None else range(source.limit)
    place: Any = source.path if source.path is not None else source.dataset_id
    return DatasetMeta(place, source.subset, source.split, data_slice=limit)


def _processors(source: SourceConfig, key: str) -> list[Processor]:
    if source.processor is None:
        if source.processor_args:
            raise ConfigError(f"{key}.processor_args has no effect without {key}.processor")
        return []
    return [Processor(source.processor, dict(source.processor_args), f"{key}.processor")]


def _bytes(size: int) -> str:
    for unit, amount in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= amount:
            return f"{size / amount:.3g} {unit}"
    return f"{size} B"
