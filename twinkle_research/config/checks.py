"""What a config must satisfy beyond types: ranges, settings that exclude or need each other, settings without effect.

Stage 1 looks at the config alone; stage 2 (``inputs.py``) also at files: paths, the model's headers, the run folder.
All problems are reported at once.
"""

import math
from collections.abc import Iterator
from importlib.metadata import version
from typing import NamedTuple

from omegaconf import DictConfig
from packaging.version import Version

from twinkle_research.checkpoint.config import CheckpointFormat
from twinkle_research.config.datachecks import data_problems
from twinkle_research.config.jobplan.hardware import PER_MACHINE
from twinkle_research.config.keys import all_keys
from twinkle_research.config.layouts import Backend
from twinkle_research.config.losschecks import loss_problems
from twinkle_research.config.megatronchecks import megatron_problems
from twinkle_research.config.preferencechecks import preference_problems
from twinkle_research.config.resume import problems_of_run_folder
from twinkle_research.config.rewardchecks import part_numbers, reward_problems, task_problems
from twinkle_research.config.rlchecks import rl_problems
from twinkle_research.config.samplerchecks import sampler_problems
from twinkle_research.config.storage import to_object
from twinkle_research.dataset.config import eval_path_of
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import Attention, Device, LoraAdapterConfig, ModelConfig, Sharding, TransformersBackendConfig
from twinkle_research.model.facts import ALL_LINEAR
from twinkle_research.tracking.config import TrackingConfig, WandbConfig, WandbMode
from twinkle_research.trainer.config import (
    AdamConfig,
    DecayScheduleConfig,
    MuonConfig,
    SftTrainerConfig,
    SgdConfig,
    TrainConfig,
    WsdScheduleConfig,
)

MAX_SEED = 2**63 - 1
# Its FSDP2 can reduce gradients that only some ranks have, which a rank without rows needs. Older ones were not tried.
FSDP2_TORCH = Version("2.13")


