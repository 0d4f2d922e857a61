"""What a loss is: a pure function of per-token log-probabilities.

Shapes: B rows, T positions. All tensors are [B, T]; positions outside ``mask`` hold 0 and never matter.
A loss returns the SUM over this call's tokens (or rows) divided by ``normalizer``, the count of the whole
optimizer step over all micro-batches and ranks, so that the way a step is cut changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from twinkle_research.data_format import IGNORE_INDEX, InputFeature

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TokenScores:
    """What a backend delivers for each trained position, float32 with gradient."""

    logprobs: Tensor  # [B, T] log-probability of the label
    entropy: Tensor | None = None  # [B, T] of the predicted distribution, nats
    logsumexp: Tensor | None = None  # [B, T] log of the softmax denominator
    mean_logprobs: Tensor | None = None  # [B, T] mean over the vocabulary of the log-probabilities
    values: Tensor | None = None  # [B, T] of a value head, for the state before the label's token


@dataclass
class LossInputs:
    """What a loss may look at beside the scores."""

    mask: Tensor  # [B, T] float32, 1 on trained positions
    sequence_ids: Tensor  # [B, T] int64, index of the document within this call; padding has any valid index
    num_sequences: int
    advantages: Tensor | None = None  # [B, T]
    old_logprobs: Tensor | None = None  # [B, T] of the policy before the first update on these rows; None: the ratio is 1
    ref_logprobs: Tensor | None = None  # [B, T] of the reference
    sampler_logprobs: Tensor | None = None  # [B, T] as the sampler gave them
    old_values: Tensor | None = None  # [B, T] of the value head before the first update
    returns: Tensor | None = None  # [B, T] what the values are to be
    baselines: Tensor | None = None  # [B, T] the same on all of a row: what its log-ratio is compared with (KTO)

    def sum_by_sequence(self, values_BT: Tensor) -> Tensor:
        """[num_sequences]: over each sequence's trained positions."""
        sums = values_BT.new_zeros(self.num_sequences)
        return sums.index_add(0, self.sequence_ids.reshape(-1), (values_BT * self.mask).reshape(-1))


@dataclass
class LossOutput:
    loss: Tensor  # scalar with gradient, already divided by the normaliser
    sequence_losses: Tensor  # [num_sequences] detached sums, to name the rows of a non-finite loss
    metrics: dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), summed over calls and ranks before division
    maxima: dict[str, Tensor] = field(default_factory=dict)  # name -> largest value over tokens


class Loss(ABC):
    """Base of all losses. ``needs`` names the optional TokenScores fields that it reads, ``reads`` the loss inputs that may be
    passed for it (by their public names, processor.base.LOSS_INPUTS); others are refused. ``rows_together``: that many rows
    in turn (a pair) belong together, and are never cut apart."""

    needs: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset()
    rows_together: ClassVar[int] = 1
    decides: ClassVar[frozenset[str]] = frozenset()  # options of a base that this class sets itself
    normalization: str = "token"

    def count(self, features: Sequence[InputFeature]) -> int:
        """This loss's normaliser over ``features``: trained tokens, or rows with at least one."""
        trained = [sum(label != IGNORE_INDEX for label in f["labels"]) for f in features]
        return sum(trained) if self.normalization == "token" else sum(n > 0 for n in trained)

    @abstractmethod
    def __call__(self, scores: TokenScores, inputs: LossInputs, normalizer: float) -> LossOutput: ...

    def logprob_gradient(self, inputs: LossInputs, normalizer: float) -> Tensor | None:
        """[B, T] derivative of the loss by the log-probabilities, where it does not depend on the scores, else None.

        A backend that trains its vocabulary projection then needs each position's logits only once.
        """
        return None
