"""What the group ``data`` must satisfy beyond types, from the config alone."""

import math
from collections.abc import Iterator

from twinkle_research.config.composing import BUILT_IN_ROWS
from twinkle_research.dataset.config import (
    CommonDataConfig,
    DataConfig,
    MixDataConfig,
    MixSource,
    SourceConfig,
    eval_path_of,
    sources_of,
)
from twinkle_research.trainer.config import TrainConfig


def data_problems(config: TrainConfig) -> Iterator[str]:
    data = config.data
    for key, source in sources_of(data):
        yield from _source(key, source, "data.sources" if isinstance(source, MixSource) else f"data={data.name}")
    yield from _common(data)
    if isinstance(data, MixDataConfig):
        yield from _mix(data)
    elif isinstance(data, DataConfig) and data.streaming:
        yield from _streaming(config, data)


def _source(key: str, source: SourceConfig, who: str) -> Iterator[str]:
    if source.path is not None and source.dataset_id is not None:
        yield f"give {key}.path or {key}.dataset_id, not both (null switches one off)"
    if source.path is None and source.dataset_id is None:
        yield f"{who} needs rows: give {key}.path=<file or folder> or {key}.dataset_id=<hub id>"
    for name in ("path", "dataset_id"):
        if (value := getattr(source, name)) is not None and not value.strip():
            yield f"'{key}.{name}' is empty; give {'a hub id' if name == 'dataset_id' else 'a file or folder'}, or null"
    local = source.path is not None or (source.dataset_id or "").startswith(BUILT_IN_ROWS)
    for name, default in (("subset", "default"), ("split", "train")):
        if local and getattr(source, name) != default:
            yield f"'{key}.{name}' has no effect: only a hub data set ({key}.dataset_id) has subsets and splits"
    if source.processor is None and source.processor_args:
        yield f"'{key}.processor_args' has no effect without {key}.processor"


def _common(data: CommonDataConfig) -> Iterator[str]:
    eval_path = eval_path_of(data)
    for name, value in (("eval_path", eval_path), ("cache_dir", data.cache_dir)):
        if value is not None and not value.strip():
            yield f"'data.{name}' is empty; give a {'file or ' if name == 'eval_path' else ''}folder, or null"
    if eval_path is not None and data.eval_rows:
        yield "give data.eval_path or data.eval_rows, not both"
    if isinstance(data, SourceConfig) and data.limit is not None and data.eval_rows >= data.limit:
        yield f"data.eval_rows={data.eval_rows} leaves no row to train on: data.limit={data.limit}"


def _mix(data: MixDataConfig) -> Iterator[str]:
    if not data.sources:
        example = "{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}"
        yield f"data=mix needs data.sources, for example 'data.sources=[{example}]'"
    elif len(data.sources) == 1:
        yield "data.sources has one source, so its weight has no effect; write data=jsonl data.path=<file or folder>"
    for number, source in enumerate(data.sources):
        key = f"data.sources[{number}]"
        if not 0 < source.weight < math.inf:
            yield f"'{key}.weight' must be > 0, got {source.weight}"
        if source.limit is not None and source.limit < 1:
            yield f"'{key}.limit' must be >= 1, got {source.limit}"


def _streaming(config: TrainConfig, data: DataConfig) -> Iterator[str]:
    if data.shuffle:
        yield (
            "data.streaming=true takes rows in their order, for a stream cannot be shuffled exactly without having all of it: "
            "write data.shuffle=false, or data.streaming=false, which encodes all rows to disk first"
        )
    if data.eval_rows:
        yield "data.eval_rows needs all rows at hand, which data.streaming=true does not have; give data.eval_path"
    if config.trainer.epochs is not None:
        yield "trainer.epochs has no effect with data.streaming=true, whose length shows at its end only; give trainer.max_steps"
    elif config.trainer.max_steps is None:
        yield "data.streaming=true needs trainer.max_steps: how many rows there are shows at the end only"
    if data.eval_path is None:
        for name, default in (("cache", True), ("cache_dir", None)):
            if getattr(data, name) != default:
                yield f"'data.{name}' has no effect: data.streaming=true keeps nothing"