def validate(cfg: DictConfig | TrainConfig, files: bool = True) -> TrainConfig:
    """Raises ConfigError naming every key that cannot be. ``files=False``: stage 1 only. Returns the typed config."""
    config = cfg if isinstance(cfg, TrainConfig) else to_object(cfg)
    problems = [*stage_1(config)]
    if files and not problems:
        from twinkle_research.config.inputs import stage_2
        from twinkle_research.config.startchecks import problems_of_start

        problems = [*stage_2(config), *problems_of_run_folder(config), *problems_of_start(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def stage_1(config: TrainConfig) -> Iterator[str]:
    yield from _numbers(config)
    yield from _run(config)
    yield from _model(config.model, config.backend)
    yield from _adapter(config)
    yield from _optimizer(config.optimizer)
    yield from _scheduler(config)
    yield from _trainer(config)
    yield from data_problems(config)
    yield from rl_problems(config)
    yield from sampler_problems(config)
    yield from loss_problems(config)
    yield from preference_problems(config)
    yield from task_problems(config)
    yield from reward_problems(config)
    yield from _evaluation(config)
    yield from _tracking(config.tracking)
    yield from _launch(config)
    yield from megatron_problems(config)


# --- ranges ---------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    low: float
    high: float = math.inf
    high_excluded: bool = False

    def __contains__(self, value: object) -> bool:
        return self.low <= value < self.high or (value == self.high and not self.high_excluded)  # type: ignore[operator]

    def __str__(self) -> str:
        if self.high == math.inf:
            return f">= {self.low}"
        return f"in [{self.low}, {self.high}{')' if self.high_excluded else ']'}"


BELOW_ONE = Range(0, 1, high_excluded=True)
RANGES = {
    "seed": Range(0, MAX_SEED),
    "backend.logits_chunk": Range(1),
    "backend.tensor_parallel": Range(1),
    "backend.pipeline_parallel": Range(1),
    "backend.virtual_stages": Range(1),
    "backend.context_parallel": Range(1),
    "backend.expert_parallel": Range(1),
    "backend.expert_tensor_parallel": Range(1),
    "backend.recompute_layers": Range(1),
    "adapter.r": Range(1),
    "adapter.dropout": BELOW_ONE,
    "optimizer.lr": Range(0),
    "optimizer.betas": BELOW_ONE,
    "optimizer.eps": Range(0),
    "optimizer.weight_decay": Range(0),
    "optimizer.momentum": BELOW_ONE,
    "optimizer.ns_steps": Range(1),
    "optimizer.adamw_lr": Range(0),
    "optimizer.adamw_betas": BELOW_ONE,
    "optimizer.adamw_eps": Range(0),
    "scheduler.warmup_steps": Range(0),
    "scheduler.min_ratio": Range(0, 1),
    "scheduler.total_steps": Range(1),
    "scheduler.decay_steps": Range(1),
    "loss.label_smoothing": BELOW_ONE,
    "loss.z_loss": Range(0),
    "loss.epsilon": Range(0),
    "loss.epsilon_high": Range(0),
    "loss.dual_clip": Range(1),
    "loss.beta": Range(0),
    "loss.entropy_coef": Range(0),
    "loss.correction.off_policy_threshold": Range(0),
    "loss.max_completion_length": Range(1),
    "loss.value_coef": Range(0),
    "loss.value_epsilon": Range(0),
    "advantage.kl_coef": Range(0),
    "advantage.gamma": Range(0, 1),
    "advantage.gae_lambda": Range(0, 1),
    "loss.sft_weight": Range(0),
    "loss.bc_coef": Range(0),
    "loss.gamma": Range(0),
    "trainer.max_steps": Range(1),
    "trainer.epochs": Range(1),
    "trainer.batch_size": Range(1),
    "trainer.micro_batch_size": Range(1),
    "trainer.micro_batch_tokens": Range(1),
    "trainer.eval_every": Range(1),
    "trainer.sample_max_tokens": Range(1),
    "trainer.inner_epochs": Range(1),
    "trainer.reference_every": Range(1),
    "trainer.eval_samples": Range(0),
    "trainer.log_completions": Range(0),
    "rollout.prompts_per_step": Range(1),
    "rollout.num_generations": Range(1),
    "rollout.max_oversampling": Range(1),
    "sampler.temperature": Range(0),
    "sampler.top_p": Range(0, 1),
    "sampler.top_k": Range(1),
    "sampler.max_tokens": Range(1),
    "sampler.max_rows": Range(1),
    "sampler.max_model_len": Range(2),
    "sampler.max_num_seqs": Range(1),
    "sampler.tensor_parallel": Range(1),
    "sampler.gpu_memory_utilization": Range(0, 1),
    "data.limit": Range(1),
    "data.eval_rows": Range(0),
    "data.max_length": Range(2),
    "data.num_proc": Range(1),
    "data.preview": Range(0),
    "data.rows": Range(1),
    "data.seed": Range(0, MAX_SEED),
    "data.held_out": BELOW_ONE,
    "data.operands": Range(2, 8),
    "data.min_operand": Range(0),
    "data.max_operand": Range(1),
    "data.numbers": Range(2, 8),
    "data.max_number": Range(1),
    "data.max_target": Range(1),
    "reward.tolerance": Range(0),
    "reward.format_score": Range(0, 1),
    "reward.workers": Range(1),
    "reward.max_tokens": Range(1),
    "reward.cache": Range(1),
    "checkpoint.every": Range(1),
    "checkpoint.keep": Range(1),
    "tracking.log_every": Range(1),
    "launch.nproc_per_node": Range(1),
    "launch.nodes": Range(1, 100_000),
    "launch.threads": Range(1),
}
# Zero would switch off what the setting is for.
POSITIVE = (
    "trainer.success_reward",
    "sampler.kv_cache_gib",
    "adapter.alpha",
    "loss.log_ratio_clamp",
    "loss.correction.low",
    "loss.correction.high",
    "loss.tau_pos",
    "loss.tau_neg",
    "advantage.eps",
    "loss.lambda_orpo",
    "reward.timeout",
    "trainer.max_grad_norm",
    "launch.timeout_minutes",
    "launch.gpu_memory_gib",
    "launch.node_gbytes",
    "launch.network_gbytes",
)


def _numbers(config: TrainConfig) -> Iterator[str]:
    for key in all_keys():
        for value in _numbers_at(config, key):
            yield from _number(key, value, key)
    for place, key, value in part_numbers(config.reward):
        yield from _number(key, value, place)


def _number(key: str, value: float, place: str) -> Iterator[str]:
    """``place``: where the value of ``key`` stands."""
    if not math.isfinite(value):
        yield f"'{place}' must be a finite number, got {value}"
    elif key in RANGES and value not in RANGES[key]:
        yield f"'{place}' must be {RANGES[key]}, got {value}"
    elif key in POSITIVE and value <= 0:
        yield f"'{place}' must be > 0, got {value}" + ("; for no clipping write null" if key.endswith("grad_norm") else "")


def _numbers_at(config: TrainConfig, key: str) -> list[float]:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part, None)
    values = node if isinstance(node, list) else [node]
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


# --- sections -------------------------------------------------------------------------------------------------------


def _run(config: TrainConfig) -> Iterator[str]:
    if config.run_dir is not None and not config.run_dir.strip():
        yield "'run_dir' is empty; give a folder, or null for a new one under runs/"
    if not config.resume.strip():
        yield "'resume' is empty; give auto, never or the folder of a checkpoint or of a run"
    if config.eval_only and config.run_dir is None and config.resume in ("auto", "never"):
        yield "eval_only=true needs a checkpoint: give run_dir=<folder of a run> or resume=<checkpoint>"
    if config.eval_only and config.resume == "never":
        yield "eval_only=true reads a checkpoint, so resume=never contradicts it; write resume=auto or resume=<checkpoint>"


def _model(model: ModelConfig, backend: Backend) -> Iterator[str]:
    if model.path is None and model.source is None and model.hub_id is None:
        yield f"model={model.name} has no model of its own: give model.path=<folder or hub id>"
    if model.path is not None and not model.path.strip():
        yield "'model.path' is empty; give a folder or a hub id"
    of_hub = model.path is not None or model.hub_id is not None
    if model.revision is not None and not of_hub:
        yield f"'model.revision' has no effect without model.path: model={model.name} prepares its own weights"
    if model.trust_remote_code and not of_hub:
        yield f"'model.trust_remote_code' has no effect without model.path: model={model.name} brings no code"
    if model.attention is Attention.flash and backend.device is Device.cpu:
        yield "model.attention=flash needs a GPU, but backend.device=cpu; write model.attention=sdpa"


def _adapter(config: TrainConfig) -> Iterator[str]:
    adapter = config.adapter
    if not isinstance(adapter, LoraAdapterConfig):
        return
    if not adapter.target_modules:
        yield "'adapter.target_modules' is empty: name linear layers, or write all-linear"
    if ALL_LINEAR in adapter.target_modules and set(adapter.target_modules) != {ALL_LINEAR}:
        yield "'adapter.target_modules': all-linear stands alone; leave out the other names, or name each layer instead of it"
    if ALL_LINEAR in adapter.modules_to_save:
        yield "'adapter.modules_to_save' names modules; all-linear is a value of adapter.target_modules only"
    for key in ("target_modules", "modules_to_save"):
        names = getattr(adapter, key)
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            yield f"'adapter.{key}' names {', '.join(duplicates)} twice"
    if both := sorted((set(adapter.target_modules) & set(adapter.modules_to_save)) - {ALL_LINEAR}):
        yield f"{', '.join(both)} cannot be in both adapter.target_modules and adapter.modules_to_save"


def _optimizer(optimizer: AdamConfig | SgdConfig | MuonConfig) -> Iterator[str]:
    for key in ("betas", "adamw_betas"):
        betas = getattr(optimizer, key, None)
        if betas is not None and len(betas) != 2:
            yield f"'optimizer.{key}' must be two numbers, got {len(betas)}"
    if not isinstance(optimizer, AdamConfig) and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true needs optimizer.momentum > 0"


def _scheduler(config: TrainConfig) -> Iterator[str]:
    scheduler, steps = config.scheduler, config.trainer.max_steps
    end = steps
    if isinstance(scheduler, (DecayScheduleConfig, WsdScheduleConfig)) and scheduler.total_steps is not None:
        end = scheduler.total_steps
    if end is None:
        return
    given_by = "trainer.max_steps" if end == steps else "scheduler.total_steps"
    if scheduler.warmup_steps > end:
        yield f"scheduler.warmup_steps={scheduler.warmup_steps} is longer than {given_by}={end}"
    elif isinstance(scheduler, WsdScheduleConfig) and scheduler.warmup_steps + scheduler.decay_steps > end:
        yield (
            f"scheduler.warmup_steps + scheduler.decay_steps = {scheduler.warmup_steps + scheduler.decay_steps} "
            f"is longer than {given_by}={end}"
        )


def _trainer(config: TrainConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.data.packing and trainer.micro_batch_size is not None:
        yield "'trainer.micro_batch_size' counts padded rows; with data.packing=true give trainer.micro_batch_tokens instead"
    if trainer.micro_batch_size is not None and trainer.micro_batch_tokens is not None:
        yield "give trainer.micro_batch_size or trainer.micro_batch_tokens, not both (null switches one off)"


def _evaluation(config: TrainConfig) -> Iterator[str]:
    data, trainer = config.data, config.trainer
    held_out = data.eval_rows or eval_path_of(data)
    if trainer.eval_every is not None and not held_out and not data.sample_prompts:
        yield "'trainer.eval_every' has no effect without data.eval_path, data.eval_rows or data.sample_prompts"
    if config.eval_only and not held_out and not data.sample_prompts:
        yield "eval_only=true has nothing to do: give data.eval_path, data.eval_rows or data.sample_prompts"
    supervised = isinstance(trainer, SftTrainerConfig)
    if supervised and not data.sample_prompts and trainer.sample_max_tokens != SftTrainerConfig().sample_max_tokens:
        yield "'trainer.sample_max_tokens' has no effect without data.sample_prompts"


def _tracking(tracking: TrackingConfig) -> Iterator[str]:
    if tracking.wandb.mode is WandbMode.disabled:
        default = WandbConfig()
        for key in ("project", "entity", "name", "group", "tags"):
            if getattr(tracking.wandb, key) != getattr(default, key):
                yield f"'tracking.wandb.{key}' has no effect: tracking.wandb.mode=disabled"


def _launch(config: TrainConfig) -> Iterator[str]:
    yield from _gpus(config)
    if not isinstance(config.backend, TransformersBackendConfig):
        return
    if config.checkpoint.format is CheckpointFormat.sharded:
        yield "checkpoint.format=sharded is for backend=megatron, whose processes have parts of tensors; write consolidated"
    launch, sharding = config.launch, config.backend.sharding
    processes = (launch.nproc_per_node or 1) * launch.nodes
    if sharding is Sharding.none and processes > 1:
        yield f"backend.sharding=none runs in one process, but launch asks for {processes}; write backend.sharding=ddp"
    if sharding is Sharding.fsdp2:
        yield from (f"{problem}; write backend.sharding=ddp" for problem in _fsdp2(config))


def _gpus(config: TrainConfig) -> Iterator[str]:
    launch = config.launch
    if launch.gpu is not None and config.backend.device is Device.cpu:
        yield f"launch.gpu={launch.gpu.name} has no effect with backend.device=cpu; write auto, or launch.gpu=null"
    nproc = launch.nproc_per_node or 1
    if launch.gpu is not None and nproc > PER_MACHINE:
        yield (
            f"launch.nproc_per_node={nproc} is more than the {PER_MACHINE} GPUs of a machine ({launch.gpu.name}); write "
            f"{PER_MACHINE} (with launch.nodes={-(-nproc * launch.nodes // PER_MACHINE)} there are as many)"
        )
    for key in ("gpu_memory_gib", "node_gbytes", "network_gbytes"):
        if launch.gpu is None and getattr(launch, key) is not None:
            yield f"'launch.{key}' has no effect without launch.gpu, which it corrects; give launch.gpu=h100_80gb, for example"


def _fsdp2(config: TrainConfig) -> Iterator[str]:
    adapter = config.adapter
    if Version(version("torch")) < FSDP2_TORCH:
        yield f"backend.sharding=fsdp2 needs torch {FSDP2_TORCH} or newer, here is {version('torch')}"
    if isinstance(config.optimizer, MuonConfig) and not isinstance(adapter, LoraAdapterConfig):
        yield "optimizer=muon needs whole matrices, which backend.sharding=fsdp2 cuts"
    if isinstance(adapter, LoraAdapterConfig) and adapter.dora:
        yield "adapter.dora=true reads whole weights, which backend.sharding=fsdp2 cuts"
    if isinstance(adapter, LoraAdapterConfig) and adapter.modules_to_save:
        yield "adapter.modules_to_save copies whole weights, which backend.sharding=fsdp2 cuts"
    if config.checkpoint.background:
        yield "checkpoint.background=true copies the whole model, which backend.sharding=fsdp2 avoids"
