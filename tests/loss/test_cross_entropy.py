"""Cross entropy against torch's own and against S01, and that no cut of the tokens changes it."""

import pytest
import torch

from twinkle_research.errors import ConfigError
from twinkle_research.loss import build, resolve_loss
from twinkle_research.loss.base import LossInputs, TokenScores
from twinkle_research.loss.config import CrossEntropyConfig, Normalization
from twinkle_research.loss.cross_entropy import CrossEntropyLoss

V = 11


def inputs_of(mask: torch.Tensor) -> LossInputs:
    rows = torch.arange(len(mask))[:, None].expand(mask.shape).contiguous()
    return LossInputs(mask=mask.double(), sequence_ids=rows, num_sequences=len(mask))


def scores_of(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> TokenScores:
    logp = logits.log_softmax(-1)
    at_label = logp.gather(-1, labels[..., None]).squeeze(-1)
    return TokenScores(at_label * mask, None, logits.logsumexp(-1) * mask, logp.mean(-1) * mask)


@pytest.fixture
def sample():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, V, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (4, 6), generator=generator)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).double()
    mask[2] = 0  # a row without a trained token
    return logits, labels, mask


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_token_normalisation_is_torchs_cross_entropy(sample, smoothing):
    logits, labels, mask = sample
    ours = CrossEntropyLoss(label_smoothing=smoothing)(scores_of(logits, labels, mask), inputs_of(mask), int(mask.sum()))
    target = torch.where(mask.bool(), labels, -100)
    torchs = torch.nn.functional.cross_entropy(logits.reshape(-1, V), target.reshape(-1), label_smoothing=smoothing)
    assert torch.allclose(ours.loss, torchs, rtol=1e-12)
    assert torch.allclose(
        *(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (ours.loss, torchs)), rtol=1e-10, atol=1e-14
    )


def test_sequence_normalisation_is_the_mean_of_row_means(sample):
    logits, labels, mask = sample
    loss = CrossEntropyLoss("sequence")
    out = loss(scores_of(logits, labels, mask), inputs_of(mask), 3)
    nll = -logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    rows = [(nll[i] * mask[i]).sum() / mask[i].sum() for i in range(4) if mask[i].sum()]
    assert torch.allclose(out.loss, sum(rows) / 3, rtol=1e-12)
    assert torch.allclose(out.sequence_losses, torch.stack([rows[0], rows[1], torch.zeros_like(rows[0]), rows[2]]), rtol=1e-12)
    features = [{"labels": [label if m else -100 for label, m in zip(ls, ms)]} for ls, ms in zip(labels.tolist(), mask.tolist())]
    assert loss.count(features) == 3
    assert CrossEntropyLoss().count(features) == int(mask.sum())


def test_z_loss_adds_the_squared_denominator(sample):
    logits, labels, mask = sample
    scores = scores_of(logits, labels, mask)
    n = int(mask.sum())
    plain, with_z = CrossEntropyLoss()(scores, inputs_of(mask), n), CrossEntropyLoss(z_loss=0.01)(scores, inputs_of(mask), n)
    extra = 0.01 * (logits.logsumexp(-1).square() * mask).sum() / n
    assert torch.allclose(with_z.loss - plain.loss, extra, rtol=1e-12)
    total, count = with_z.metrics["nll"]
    assert torch.allclose(total / count, plain.loss, rtol=1e-12)  # perplexity needs the likelihood alone


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_rows_may_be_cut_into_any_calls(sample, normalization):
    logits, labels, mask = sample
    loss = CrossEntropyLoss(normalization, label_smoothing=0.1, z_loss=0.01)
    n = int(mask.sum()) if normalization == "token" else 3
    whole = loss(scores_of(logits, labels, mask), inputs_of(mask), n).loss
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    cut = sum(loss(scores_of(logits[p], labels[p], mask[p]), inputs_of(mask[p]), n).loss for p in parts)
    assert torch.allclose(whole, cut, rtol=1e-12)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_announced_gradient_is_the_gradient(sample, normalization):
    logits, labels, mask = sample
    loss, inputs = CrossEntropyLoss(normalization), inputs_of(mask)
    scores = scores_of(logits.detach(), labels, mask)
    scores.logprobs.requires_grad_()
    loss(scores, inputs, 7).loss.backward()
    assert torch.allclose(scores.logprobs.grad, loss.logprob_gradient(inputs, 7), rtol=1e-15)
    assert CrossEntropyLoss(z_loss=0.1).logprob_gradient(inputs, 7) is None


def test_nothing_to_train_is_zero_and_finite(sample):
    logits, labels, mask = sample
    mask = torch.zeros_like(mask)
    for normalization in ("token", "sequence"):
        out = CrossEntropyLoss(normalization)(scores_of(logits, labels, mask), inputs_of(mask), 0)
        assert out.loss.item() == 0.0
        assert torch.autograd.grad(out.loss, logits)[0].abs().max() == 0


def test_building_and_refusing():
    built = build(CrossEntropyConfig(normalization=Normalization.sequence, label_smoothing=0.1, z_loss=1e-4))
    assert (built.normalization, built.label_smoothing, built.z_loss) == ("sequence", 0.1, 1e-4)
    assert built.needs == {"mean_logprobs", "logsumexp"}
    assert resolve_loss("CrossEntropyLoss").needs == frozenset()
    assert resolve_loss(built) is built
    with pytest.raises(ConfigError, match="did you mean 'CrossEntropyLoss'"):
        resolve_loss("CrossEntropyLos")
    with pytest.raises(ConfigError, match="did you mean 'label_smoothing'"):
        resolve_loss("CrossEntropyLoss", label_smoothin=0.1)
    for wrong in ({"normalization": "rows"}, {"label_smoothing": 1.0}, {"z_loss": float("nan")}):
        with pytest.raises(ConfigError):
            CrossEntropyLoss(**wrong)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_s02_masked_answers_leave_the_denominator_too(normalization):
    """4 tokens of loss 0.5 are trained, 6 of a cut answer are not: 0.5. With both masked: exactly 0, gradients 0 and finite."""
    loss = CrossEntropyLoss(normalization)
    for first_row_trained, expected in ((True, 0.5), (False, 0.0)):
        mask = torch.zeros(2, 6)
        mask[0, :4] = float(first_row_trained)
        logprobs = (-0.5 * mask).requires_grad_()
        labels = [[7] * 4 if first_row_trained else [-100] * 4, [-100] * 6]
        count = loss.count([{"labels": row} for row in labels])
        output = loss(TokenScores(logprobs), inputs_of(mask), count)
        output.loss.backward()
        assert output.loss.item() == expected and torch.isfinite(logprobs.grad).all()
        assert (logprobs.grad[mask == 0] == 0).all()
