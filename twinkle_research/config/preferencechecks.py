"""What losses on pairs of answers need from the rest of the config."""

from collections.abc import Iterator

from twinkle_research.dataset.config import TrainOn, Truncation
from twinkle_research.loss.config import PREFERENCE_CONFIGS, DPOConfig, DPOLossType, ORPOConfig
from twinkle_research.trainer.config import TrainConfig


def preference_problems(config: TrainConfig) -> Iterator[str]:
    loss, data = config.loss, config.data
    if not isinstance(loss, PREFERENCE_CONFIGS):
        if data.pairs:
            yield f"data={data.name} has two answers a row, which loss={loss.name} does not compare; write loss=dpo, for example"
        return
    if not data.pairs:
        yield f"loss={loss.name} compares two answers to each prompt, which data={data.name} does not have; write data=preference"
    if not isinstance(loss, ORPOConfig) and loss.beta == 0:
        yield f"'loss.beta' must be > 0: with 0 the pairs have no part in loss={loss.name}"
    if isinstance(loss, DPOConfig):
        yield from _dpo(loss)
    if data.pairs:
        if data.train_on is not TrainOn.assistant:
            yield f"data.train_on={data.train_on.name} has no effect with data={data.name}: the answers are trained"
        if data.truncation in (Truncation.left, Truncation.split):
            yield (
                f"data.truncation={data.truncation.name} would give the two answers of a pair different prompts; write right, "
                "delete or raise"
            )


def _dpo(loss: DPOConfig) -> Iterator[str]:
    if loss.label_smoothing >= 0.5:
        yield f"'loss.label_smoothing' must be in [0, 0.5), got {loss.label_smoothing}: at 0.5 the order of a pair says nothing"
    if loss.label_smoothing and loss.loss_type is not DPOLossType.sigmoid:
        yield f"'loss.label_smoothing' has no effect with loss.loss_type={loss.loss_type.name}; it belongs to sigmoid"
    if loss.average_logps and loss.loss_type is not DPOLossType.ipo:
        yield f"'loss.average_logps' has no effect with loss.loss_type={loss.loss_type.name}; it belongs to ipo"
