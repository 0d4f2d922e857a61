"""Config of what a run shows and records."""

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional


class WandbMode(Enum):
    auto = "auto"  # online when a key is found, else disabled
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Progress(Enum):
    auto = "auto"  # a live bar in a terminal, plain lines in a file
    bar = "bar"
    plain = "plain"
    none = "none"


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.auto
    project: str = "twinkle_research"
    entity: Optional[str] = None
    # null: the run folder's name; in a sweep the group is the sweep folder's name.
    name: Optional[str] = None
    group: Optional[str] = None
    tags: List[str] = field(default_factory=list)


@dataclass
class TrackingConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = True
    progress: Progress = Progress.auto
    # Plain progress lines are printed every N steps.
    log_every: int = 1
    # Write report.html at the end.
    report: bool = True
