"""Config of the data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Optional, Tuple

from omegaconf import MISSING

OnError = Enum("OnError", {n: n for n in ("raise", "skip")})  # `raise` is a Python keyword, hence this form


class TrainOn(Enum):
    assistant = "assistant"  # every assistant turn
    last = "last"  # the last assistant turn only
    all = "all"  # every token


Truncation = Enum("Truncation", {n: n for n in ("raise", "left", "right", "split", "delete")})

OnChange = Enum("OnChange", {n: n for n in ("raise", "restart")})


class MixStop(Enum):
    """Where an epoch of a mixture ends."""

    first_exhausted = "first_exhausted"  # before any source would give a row twice
    all_exhausted = "all_exhausted"  # when every source has given each of its rows


@dataclass
class CommonDataConfig:
    """What every option of the group has."""

    name: str = MISSING
    # Held-out rows: a file of their own, or this many rows taken out of the training data (keyed by the seed).
    eval_path: Optional[str] = None
    eval_rows: int = 0
    # Answered greedily at each evaluation, so that one sees what changes.
    sample_prompts: List[str] = field(default_factory=list)
    shuffle: bool = True
    template: str = "Template"
    default_system: Optional[str] = None
    enable_thinking: bool = True
    train_on: TrainOn = TrainOn.assistant
    max_length: int = 1024
    truncation: Truncation = Truncation["raise"]
    # Put several rows side by side instead of padding them; each still sees only itself, so the result is the same.
    packing: bool = False
    on_error: OnError = OnError["raise"]
    # When a run is resumed and its data has changed: refuse, or start the data from its first row again.
    on_change: OnChange = OnChange["raise"]
    # Processes that encode rows.
    num_proc: int = 1
    # Keep encoded rows for later runs, in `cache_dir` ($TWINKLE_CACHE/encoded where it is null).
    cache: bool = True
    cache_dir: Optional[str] = None
    # Print this many encoded rows, trained tokens coloured, before the run.
    preview: int = 0


@dataclass
class SourceConfig:
    """One source of rows."""

    # A file or folder of JSONL, JSON, CSV or Parquet; or a hub id in dataset_id. Give one of the two.
    path: Optional[str] = None
    dataset_id: Optional[str] = None
    subset: str = "default"
    split: str = "train"
    # Only the first N rows.
    limit: Optional[int] = None
    # Class name of twinkle_research.dataset.preprocessor or dotted path of a function or class.
    processor: Optional[str] = None
    processor_args: Dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig(SourceConfig, CommonDataConfig):
    # Read, convert and tokenise rows while they are trained on, in their order; nothing is encoded before.
    streaming: bool = False


@dataclass
class MixSource(SourceConfig):
    """One source of a mixture. What is null is as in the group."""

    # Share of the rows, relative to the weights of the other sources.
    weight: float = 1.0
    default_system: Optional[str] = None
    enable_thinking: Optional[bool] = None
    train_on: Optional[TrainOn] = None


@dataclass
class MixDataConfig(CommonDataConfig):
    sources: List[MixSource] = field(default_factory=list)
    stop: MixStop = MixStop.first_exhausted


def sources_of(data: CommonDataConfig) -> List[Tuple[str, SourceConfig]]:
    """(key, source) of each source that the group names: "data", or "data.sources[0]", "data.sources[1]", ..."""
    if isinstance(data, MixDataConfig):
        return [(f"data.sources[{number}]", source) for number, source in enumerate(data.sources)]
    return [("data", data)]
