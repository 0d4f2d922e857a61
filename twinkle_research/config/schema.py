"""Which dataclass types each option of each config group.

To add an option: write its dataclass in ``<component>/config.py``, add one line to ``SCHEMAS`` and one YAML file to
``conf/<group>/`` whose defaults list starts with ``base_<schema>``. Everything else (errors with the nearest name,
``--help``, completion, the stored config) follows from these two.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_origin

from hydra.core.config_store import ConfigStore

from twinkle_research.advantage.config import (
    GAEAdvantageConfig,
    GRPOAdvantageConfig,
    OPOAdvantageConfig,
    ReinforcePPAdvantageConfig,
    RLOOAdvantageConfig,
)
from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.dataset.config import (
    CountdownDataConfig,
    DataConfig,
    Gsm8kDataConfig,
    MathDataConfig,
    MixDataConfig,
    PreferenceDataConfig,
    PromptsDataConfig,
    ReasoningGymDataConfig,
    SumsDataConfig,
)
from twinkle_research.loss.config import (
    BNPOConfig,
    CISPOConfig,
    CPOConfig,
    CrossEntropyConfig,
    DAPOConfig,
    DPOConfig,
    DRGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ImportanceSamplingConfig,
    KTOPairConfig,
    ORPOConfig,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
    SAPOConfig,
    SimPOConfig,
)
from twinkle_research.model.config import LoraAdapterConfig, ModelConfig, NoAdapterConfig, TransformersBackendConfig
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.reward.config import REWARDS, CombinedRewardConfig
from twinkle_research.rollout.config import SingleTurnConfig
from twinkle_research.sampler.config import AutoSamplerConfig, TransformersSamplerConfig, VLLMSamplerConfig
from twinkle_research.tracking.config import TrackingConfig
from twinkle_research.trainer.config import (
    AdamConfig,
    ConstantScheduleConfig,
    DecayScheduleConfig,
    LaunchConfig,
    MuonConfig,
    NoneConfig,
    RlTrainerConfig,
    SftTrainerConfig,
    SgdConfig,
    TrainConfig,
    WsdScheduleConfig,
)

BASE = "base_"  # prefix of schema names; such a name cannot be chosen as an option


@dataclass(frozen=True)
class Schema:
    group: str
    name: str
    node: type


SCHEMAS = (
    Schema("model", "base_model", ModelConfig),
    Schema("backend", "base_transformers", TransformersBackendConfig),
    Schema("backend", "base_megatron", MegatronBackendConfig),
    Schema("adapter", "base_none", NoAdapterConfig),
    Schema("adapter", "base_lora", LoraAdapterConfig),
    Schema("optimizer", "base_adam", AdamConfig),
    Schema("optimizer", "base_sgd", SgdConfig),
    Schema("optimizer", "base_muon", MuonConfig),
    Schema("scheduler", "base_constant", ConstantScheduleConfig),
    Schema("scheduler", "base_decay", DecayScheduleConfig),
    Schema("scheduler", "base_wsd", WsdScheduleConfig),
    Schema("loss", "base_cross_entropy", CrossEntropyConfig),
    Schema("loss", "base_grpo", GRPOConfig),
    Schema("loss", "base_dr_grpo", DRGRPOConfig),
    Schema("loss", "base_dapo", DAPOConfig),
    Schema("loss", "base_bnpo", BNPOConfig),
    Schema("loss", "base_gspo", GSPOConfig),
    Schema("loss", "base_cispo", CISPOConfig),
    Schema("loss", "base_sapo", SAPOConfig),
    Schema("loss", "base_ppo", PPOConfig),
    Schema("loss", "base_importance_sampling", ImportanceSamplingConfig),
    Schema("loss", "base_reinforce", ReinforceConfig),
    Schema("loss", "base_rloo", RLOOConfig),
    Schema("loss", "base_dpo", DPOConfig),
    Schema("loss", "base_simpo", SimPOConfig),
    Schema("loss", "base_orpo", ORPOConfig),
    Schema("loss", "base_cpo", CPOConfig),
    Schema("loss", "base_kto_pair", KTOPairConfig),
    Schema("advantage", "base_none", NoneConfig),
    Schema("advantage", "base_grpo", GRPOAdvantageConfig),
    Schema("advantage", "base_rloo", RLOOAdvantageConfig),
    Schema("advantage", "base_opo", OPOAdvantageConfig),
    Schema("advantage", "base_reinforce_pp", ReinforcePPAdvantageConfig),
    Schema("advantage", "base_gae", GAEAdvantageConfig),
    Schema("trainer", "base_sft", SftTrainerConfig),
    Schema("trainer", "base_rl", RlTrainerConfig),
    Schema("rollout", "base_none", NoneConfig),
    Schema("rollout", "base_single", SingleTurnConfig),
    Schema("sampler", "base_none", NoneConfig),
    Schema("sampler", "base_auto", AutoSamplerConfig),
    Schema("sampler", "base_vllm", VLLMSamplerConfig),
    Schema("sampler", "base_transformers", TransformersSamplerConfig),
    Schema("data", "base_data", DataConfig),
    Schema("data", "base_data_mix", MixDataConfig),
    Schema("data", "base_data_preference", PreferenceDataConfig),
    Schema("data", "base_sums", SumsDataConfig),
    Schema("data", "base_countdown", CountdownDataConfig),
    Schema("data", "base_reasoning_gym", ReasoningGymDataConfig),
    Schema("data", "base_gsm8k", Gsm8kDataConfig),
    Schema("data", "base_math", MathDataConfig),
    Schema("data", "base_prompts", PromptsDataConfig),
    Schema("reward", "base_none", NoneConfig),
    *(Schema("reward", f"base_{name}", node) for name, node in REWARDS.items()),
    Schema("reward", "base_combined", CombinedRewardConfig),
    Schema("checkpoint", "base_checkpoint", CheckpointConfig),
    Schema("tracking", "base_tracking", TrackingConfig),
    Schema("launch", "base_launch", LaunchConfig),
)

GROUPS = tuple(dict.fromkeys(schema.group for schema in SCHEMAS))


@cache
def register() -> None:
    """Makes the schemas known to Hydra, once."""
    store = ConfigStore.instance()
    store.store(name="base_train", node=TrainConfig)
    for schema in SCHEMAS:
        store.store(group=schema.group, name=schema.name, node=schema.node)


def schema_of(group: str, node: type) -> Schema:
    return next(s for s in SCHEMAS if s.group == group and issubclass(node, s.node))


def find_schema(group: str, name: str) -> Schema | None:
    return next((s for s in SCHEMAS if s.group == group and s.name == name), None)


def config_dir() -> Path:
    """The repository's ``conf/``, or the copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    repository = package.parent
    if (repository / "train.py").is_file() and (repository / "conf" / "train.yaml").is_file():
        return repository / "conf"
    return package / "conf"


def options(group: str) -> list[str]:
    """Names that ``<group>=`` accepts, from the files in ``conf/``."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def offered_groups() -> list[str]:
    """Groups worth naming in a message: those with another option than ``none``."""
    return [group for group in GROUPS if options(group) != ["none"]]


def leaves(node: type, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Dotted name -> field of every setting below a dataclass."""
    found = {}
    for field in dataclasses.fields(node):
        inner = nested(field.type)
        if inner is None:
            found[prefix + field.name] = field
        else:
            found |= leaves(inner, f"{prefix}{field.name}.")
    return found


def nested(annotation: object) -> type | None:
    """The dataclass behind ``X`` or ``Optional[X]``; None for a plain type, and for a list of sections."""
    if get_origin(annotation) is list:
        return None
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


@cache
def root_leaves() -> dict[str, dataclasses.Field]:
    """Settings that stand outside every group: ``run_dir``, ``seed``, ..."""
    return {name: field for name, field in leaves(TrainConfig).items() if name not in GROUPS}
