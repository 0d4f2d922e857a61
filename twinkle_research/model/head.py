"""Log-probabilities of labels from hidden states, without ever holding the logits of all positions.

The vocabulary projection runs in chunks of positions, and only at positions that have a label. Independent of
transformers: every backend that has hidden states and a projection matrix, or a shard of its rows, can use it.

Notation: N labelled positions, D hidden size, V vocabulary. z = softcap(scale * (h W^T + b)) / temperature, -inf outside a
position's kept set where it has one, p = softmax(z).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle_research.model.vocabulary import WHOLE, Vocabulary

OUTPUTS = ("logprobs", "entropy", "logsumexp", "mean_logprobs")


@dataclass(frozen=True)
class LogitTransform:
    """What an architecture does between its projection and its softmax.

    ``scale`` multiplies the logits (Cohere, Granite), ``softcap`` c maps them to c * tanh(z / c) (Gemma 2).
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class SampledFrom:
    """The distribution that the labels were drawn from, where it is not the model's own."""

    temperature_N: Tensor | None = None  # float32
    # Positions (ascending) and token ids of the kept sets; a position that is not named keeps the whole vocabulary.
    kept_positions_K: Tensor | None = None  # int64
    kept_ids_K: Tensor | None = None  # int64


@dataclass
class HeadScores:
    """Values at the N labelled positions, float32 (float64 for a float64 model). None where not asked for."""

    logprobs: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logprobs: Tensor | None = None


def score_labels(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    needs: frozenset[str] = frozenset(),
    chunk: int = 512,
    logprob_gradient_N: Tensor | None = None,
    sampled_from: SampledFrom = SampledFrom(),
    vocabulary: Vocabulary = WHOLE,
) -> HeadScores:
    """Log-probability of each label, and what ``needs`` names of OUTPUTS, differentiable in hidden, weight and bias.

    At most ``chunk`` positions' logits exist at one time. What it costs in projections of N positions, full logits
    with autograd costing 2 for a frozen weight and 3 for a trained one:
    frozen: 2 (the derivative by the hidden state is formed beside the forward pass; entropy costs one more);
    trained: 3 if N <= chunk or if ``logprob_gradient_N`` was right, else up to 4, as the logits are made again.

    ``logprob_gradient_N``: the derivative of the loss by the log-probabilities, where it is known beforehand (cross
    entropy). It only saves work: where it turns out to be wrong the exact gradient is computed, at twice the cost.
    ``sampled_from``: all values are then those of the tempered, filtered distribution; the kept set is taken as given.
    Labels must lie in [0, V), and in their kept set; the caller checks that.
    ``vocabulary``: of a ShardedVocabulary, ``weight_VD`` and ``bias_V`` are this rank's rows. The values are those of the
    whole vocabulary, on every rank; ids are the vocabulary's. Weight and bias get the gradient of their rows; that of
    ``hidden_ND`` is this shard's PART of a sum over the ranks, which the caller takes (by an input whose backward pass
    all-reduces, as tensor-parallel layers have). It expects the same derivative by the values on all ranks.
    """
    unknown = set(needs) - set(OUTPUTS)
    if unknown:
        raise ValueError(f"unknown head output {sorted(unknown)[0]!r}; valid: {', '.join(OUTPUTS)}")
    if sampled_from.kept_ids_K is not None and "mean_logprobs" in needs:
        raise ValueError("the mean log-probability over the vocabulary is infinite where tokens are filtered out")
    needs = frozenset(needs) | {"logprobs"}
    settings = _Settings(transform, tuple(name for name in OUTPUTS if name in needs), chunk, sampled_from, vocabulary)
    if not torch.is_grad_enabled():  # autograd tells a function which inputs need a gradient even where none is wanted
        hidden_ND, weight_VD, bias_V = hidden_ND.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach()
    values = _ScoreLabels.apply(hidden_ND, weight_VD, bias_V, labels_N, logprob_gradient_N, settings)
    return HeadScores(**dict(zip(settings.outputs, values, strict=True)))


@dataclass(frozen=True)
class _Settings:
    transform: LogitTransform
    outputs: tuple[str, ...]
    chunk: int
    sampled_from: SampledFrom
    vocabulary: Vocabulary

    def spans(self, n: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk, n)) for start in range(0, n, self.chunk)]


