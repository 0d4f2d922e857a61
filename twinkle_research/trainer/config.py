"""Config of the run as a whole and of the training loops, their optimizer and their schedule."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, List, Optional

from omegaconf import MISSING


class OnNan(Enum):
    stop = "stop"  # end the run, naming the rows
    skip = "skip"  # leave the step out and count it


@dataclass
class TrainerConfig:
    """What both loops have."""

    name: str = MISSING
    # Optimizer steps. null: `epochs` decides; both null: one epoch. Both set: whichever ends first.
    max_steps: Optional[int] = None
    epochs: Optional[int] = None
    # Rows (supervised) or prompts (reinforcement) in one optimizer step, over all ranks.
    batch_size: int = 8
    # How one rank cuts its share of a step: rows, or padded tokens, of one pass; neither changes the result. Give at
    # most one; composing a config with neither fills in 4 rows.
    micro_batch_size: Optional[int] = None
    micro_batch_tokens: Optional[int] = None
    max_grad_norm: Optional[float] = 1.0
    on_nan: OnNan = OnNan.stop
    # Evaluate every N optimizer steps, beside before training and after the last step (null: only these two).
    eval_every: Optional[int] = None


@dataclass
class SftTrainerConfig(TrainerConfig):
    name: str = "sft"
    # Greedy answers to `data.sample_prompts` at each evaluation, at most this many tokens each.
    sample_max_tokens: int = 64


class ReferenceKind(Enum):
    auto = "auto"  # base where an adapter is trained, else frozen
    base = "base"  # the model with its adapter switched off
    frozen = "frozen"  # a copy of the model as it was at the start
    refreshed = "refreshed"  # such a copy, brought up to date every `reference_every` steps


@dataclass
class RlTrainerConfig(TrainerConfig):
    name: str = "rl"
    # Passes over each rollout. With 1, and a rollout of one batch, all samples are on-policy.
    inner_epochs: int = 1
    # What a KL term compares with.
    reference: ReferenceKind = ReferenceKind.auto
    # A refreshed reference follows the policy every N rollouts.
    reference_every: Optional[int] = None
    # Completions of each held-out prompt at an evaluation, for eval/mean@k and eval/pass@k. 0: only the greedy answers.
    eval_samples: int = 4
    # Reward from which a completion counts as right in an evaluation.
    success_reward: float = 1.0
    # Completions of each rollout, and of each evaluation, that are kept in samples.jsonl, W&B and the report.
    log_completions: int = 8


@dataclass
class AdamConfig:
    """AdamW (Loshchilov & Hutter 2017) for name=adamw, Adam for name=adam."""

    name: str = MISSING
    lr: float = MISSING
    betas: List[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class SgdConfig:
    name: str = "sgd"
    lr: float = MISSING
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass
class MuonConfig:
    """Muon (Jordan et al. 2024) on 2-D hidden matrices; AdamW with `adamw_lr` on all else."""

    name: str = "muon"
    lr: float = MISSING
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    weight_decay: float = 0.0
    adamw_lr: float = MISSING
    adamw_betas: List[float] = field(default_factory=lambda: [0.9, 0.95])
    adamw_eps: float = 1e-8


@dataclass
class ConstantScheduleConfig:
    name: str = "constant"
    warmup_steps: int = 0


@dataclass
class DecayScheduleConfig:
    """name=linear or cosine: linear warmup from 0, then decay to `min_ratio` of the peak."""

    name: str = MISSING
    warmup_steps: int = 0
    min_ratio: float = 0.0
    # Step at which the decay ends. null: the run's last step.
    total_steps: Optional[int] = None


@dataclass
class WsdScheduleConfig:
    """Warmup, stable, then linear decay over the last `decay_steps` (Hu et al. 2024, arXiv:2404.06395)."""

    name: str = "wsd"
    warmup_steps: int = 0
    decay_steps: int = MISSING
    min_ratio: float = 0.0
    total_steps: Optional[int] = None


@dataclass
class NoneConfig:
    """A group that has no part in this run: it has no settings, so setting one is refused."""

    name: str = "none"


class Gpu(Enum):
    """Kinds of GPU that the plan knows; their facts are in distributed/gpus.py."""

    a100_80gb = "a100_80gb"
    h100_80gb = "h100_80gb"
    h200_141gb = "h200_141gb"
    b200_180gb = "b200_180gb"


@dataclass
class LaunchConfig:
    # With a `gpu` 8 at most. null: what the layout needs on this machine; in a dry run for a `gpu` 8.
    nproc_per_node: Optional[int] = None
    nodes: int = 1
    # GPUs of the job. The plan then says what fits on them, and in what time; in a dry run they need not be here.
    gpu: Optional[Gpu] = None
    # Memory of one of them. null: that of `gpu`.
    gpu_memory_gib: Optional[float] = None
    # GB/s that a GPU sends to the others of its machine, and to those of other machines. null: those of `gpu`.
    node_gbytes: Optional[float] = None
    network_gbytes: Optional[float] = None
    # CPU threads of each process. null: cores / processes on CPU; left alone on GPU.
    threads: Optional[int] = None
    # How long a rank waits for the others before the run fails.
    timeout_minutes: float = 30.0


@dataclass
class TrainConfig:
    """The root of conf/train.yaml. Group fields hold the dataclass of the chosen option."""

    model: Any = MISSING
    backend: Any = MISSING
    adapter: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    loss: Any = MISSING
    advantage: Any = MISSING
    trainer: Any = MISSING
    rollout: Any = MISSING
    sampler: Any = MISSING
    data: Any = MISSING
    reward: Any = MISSING
    checkpoint: Any = MISSING
    tracking: Any = MISSING
    launch: Any = MISSING
    # null: a new folder under runs/. The same folder again continues the run in it.
    run_dir: Optional[str] = None
    seed: int = 0
    # auto: continue what is in run_dir; never: refuse a run_dir that holds a run; a path: start from that checkpoint.
    resume: str = "auto"
    # Print the plan and stop; nothing is written.
    dry_run: bool = False
    # Evaluate the checkpoint in run_dir (or at `resume`) and stop; nothing is trained.
    eval_only: bool = False
