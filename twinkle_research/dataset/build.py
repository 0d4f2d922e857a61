"""What the config group ``data`` says, carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle_research.dataset.base import Dataset, DatasetMeta
from twinkle_research.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_research.dataset.config import DataConfig
    from twinkle_research.template.base import Template


def build_datasets(config: DataConfig, template: Template, seed: int) -> tuple[Dataset, Dataset | None]:
    """(training data, held-out data or None), both encoded.

    Rows are held out before they are encoded, so no part of a split row is on both sides. Which ones depends on
    ``seed`` and the number of rows only.
    """
    if (config.path is None) == (config.dataset_id is None):
        raise ConfigError("give one of data.path and data.dataset_id")
    if config.eval_path is not None and config.eval_rows:
        raise ConfigError("data.eval_rows has no effect when data.eval_path is set; give one of them")
    limit = None if config.limit is None else range(config.limit)
    source = config.path if config.path is not None else config.dataset_id
    train = _rows(config, DatasetMeta(source, config.subset, config.split, data_slice=limit))
    held_out = None
    if config.eval_path is not None:
        held_out = _rows(config, DatasetMeta(config.eval_path))
    elif config.eval_rows:
        held_out = train.hold_out(config.eval_rows, seed)
    for part in (train, held_out):
        if part is not None:
            part.set_template(template).encode(num_proc=config.num_proc)
    return train, held_out


def _rows(config: DataConfig, meta: DatasetMeta) -> Dataset:
    rows = Dataset(meta, on_error=config.on_error.name)
    if config.processor is not None:
        rows.map(config.processor, init_args=dict(config.processor_args))
    elif config.processor_args:
        raise ConfigError("data.processor_args has no effect without data.processor")
    return rows