@dataclass
class _Chunk:
    """One chunk after its softmax. ``slope`` is d softcap(u)/du, None where there is no softcap."""

    p: Tensor  # [C, V]
    logp: Tensor | None  # [C, V], only for the entropy
    slope: Tensor | None  # [C, V]
    values: dict[str, Tensor]  # name -> [C]


class _Projection:
    """The projection of one call, and its buffers (one chunk of logits each, used again for every chunk)."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings):
        self.hidden, self.weight, self.bias, self.labels, self.settings = hidden, weight, bias, labels, settings
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.low_precision = hidden.dtype != self.dtype
        self.vocabulary, self.total = settings.vocabulary, settings.vocabulary.total(weight)
        self._buffer: Tensor | None = None
        self._reduced: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}  # first position of a chunk -> its reductions

    def softmax(self, start: int, stop: int) -> _Chunk:
        """A chunk that was here before is not reduced again: the backward pass has no collectives."""
        z, slope, dropped = self._scores(start, stop)
        wanted, labels = self.settings.outputs, self.labels[start:stop]
        before = self._reduced.get(start)
        top = self.vocabulary.largest(z) if before is None else before[0]
        z.sub_(top)
        sums = {"at_label": self.vocabulary.at_labels(z, labels)}
        if "mean_logprobs" in wanted:
            sums["mean"] = self.vocabulary.mean(z, -1, self.dtype)
        logp = z.clone() if "entropy" in wanted else None
        z.exp_()
        sums["total"] = z.sum(-1)
        if logp is not None and not self.vocabulary.is_whole:
            sums["mass_z"] = _without(dropped, z * logp).sum(-1)
        sums = self.vocabulary.complete(sums) if before is None else before[1]
        self._reduced[start] = top, sums
        log_total = sums["total"].log()
        p = z.div_(sums["total"][:, None])
        values = {"logprobs": sums["at_label"] - log_total}
        if "logsumexp" in wanted:
            values["logsumexp"] = top.squeeze(-1) + log_total
        if "mean_logprobs" in wanted:
            values["mean_logprobs"] = sums["mean"] - log_total
        if logp is not None:
            _without(dropped, logp.sub_(log_total[:, None]))
            # Both forms have terms of one sign only. The second saves a reduction that needs the first one's result.
            values["entropy"] = -(p * logp).sum(-1) if self.vocabulary.is_whole else log_total - sums["mass_z"] / sums["total"]
        return _Chunk(p, logp, slope, values)

    def _scores(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """z, the slope of the softcap, and where z is -inf; [C, V] each."""
        z, slope = self._logits(self.hidden[start:stop]), None
        cap = self.settings.transform.softcap
        if cap is not None:
            z.div_(cap).tanh_()
            slope = 1 - z * z
            z.mul_(cap)
        temperature = self.settings.sampled_from.temperature_N
        if temperature is not None:
            z.div_(temperature[start:stop, None])
        dropped = self._dropped(start, stop)
        if dropped is not None:
            z.masked_fill_(dropped, -torch.inf)
        return z, slope, dropped

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._buffer is None:
            rows = min(self.settings.chunk, len(self.hidden))
            self._buffer = torch.empty(rows, len(self.weight), dtype=self.dtype, device=hidden.device)
        z = self._buffer[: len(hidden)]
        if self.low_precision:
            z.copy_(hidden @ self.weight.t())
        else:
            torch.mm(hidden, self.weight.t(), out=z)
        if self.bias is not None:
            z.add_(self.bias)
        if self.settings.transform.scale != 1.0:
            z.mul_(self.settings.transform.scale)
        return z

    def _dropped(self, start: int, stop: int) -> Tensor | None:
        """[C, V], True for tokens outside a position's kept set."""
        positions, ids = self.settings.sampled_from.kept_positions_K, self.settings.sampled_from.kept_ids_K
        if positions is None:
            return None
        first, last = torch.searchsorted(positions, torch.tensor([start, stop], device=positions.device)).tolist()
        rows = positions[first:last] - start
        dropped = torch.zeros(stop - start, len(self.weight), dtype=torch.bool, device=self.hidden.device)
        dropped[rows] = True
        self.vocabulary.keep(dropped, rows, ids[first:last])
        return dropped

    def free(self) -> None:
        self._buffer = None

    def gain(self, start: int, stop: int) -> float | Tensor:
        """dz / d(h W^T + b) but for the softcap: a number, or [C, 1]."""
        temperature = self.settings.sampled_from.temperature_N
        scale = self.settings.transform.scale
        return scale if temperature is None else scale / temperature[start:stop, None]

    def back(self, d_logits: Tensor, slope: Tensor | None, gain: float | Tensor) -> Tensor:
        """From the derivative by z to that by h W^T + b, in the dtype of the matrix products. In place."""
        if slope is not None:
            d_logits.mul_(slope)
        if isinstance(gain, Tensor) or gain != 1.0:
            d_logits.mul_(gain)
        return d_logits.to(self.hidden.dtype)

    def jacobians(self, chunk: _Chunk, start: int, stop: int) -> dict[str, Tensor]:
        """d output / d hidden of each position, [C, D] for each output. Uses up ``chunk``.

        Formed from onehot - p, not as W[y] - pW, which would cancel in low precision when p[y] is near 1.
        """
        labels, vocabulary = self.labels[start:stop], self.vocabulary
        wanted, gain = self.settings.outputs, self.gain(start, stop)
        result = {}
        if "entropy" in wanted:  # dH/dz = -p (log p + H)
            d_entropy = chunk.logp.add_(chunk.values["entropy"][:, None]).mul_(chunk.p).neg_()
            result["entropy"] = self.back(d_entropy, chunk.slope, gain) @ self.weight
        d_logprobs = chunk.p.neg_()
        vocabulary.add_at_labels(d_logprobs, labels, torch.ones_like(labels, dtype=self.dtype))
        result["logprobs"] = self.back(d_logprobs, chunk.slope, gain) @ self.weight
        if "logsumexp" in wanted or "mean_logprobs" in wanted:
            label_slope = gain if chunk.slope is None else gain * vocabulary.at_labels(chunk.slope, labels)[:, None]
            label_rows = vocabulary.rows_at_labels(self.weight, labels).to(self.dtype)
            by_logsumexp = label_slope * label_rows - result["logprobs"]
            if "logsumexp" in wanted:
                result["logsumexp"] = by_logsumexp
            if "mean_logprobs" in wanted:
                result["mean_logprobs"] = self._mean_logit_jacobian(chunk.slope, gain) - by_logsumexp
        return result

    def _mean_logit_jacobian(self, slope: Tensor | None, gain: float | Tensor) -> Tensor:
        if slope is None:
            return gain * self.vocabulary.mean(self.weight, 0, self.dtype)[None]
        return gain / self.total * (slope.to(self.hidden.dtype) @ self.weight).to(self.dtype)

    def logit_gradient(self, chunk: _Chunk, gradients: dict[str, Tensor], start: int, stop: int) -> Tensor:
        """The loss's derivative by h W^T + b, [C, V], from those by the outputs, [C]. Uses up ``chunk``.

        dlogp[y]/dz = onehot - p;  dlogsumexp/dz = p;  dmean/dz = 1/V - p;  dH/dz = -p (log p + H)
        """
        by_p = torch.zeros(stop - start, dtype=self.dtype, device=self.hidden.device)
        at_label, everywhere = gradients.get("logprobs"), gradients.get("mean_logprobs")
        for name, sign in (("logprobs", -1), ("logsumexp", 1), ("mean_logprobs", -1)):
            if name in gradients:
                by_p = by_p + sign * gradients[name]
        d_logits = chunk.p
        if "entropy" in gradients:
            g = gradients["entropy"]
            by_p = by_p - g * chunk.values["entropy"]
            d_logits.mul_(chunk.logp.mul_(-g[:, None]).add_(by_p[:, None]))
        else:
            d_logits.mul_(by_p[:, None])
        if everywhere is not None:
            d_logits.add_(everywhere[:, None] / self.total)
        if at_label is not None:
            self.vocabulary.add_at_labels(d_logits, self.labels[start:stop], at_label)
        return self.back(d_logits, chunk.slope, self.gain(start, stop))


