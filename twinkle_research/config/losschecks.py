"""Settings of the losses on sampled answers, and of their advantages, that exclude or need each other, or have no effect."""

from collections.abc import Iterator

from twinkle_research.advantage.config import (
    AdvantageConfig,
    GAEAdvantageConfig,
    GlobalBaseline,
    GRPOAdvantageConfig,
    ReinforcePPAdvantageConfig,
    RewardKL,
    RLOOAdvantageConfig,
    Scale,
    Whitening,
)
from twinkle_research.loss.config import (
    CORRECTION_BOUNDS,
    CISPOClip,
    CISPOConfig,
    CorrectionConfig,
    CorrectionMode,
    KLEstimator,
    LossDropout,
    PolicyLossConfig,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
)
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.trainer.config import TrainConfig


def loss_problems(config: TrainConfig) -> Iterator[str]:
    loss, advantage = config.loss, config.advantage
    if not isinstance(loss, PolicyLossConfig):
        return  # then an advantage is refused as a whole
    if not loss.beta and loss.kl_estimator is not KLEstimator.k3:
        yield "'loss.kl_estimator' has no effect with loss.beta=0"
    yield from _clip(loss)
    yield from _correction(loss.correction)
    yield from _dropout(config, loss)
    yield from _critic(loss, advantage)
    if isinstance(advantage, AdvantageConfig):
        yield from _advantage(config, advantage)


def _clip(loss: PolicyLossConfig) -> Iterator[str]:
    if isinstance(loss, (ReinforceConfig, RLOOConfig)) and loss.epsilon is None and loss.epsilon_high is not None:
        yield "'loss.epsilon_high' has no effect without loss.epsilon, which turns the clip on"
    if isinstance(loss, CISPOConfig):
        yield from _cispo(loss)
    dual_clip = getattr(loss, "dual_clip", None)
    if dual_clip is not None:
        high = 1 + (loss.epsilon if loss.epsilon_high is None else loss.epsilon_high)
        if dual_clip <= high:
            yield f"'loss.dual_clip' must be above 1 + loss.epsilon_high = {high}, got {dual_clip}"


def _cispo(loss: CISPOConfig) -> Iterator[str]:
    for key, wrong in (("epsilon", lambda bound: bound > 1), ("epsilon_high", lambda bound: bound < 1)):
        bound = getattr(loss, key)
        if loss.clip is CISPOClip.absolute and bound is not None and wrong(bound):
            side = "below" if key == "epsilon" else "above"
            yield (
                f"loss.clip=absolute bounds the weight itself {side} by loss.{key}={bound}, which leaves out 1, the weight of a "
                "policy that has not changed; for a distance from 1 write loss.clip=relative"
            )


def _correction(correction: CorrectionConfig) -> Iterator[str]:
    if correction.mode is CorrectionMode.none:
        for key in ("low", "high"):
            if getattr(correction, key) is not None:
                yield f"'loss.correction.{key}' has no effect with loss.correction.mode=none"
        return
    low, high = CORRECTION_BOUNDS[correction.mode.name]
    low, high = correction.low or low, correction.high or high
    if low is not None and high is not None and low >= high:
        yield (
            f"loss.correction.low={low} must be below loss.correction.high={high} (what is not given is that of "
            f"loss.correction.mode={correction.mode.name})"
        )


def _dropout(config: TrainConfig, loss: PolicyLossConfig) -> Iterator[str]:
    drops = isinstance(config.adapter, LoraAdapterConfig) and config.adapter.dropout > 0
    if drops and loss.dropout is LossDropout.none:
        yield (
            f"adapter.dropout={config.adapter.dropout} would change the probabilities between the scoring of an answer and its "
            "training; write loss.dropout=replay, which uses the same mask in both, or adapter.dropout=0"
        )
    if loss.dropout is LossDropout.replay and not drops and config.model.path is None:
        yield "loss.dropout=replay has no effect: nothing is dropped, as adapter.dropout is 0"


def _critic(loss: PolicyLossConfig, advantage: object) -> Iterator[str]:
    critic = isinstance(loss, PPOConfig) and loss.value_coef > 0
    if isinstance(advantage, GAEAdvantageConfig) and not critic:
        what = "loss.value_coef > 0" if isinstance(loss, PPOConfig) else "loss=ppo"
        yield f"advantage=gae needs a critic, which is trained by {what}"
    if critic and isinstance(advantage, AdvantageConfig) and not isinstance(advantage, GAEAdvantageConfig):
        yield (
            f"the critic of loss.value_coef={loss.value_coef} is trained on returns, which advantage={advantage.name} does not "
            "give; write advantage=gae, or loss.value_coef=0"
        )
    if isinstance(loss, PPOConfig) and not loss.value_coef and loss.value_epsilon != PPOConfig().value_epsilon:
        yield "'loss.value_epsilon' has no effect with loss.value_coef=0"


def _advantage(config: TrainConfig, advantage: AdvantageConfig) -> Iterator[str]:
    if not advantage.kl_coef and advantage.kl_estimator is not RewardKL.k1:
        yield "'advantage.kl_estimator' has no effect with advantage.kl_coef=0"
    unscaled = None
    if isinstance(advantage, (GRPOAdvantageConfig, RLOOAdvantageConfig)) and advantage.scale is Scale.none:
        unscaled = "advantage.scale=none"
    if isinstance(advantage, ReinforcePPAdvantageConfig) and advantage.whiten is Whitening.none:
        unscaled = "advantage.whiten=none"
    if isinstance(advantage, GAEAdvantageConfig) and not advantage.normalize:
        unscaled = "advantage.normalize=false"
    if unscaled is not None:
        default = type(advantage)()
        for key in ("std", "eps"):
            if getattr(advantage, key) != getattr(default, key):
                yield f"'advantage.{key}' has no effect with {unscaled}: nothing is divided by a std"
    grouped = isinstance(advantage, ReinforcePPAdvantageConfig) and advantage.baseline is GlobalBaseline.group
    if grouped and getattr(config.rollout, "num_generations", 2) == 1:
        yield "advantage.baseline=group compares the answers to one prompt: rollout.num_generations must be >= 2"
