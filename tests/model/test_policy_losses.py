"""The losses on sampled answers through a real model: however a step is cut, padded or packed, the update is the same."""

import pytest
import torch
from test_partition import LORA, rows_with_empty, updates, weights
from tiny_models import relative_distance

from twinkle_research.errors import UserError
from twinkle_research.model.transformers import TransformersModel

LOSSES = {
    "grpo": {"beta": 0.1, "entropy_coef": 0.02, "correction": "tis_token"},
    "dapo": {},
    "bnpo": {"beta": 0.1, "kl_estimator": "k1_plus"},
    "dr_grpo": {"max_completion_length": 16},
    "gspo": {"epsilon": 0.1, "epsilon_high": 0.1, "correction": "mis_sequence"},
    "cispo": {},
    "sapo": {},
    "ppo": {"value_coef": 0.5, "dual_clip": 3.0},
    "importance_sampling": {"correction": "icepop"},
    "reinforce": {"correction_off_policy_threshold": 0.1},
    "rloo": {"epsilon": 0.2},
}


def make(folder, name, options=None, *, lora=False, **cut):
    model = TransformersModel(folder, dtype="float32", seed=5)
    if lora:
        model.add_adapter_to_model("default", LORA)
        with torch.no_grad():  # B is 0 at the start, and then A has no gradient
            for i, (parameter, p) in enumerate(model.training_state().parameters.items()):
                if "lora_B" in parameter:
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view(p.shape) + 0.01 * i)
    if "value_coef" in (options or {}):
        model.add_value_head()
    model.set_processor("InputProcessor", **cut)
    model.set_loss(name, **(options or {}))
    model.set_optimizer("sgd", lr=4.0)
    return model


def loss_inputs(model, rows, seed=0, spread=0.2):
    """What the loss reads: log-probabilities near the model's own, and what a critic needs; an advantage a row."""
    generator = torch.Generator().manual_seed(seed)
    logps = model.forward_only(rows).result["logps"]
    zeros = [[0.0] * len(row) for row in logps]

    def near(values):
        return [[x + spread * float(torch.randn((), generator=generator)) for x in row] for row in values]

    read = model.trained().loss.reads
    given = {name: near(logps) for name in sorted(read) if name.endswith("logps")}
    given |= {name: near(zeros) for name in sorted(read & {"old_values", "returns"})}
    return given | {"advantages": [5 * row[0] for row in near(zeros)]}


def step(model, rows, given):
    result = model.forward_backward(rows, normalizer=model.count(rows), **given).result
    model.clip_grad_and_step(1.0)
    return result["loss"]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_padding_and_packing(tiny_llama, name, lora):
    rows = rows_with_empty()
    cuts = [
        {"micro_batch_size": 8},
        {"micro_batch_size": 3},
        {"micro_batch_size": 1},
        {"padding_side": "left", "micro_batch_size": 4},
    ]
    cuts.append({"packing": True, "micro_batch_tokens": 40})
    models = [make(tiny_llama, name, LOSSES[name], lora=lora, **cut) for cut in cuts]
    start, given = weights(models[0]), loss_inputs(models[0], rows)
    losses = [step(model, rows, given) for model in models]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-6, abs=1e-7)
    reference, *others = updates(start, models)
    distances = [relative_distance(reference, other) for other in others]
    assert max(distances) <= 1e-6, distances


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce", "importance_sampling"])
def test_without_old_logps_the_policy_is_the_old_one(tiny_llama, name):
    """The gradient that is then known beforehand (one pass over the vocabulary less) is that of the ratio."""
    rows = rows_with_empty()
    models = [make(tiny_llama, name, micro_batch_size=3) for _ in range(2)]
    start, given = weights(models[0]), loss_inputs(models[0], rows)
    own = models[0].forward_only(rows).result["logps"]
    models[0].calculate_metric(False)
    losses = [
        step(models[0], rows, {"advantages": given["advantages"]}),
        step(models[1], rows, {"advantages": given["advantages"], "old_logps": own}),
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-7)
    assert relative_distance(*updates(start, models)) <= 1e-5
    metrics = models[0].calculate_metric(True).result
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0


def test_scoring_needs_no_advantages_and_training_does(tiny_llama):
    model = make(tiny_llama, "grpo", {"beta": 0.1})
    rows = rows_with_empty()
    assert model.forward_only(rows).result["loss"] == 0.0
    with pytest.raises(UserError, match="GRPOLoss needs advantages and ref_logps"):
        model.forward_backward(rows)


def test_the_reports_are_means_over_all_tokens(tiny_llama):
    """Of a step, whatever its micro-batches; the largest ones are those of any token."""
    rows = rows_with_empty()
    reports = []
    for micro in (8, 1):
        model = make(tiny_llama, "grpo", LOSSES["grpo"], micro_batch_size=micro)
        step(model, rows, loss_inputs(model, rows))
        reports.append(model.calculate_metric(True).result)
    expected = {
        "ratio/mean",
        "ratio/max",
        "ratio/clip_low",
        "ratio/clip_high",
        "kl/mean",
        "kl/old",
        "entropy",
        "sampler_gap/mean_abs",
    }
    assert expected | {"sampler_gap/max", "correction/mean", "correction/dropped"} <= set(reports[0])
    assert reports[0] == pytest.approx(reports[1], rel=1e-5, abs=1e-7)
    assert reports[0]["sampler_gap/max"] > reports[0]["sampler_gap/mean_abs"] > 0
    assert reports[0]["kl/mean"] > 0 and 0 < reports[0]["ratio/clip_high"] < 1
