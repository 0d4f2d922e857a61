"""Config of the losses; each default is the algorithm's own recipe."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Dict, Optional, Tuple


class Normalization(Enum):
    token = "token"  # sum over trained tokens / trained tokens of the optimizer step
    sequence = "sequence"  # mean over each row's trained tokens, then over the rows of the optimizer step


@dataclass
class CrossEntropyConfig:
    name: str = "cross_entropy"
    normalization: Normalization = Normalization.token
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class DPOLossType(Enum):
    sigmoid = "sigmoid"  # Rafailov et al. 2023
    hinge = "hinge"  # Zhao et al. 2023 (SLiC)
    ipo = "ipo"  # Azar et al. 2023


@dataclass
class DPOConfig:
    name: str = "dpo"
    beta: float = 0.1
    loss_type: DPOLossType = DPOLossType.sigmoid
    # Share of pairs whose order is taken to be wrong; only with sigmoid.
    label_smoothing: float = 0.0
    # Compare means over each answer's tokens instead of sums; only with ipo.
    average_logps: bool = False
    reference_free: bool = False
    # Weight of the chosen answer's negative log-likelihood.
    sft_weight: float = 0.0


@dataclass
class SimPOConfig:
    name: str = "simpo"
    beta: float = 2.5
    # Margin by which the chosen answer is to lead.
    gamma: float = 0.5


@dataclass
class ORPOConfig:
    name: str = "orpo"
    # Weight of the odds ratio beside the chosen answer's negative log-likelihood.
    lambda_orpo: float = 0.1


@dataclass
class CPOConfig:
    name: str = "cpo"
    beta: float = 0.1
    # Weight of the chosen answer's negative log-likelihood.
    bc_coef: float = 1.0


@dataclass
class KTOPairConfig:
    name: str = "kto_pair"
    beta: float = 0.1


PREFERENCE_CONFIGS = (DPOConfig, SimPOConfig, ORPOConfig, CPOConfig, KTOPairConfig)  # losses on pairs of answers


# --- losses on sampled answers ------------------------------------------------------------------------------------------


class KLEstimator(Enum):
    k1 = "k1"  # log policy - log reference
    k2 = "k2"  # half its square
    k3 = "k3"  # e^d - d - 1 of d = log reference - log policy
    k1_plus = "k1_plus"  # the value of k1 with the gradient of k2
    k3_plus = "k3_plus"  # the value of k3 with the gradient of k2


class CorrectionMode(Enum):
    none = "none"
    tis_token = "tis_token"  # weights of tokens, cut to [low, high]
    tis_sequence = "tis_sequence"  # weights of whole answers, cut to [low, high]
    mis_token = "mis_token"  # weights of tokens, 0 outside [low, high]
    mis_sequence = "mis_sequence"  # weights of whole answers, 0 outside [low, high]
    icepop = "icepop"  # mis_token with two bounds


# Mode -> its authors' (low, high); None is no bound. For the masked forms high is TRL's default.
CORRECTION_BOUNDS: Dict[str, Tuple[Optional[float], Optional[float]]] = {
    "none": (None, None),
    "tis_token": (None, 2.0),
    "tis_sequence": (None, 2.0),
    "mis_token": (None, 3.0),
    "mis_sequence": (None, 3.0),
    "icepop": (0.5, 5.0),
}


class PolicyNormalization(Enum):
    token = "token"  # sum over trained tokens / trained tokens of the optimizer step
    sequence = "sequence"  # mean over each answer's tokens, then over the answers of the optimizer step
    sequence_sum = "sequence_sum"  # sum over each answer's tokens, mean over the answers of the optimizer step


class LossDropout(Enum):
    none = "none"
    replay = "replay"  # the same mask when an answer is scored before the update and when it is trained


class CISPOClip(Enum):
    relative = "relative"  # bounds are distances from 1
    absolute = "absolute"  # bounds are those of the weight itself


@dataclass
class CorrectionConfig:
    mode: CorrectionMode = CorrectionMode.none
    # Lower bound of the weight; null: the mode's own.
    low: Optional[float] = None
    # Upper bound of the weight; null: the mode's own.
    high: Optional[float] = None
    # Drops answers with a negative advantage that the policy has left by more than this, nats a token; null: none.
    off_policy_threshold: Optional[float] = None


@dataclass
class PolicyLossConfig:
    """What all losses on sampled answers have."""

    name: str = "policy"
    # Weight of the KL to the reference.
    beta: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.k3
    # Weight of the entropy bonus.
    entropy_coef: float = 0.0
    # Bound on the absolute log-ratio; null: none.
    log_ratio_clamp: Optional[float] = 20.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dropout: LossDropout = LossDropout.none


@dataclass
class GRPOConfig(PolicyLossConfig):
    name: str = "grpo"
    epsilon: float = 0.2
    # null: the same as epsilon.
    epsilon_high: Optional[float] = None
    # Upper bound of loss / -advantage where the advantage is negative; null: none.
    dual_clip: Optional[float] = None
    normalization: PolicyNormalization = PolicyNormalization.sequence


@dataclass
class DAPOConfig(PolicyLossConfig):
    name: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: Optional[float] = 0.28
    dual_clip: Optional[float] = None
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class BNPOConfig(PolicyLossConfig):
    name: str = "bnpo"
    epsilon: float = 0.2
    epsilon_high: Optional[float] = None
    dual_clip: Optional[float] = None
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class DRGRPOConfig(PolicyLossConfig):
    name: str = "dr_grpo"
    epsilon: float = 0.2
    epsilon_high: Optional[float] = None
    dual_clip: Optional[float] = None
    # The constant length, in tokens, that the sum over an answer is divided by.
    max_completion_length: int = 1024


@dataclass
class GSPOConfig(PolicyLossConfig):
    name: str = "gspo"
    epsilon: float = 3e-4
    epsilon_high: Optional[float] = 4e-4
    dual_clip: Optional[float] = None
    normalization: PolicyNormalization = PolicyNormalization.sequence


@dataclass
class CISPOConfig(PolicyLossConfig):
    name: str = "cispo"
    clip: CISPOClip = CISPOClip.relative
    # null: no lower bound.
    epsilon: Optional[float] = None
    # null: no upper bound.
    epsilon_high: Optional[float] = 4.0
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class SAPOConfig(PolicyLossConfig):
    name: str = "sapo"
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    # For the report only: ratios further from 1 are counted.
    epsilon: float = 0.2
    normalization: PolicyNormalization = PolicyNormalization.sequence


@dataclass
class PPOConfig(PolicyLossConfig):
    name: str = "ppo"
    epsilon: float = 0.2
    epsilon_high: Optional[float] = None
    dual_clip: Optional[float] = None
    # Weight of the critic's loss; 0: no critic.
    value_coef: float = 0.1
    # How far a value may move from what it was before the update; null: any distance.
    value_epsilon: Optional[float] = 0.2
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class ImportanceSamplingConfig(PolicyLossConfig):
    name: str = "importance_sampling"
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class ReinforceConfig(PolicyLossConfig):
    name: str = "reinforce"
    # null: the plain score function; a number: PPO's clip, as REINFORCE++ has it.
    epsilon: Optional[float] = None
    # null: the same as epsilon.
    epsilon_high: Optional[float] = None
    normalization: PolicyNormalization = PolicyNormalization.token


@dataclass
class RLOOConfig(PolicyLossConfig):
    name: str = "rloo"
    # null: no clip.
    epsilon: Optional[float] = None
    # null: the same as epsilon.
    epsilon_high: Optional[float] = None