class _Accumulator:
    """Gradients of hidden, weight and bias, summed over the chunks."""

    def __init__(self, projection: _Projection, needed: tuple[bool, bool, bool]):
        self.projection = projection
        hidden, weight, bias = projection.hidden, projection.weight, projection.bias
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=projection.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=projection.dtype) if needed[2] and bias is not None else None

    def add(self, d_logits: Tensor, start: int, stop: int) -> None:
        hidden = self.projection.hidden[start:stop]
        if self.hidden is not None:
            torch.mm(d_logits, self.projection.weight, out=self.hidden[start:stop])
        if self.weight is not None and self.projection.low_precision:
            self.weight += d_logits.t() @ hidden
        elif self.weight is not None:
            self.weight.addmm_(d_logits.t(), hidden)
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight, bias = self.projection.weight, self.projection.bias
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None else self.bias.to(bias.dtype),
        )


class _ScoreLabels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, known_gradient, settings: _Settings):
        projection = _Projection(hidden, weight, bias, labels, settings)
        needed = ctx.needs_input_grad[:3]
        trained = needed[1] or needed[2]
        ctx.projection, ctx.needed, ctx.known, ctx.kept = projection, needed, None, None
        ctx.jacobians = {} if needed[0] and not trained else None
        known = None
        if trained and known_gradient is not None and settings.outputs == ("logprobs",):
            known = _Accumulator(projection, needed)
            ctx.known = (known_gradient, known)
        outputs = {name: hidden.new_empty(len(hidden), dtype=projection.dtype) for name in settings.outputs}
        for start, stop in settings.spans(len(hidden)):
            chunk = projection.softmax(start, stop)
            for name, values in outputs.items():
                values[start:stop] = chunk.values[name]
            if ctx.jacobians is not None:
                for name, jacobian in projection.jacobians(chunk, start, stop).items():
                    ctx.jacobians.setdefault(name, hidden.new_empty(hidden.shape, dtype=jacobian.dtype))[start:stop] = jacobian
            elif known is not None:
                gradient = {"logprobs": known_gradient[start:stop].to(projection.dtype)}
                known.add(projection.logit_gradient(chunk, gradient, start, stop), start, stop)
            elif trained:
                ctx.kept = chunk  # the last one needs no second pass
        if ctx.kept is None:
            projection.free()
        ctx.versions = _versions(projection)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx, *gradients):
        projection: _Projection = ctx.projection
        if _versions(projection) != ctx.versions:
            raise RuntimeError("hidden states or head weights were changed in place between forward and backward")
        if ctx.jacobians is not None:
            return _hidden_gradient(ctx.jacobians, projection, gradients), None, None, None, None, None
        known, ctx.known = ctx.known, None
        if known is not None and gradients[0] is not None and _equal_but_for_rounding(gradients[0], known[0]):
            return *known[1].result(), None, None, None
        del known
        named = {name: g for name, g in zip(projection.settings.outputs, gradients, strict=True) if g is not None}
        sums = _Accumulator(projection, ctx.needed)
        kept, ctx.kept = ctx.kept, None
        for start, stop, chunk in _chunks_backwards(projection, kept):
            part = {name: g[start:stop] for name, g in named.items()}
            sums.add(projection.logit_gradient(chunk, part, start, stop), start, stop)
        projection.free()
        return *sums.result(), None, None, None


def _chunks_backwards(projection: _Projection, kept: _Chunk | None) -> Iterator[tuple[int, int, _Chunk]]:
    for start, stop in reversed(projection.settings.spans(len(projection.hidden))):
        chunk, kept = kept or projection.softmax(start, stop), None
        yield start, stop, chunk


def _without(dropped: Tensor | None, x: Tensor) -> Tensor:
    """0 where p is 0, as 0 * -inf would be NaN. In place."""
    return x if dropped is None else x.masked_fill_(dropped, 0.0)


def _hidden_gradient(jacobians: dict[str, Tensor], projection: _Projection, gradients) -> Tensor:
    total = None
    for name, gradient in zip(projection.settings.outputs, gradients, strict=True):
        if gradient is not None and name in jacobians:  # there are none where no position has a label
            part = jacobians[name] * gradient[:, None]
            total = part if total is None else total.add_(part)
    return total.to(projection.hidden.dtype) if total is not None else torch.zeros_like(projection.hidden)


def _equal_but_for_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=0.0)


def _versions(projection: _Projection) -> tuple[int, ...]:
    tensors = (projection.hidden, projection.weight, projection.bias)
    return tuple(tensor._version for tensor in tensors if tensor is not None)
