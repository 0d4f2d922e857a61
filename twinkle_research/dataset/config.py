"""Config of the data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Optional

from omegaconf import MISSING

OnError = Enum("OnError", {n: n for n in ("raise", "skip")})  # `raise` is a Python keyword, hence this form


class TrainOn(Enum):
    assistant = "assistant"  # every assistant turn
    last = "last"  # the last assistant turn only
    all = "all"  # every token


Truncation = Enum("Truncation", {n: n for n in ("raise", "left", "right", "split", "delete")})

OnChange = Enum("OnChange", {n: n for n in ("raise", "restart")})


@dataclass
class DataConfig:
    name: str = MISSING
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
    on_error: OnError = OnError["raise"]
    # When a run is resumed and its data has changed: refuse, or start the data from its first row again.
    on_change: OnChange = OnChange["raise"]
    # Processes that encode rows.
    num_proc: int = 1
    # Print this many encoded rows, trained tokens coloured, before the run.
    preview: int = 0
