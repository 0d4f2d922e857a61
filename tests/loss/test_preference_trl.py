"""The same numbers as TRL 1.16 in float64: its own code, called with scores instead of a model, on the same pairs."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from pair_rows import random_pairs
from trl_live import Accelerator, trl_module

from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import TokenScores


class OneProcess(Accelerator):
    gather_for_metrics = Accelerator.gather


def from_one_side(values):
    """TRL has all chosen rows first, then all rejected ones."""
    return torch.cat([values[::2], values[1::2]])


def trl_dpo(logprobs, inputs, loss_type, beta, label_smoothing=0.0):
    rows, length = inputs.mask.shape
    # One more position: TRL shifts, our labels are shifted already.
    completion = torch.cat([torch.zeros(rows, 1), from_one_side(inputs.mask)], 1).long()
    reference = from_one_side((inputs.ref_logprobs * inputs.mask).sum(1)).chunk(2)
    batch = {
        "input_ids": torch.zeros(rows, length + 1, dtype=torch.long), "completion_mask": completion,
        "attention_mask": torch.ones(rows, length + 1), "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1],
    }  # fmt: skip
    blank = torch.zeros(rows, length, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=from_one_side(logprobs), entropy=blank, mean_logits=blank, is_top1=blank.bool())
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=OneProcess(), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=beta,
        label_smoothing=label_smoothing, use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    loss = trl_module("dpo_trainer").DPOTrainer._compute_loss(trainer, lambda **_: outputs, batch, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_cpo(logprobs, inputs, loss_type, beta, **settings):
    logps = logprobs.sum(1) / (inputs.mask.sum(1) if loss_type == "simpo" else 1)
    trainer = SimpleNamespace(**{"alpha": 0.0, "beta": beta, "loss_type": loss_type, "label_smoothing": 0.0, **settings},
                              accelerator=OneProcess())  # fmt: skip
    losses, chosen, rejected = trl_module("cpo_trainer", "experimental.cpo").CPOTrainer.cpo_loss(
        trainer, *from_one_side(logps).chunk(2)
    )
    return losses.mean(), {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item()}


def trl_orpo(logprobs, inputs, lambda_orpo, monkeypatch):
    """Its loss over the odds; the other part, which is the negative log-likelihood, TRL takes over the prompt too."""
    logps = from_one_side(logprobs.sum(1) / inputs.mask.sum(1)).chunk(2)
    trainer = SimpleNamespace(beta=lambda_orpo, accelerator=OneProcess())
    orpo = trl_module("orpo_trainer", "experimental.orpo").ORPOTrainer
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # it would round to float32 on the way
        losses, chosen, rejected, _, log_odds = orpo.odds_ratio_loss(trainer, *logps)
    nll = -logps[0].mean()
    reports = {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item(), "log_odds": log_odds.item()}
    return nll - losses.mean(), reports


def trl_kto(logprobs, inputs, z, beta):
    rows, length = inputs.mask.shape
    pairs = rows // 2
    completion = torch.cat([torch.zeros(rows, 1), from_one_side(inputs.mask)], 1).long()
    reference = from_one_side((inputs.ref_logprobs * inputs.mask).sum(1))
    batch = {
        "input_ids": torch.zeros(rows, length + 1, dtype=torch.long), "completion_mask": completion,
        "attention_mask": torch.ones(rows, length + 1), "label": torch.tensor([True] * pairs + [False] * pairs),
        "ref_logps": reference, "ref_KL_logps": torch.zeros(1, dtype=torch.float64),
    }  # fmt: skip
    blank = torch.zeros(rows, length, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=from_one_side(logprobs), entropy=blank, mean_logits=blank, is_top1=blank.bool())
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=OneProcess(), aux_loss_enabled=False, precompute_ref_logps=True,
        calculate_KL=True, _compute_kl_logps=lambda *_: torch.tensor([z], dtype=torch.float64), loss_type="kto", beta=beta,
        desirable_weight=1.0, undesirable_weight=1.0, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
        _tp_size=1, args=SimpleNamespace(),
    )  # fmt: skip
    return trl_module("kto_trainer").KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, return_outputs=False)


def check(name, options, inputs, logprobs, expected, reports):
    ours = resolve_loss(name, **options)(TokenScores(logprobs), inputs, len(logprobs) // 2)
    assert ours.loss.item() == pytest.approx(expected.item(), rel=1e-10)
    # Where nothing is trained TRL's log-probabilities come from a loss that ignores the position.
    gradients = [torch.autograd.grad(loss, logprobs, retain_graph=True)[0] * inputs.mask for loss in (ours.loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    for key, value in reports.items():
        total, count = ours.metrics[key]
        assert (total / count).item() == pytest.approx(value, rel=1e-6), key


DPO = [
    ({}, "sigmoid"),
    ({"beta": 0.7}, "sigmoid"),
    ({"loss_type": "hinge", "beta": 0.3}, "hinge"),
    ({"loss_type": "ipo", "average_logps": True}, "ipo"),
    ({"loss_type": "ipo", "average_logps": True, "beta": 0.02}, "ipo"),
]
REPORTS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("options", "loss_type"), DPO, ids=str)
def test_dpo(options, loss_type, seed):
    scores, inputs = random_pairs(seed)
    expected, reports = trl_dpo(scores.logprobs, inputs, loss_type, options.get("beta", 0.1))
    check("dpo", options, inputs, scores.logprobs, expected, {name: reports[name] for name in REPORTS})


def test_ipo_of_answers_of_one_token_is_the_same_either_way():
    """Where sums are means, the paper's form and TRL's agree."""
    scores, inputs = random_pairs(0)
    inputs.mask[:] = 0
    inputs.mask[:, 3] = 1
    logprobs = (scores.logprobs.detach() * inputs.mask).requires_grad_()
    expected, _ = trl_dpo(logprobs, inputs, "ipo", 0.1)
    check("dpo", {"loss_type": "ipo"}, inputs, logprobs, expected, {})


@pytest.mark.parametrize("seed", range(3))
def test_cpo_simpo_and_conservative_dpo(seed):
    scores, inputs = random_pairs(seed)
    logprobs = scores.logprobs
    expected, reports = trl_cpo(logprobs, inputs, "sigmoid", 0.4)
    check("cpo", {"beta": 0.4, "bc_coef": 0.0}, inputs, logprobs, expected, reports)
    nll = -(logprobs.sum(1) / inputs.mask.sum(1))[::2].mean()
    check("cpo", {"beta": 0.4, "bc_coef": 0.7}, inputs, logprobs, expected + 0.7 * nll, reports)
    expected, reports = trl_cpo(logprobs, inputs, "simpo", 2.0, simpo_gamma=1.2)
    check("simpo", {"beta": 2.0, "gamma": 1.2}, inputs, logprobs, expected, reports)
    expected, reports = trl_cpo(logprobs - inputs.ref_logprobs * inputs.mask, inputs, "sigmoid", 0.3, label_smoothing=0.15)
    check("dpo", {"beta": 0.3, "label_smoothing": 0.15}, inputs, logprobs, expected, reports)


@pytest.mark.parametrize("seed", range(3))
def test_orpo(seed, monkeypatch):
    scores, inputs = random_pairs(seed)
    expected, reports = trl_orpo(scores.logprobs, inputs, 0.25, monkeypatch)
    check("orpo", {"lambda_orpo": 0.25}, inputs, scores.logprobs, expected, reports)


@pytest.mark.parametrize("z", [0.0, 1.3])
def test_kto(z):
    scores, inputs = random_pairs(0)
    inputs.baselines = z * inputs.mask
    expected = trl_kto(scores.logprobs, inputs, z, beta=0.4)
    check("kto_pair", {"beta": 0.4}, inputs, scores.logprobs, expected, {})
