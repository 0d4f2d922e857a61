"""Preference losses on a real model: however a step of pairs is cut, padded or packed, the update is the same."""

import pytest
import torch
from test_partition import LORA, updates, weights
from tiny_models import make_rows, relative_distance

from twinkle_research.errors import UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.trainer.preference import PairInputs

LOSSES = [
    ("dpo", {"label_smoothing": 0.1, "sft_weight": 0.3}),
    ("dpo", {"loss_type": "ipo"}),
    ("simpo", {}),
    ("orpo", {}),
    ("cpo", {}),
    ("kto_pair", {"beta": 0.5}),
]


def make_pairs(count: int = 4, seed: int = 3, **options):
    """Rows in turns; the two of a pair begin with the same untrained tokens."""
    rows = make_rows(2 * count, seed=seed, low=8, masked=0.2, **options)
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        rejected["input_ids"][:3] = chosen["input_ids"][:3]
        for row in (chosen, rejected):
            row["labels"][:2] = [-100, -100]
            row["labels"][3] = row["input_ids"][4]
    return rows


def new_model(folder, name, options, *, lora=False, processor=None, move=0.3, **settings):
    """The policy is moved away from its reference, as it is after some steps."""
    model = TransformersModel(folder, seed=5, **settings)
    if lora:
        model.add_adapter_to_model("default", LORA)
    loss = resolve_loss(name, **options)
    model.set_loss(loss)
    model.set_processor("InputProcessor", **(processor or {"micro_batch_size": 1}))
    inputs = PairInputs(model, loss) if loss.needs_reference else dict
    with torch.no_grad():
        for i, parameter in enumerate(model.training_state().parameters.values()):
            wave = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            parameter.add_(0.1 * move * torch.sin((7 + i) * wave).to(parameter.dtype))
    model.set_optimizer("sgd", lr=1.0)
    return model, inputs


def one_step(model, inputs, rows):
    given = inputs(rows) if isinstance(inputs, PairInputs) else {}
    result = model.forward_backward(rows, normalizer=model.count(rows), **given).result
    model.clip_grad_and_step(None)
    return result["loss"], model.calculate_metric(is_training=True).result


CASES = [(*case, False, dtype) for case in LOSSES for dtype in ("float32", "float64")]
CASES += [(*LOSSES[0], True, "float32"), (*LOSSES[-1], True, "float32")]


@pytest.mark.parametrize(("name", "options", "lora", "dtype"), CASES, ids=str)
def test_micro_batches_padding_and_packing(tiny_llama, tiny_gpt2, name, options, lora, dtype):
    folder, bound = (tiny_gpt2, 1e-12) if dtype == "float64" else (tiny_llama, 1e-6)
    rows = make_pairs(5)
    cuts = [
        {"micro_batch_size": 5}, {"micro_batch_size": 2}, {"micro_batch_size": 1}, {"micro_batch_tokens": 60},
        {"micro_batch_tokens": 60, "packing": True}, {"micro_batch_size": 5, "padding_side": "left"},
    ]  # fmt: skip
    models = [new_model(folder, name, options, lora=lora, processor=cut, dtype=dtype) for cut in cuts]
    start = weights(models[0][0])
    found = [one_step(*model, rows) for model in models]
    for loss, metrics in found:
        assert loss == pytest.approx(found[0][0], rel=bound)
        assert metrics == pytest.approx(found[0][1], rel=10 * bound, abs=bound)
    reference, *others = updates(start, [model for model, _ in models])
    assert max(relative_distance(reference, other) for other in others) <= bound


def test_several_calls_and_pairs_that_are_not_trained(tiny_llama):
    """The trainer's normaliser counts the pairs of all calls; one whose answers are masked is as if it were not there."""
    rows = make_pairs(5)
    masked = [row | {"labels": [-100] * row["length"]} for row in rows[4:6]]
    models = [new_model(tiny_llama, "dpo", {}, processor={"micro_batch_size": n}) for n in (5, 2, 1)]
    start = weights(models[0][0])
    (whole, inputs), (calls, _), (without, _) = models
    all_rows = [*rows[:4], *masked, *rows[6:]]
    one_step(whole, inputs, all_rows)
    n = calls.count(all_rows)
    assert n == 4
    for part in (all_rows[:2], all_rows[2:6], all_rows[6:]):
        calls.forward_backward(part, normalizer=n, ref_logps=calls.reference_logps(part))
    calls.clip_grad_and_step(None)
    few = rows[:4] + rows[6:]
    without.forward_backward(few, normalizer=n, ref_logps=without.reference_logps(few))
    without.clip_grad_and_step(None)
    reference, *others = updates(start, [model for model, _ in models])
    assert max(relative_distance(reference, other) for other in others) <= 1e-6


def test_the_seeds_way_with_parts_and_outputs_of_the_base(tiny_llama):
    """forward_only(disable_lora=True) gives the reference, as in Twinkle's example; one call after the other trains."""
    rows = make_pairs(3)
    models = [new_model(tiny_llama, "dpo", {}, lora=True) for _ in range(2)]
    start = weights(models[0][0])
    (ours, inputs), (seeds, _) = models
    loss, _ = one_step(ours, inputs, rows)
    ref_logps = seeds.forward_only(rows, disable_lora=True, ref_logps=[0.0] * 6).result["logps"]
    assert ref_logps == inputs(rows)["ref_logps"]
    seeds.forward(rows)
    assert seeds.calculate_loss(ref_logps=ref_logps) == pytest.approx(loss, rel=1e-6)
    seeds.backward()
    seeds.step()
    assert relative_distance(*updates(start, [ours, seeds])) <= 1e-6


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_reference_is_the_model_as_it_was(tiny_llama, lora):
    rows = make_pairs(2)
    model, inputs = new_model(tiny_llama, "dpo", {"beta": 1.0}, lora=lora, move=0.0)
    before = inputs(rows)
    loss, metrics = one_step(model, inputs, rows)
    assert loss == pytest.approx(0.6931471805599453, rel=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    _, metrics = one_step(model, inputs, rows)
    assert inputs(rows) == before and metrics["rewards/margins"] > 0.1


def test_kto_measures_the_whole_step_before_it_trains(tiny_llama):
    rows = make_pairs(4)
    model, inputs = new_model(tiny_llama, "kto_pair", {}, processor={"micro_batch_size": 3})
    given = inputs(rows)
    logps = model.policy_scores(rows)["logps"]
    ratios = [sum(row) - sum(ref) for row, ref in zip(logps, given["ref_logps"], strict=True)]
    chosen, rejected = sum(ratios[::2]) / 4, sum(ratios[1::2]) / 4
    assert given["baselines"] == pytest.approx([max(0.0, rejected), max(0.0, chosen)] * 4, rel=1e-5)
    assert max(given["baselines"]) > 0.01
    model.forward_backward(rows, normalizer=4, **given)
    assert model.calculate_metric(is_training=False).result == {"loss": 0.0}  # measuring is not evaluating


def test_rows_that_are_no_pairs_are_refused(tiny_llama):
    rows = make_pairs(2)
    model, inputs = new_model(tiny_llama, "dpo", {})
    with pytest.raises(UserError, match="DPOLoss takes rows by 2, but got 3 of them"):
        model.forward_backward(rows[:3], normalizer=1, ref_logps=[0.0] * 3)
    with pytest.raises(UserError, match="pass ref_logps"):
        model.forward_backward(rows, normalizer=2)
    restarts = [row | {"position_ids": [0, 1, 2, *range(row["length"] - 3)]} for row in rows]
    with pytest.raises(UserError, match="position_ids restart inside a row"):
        model.forward_backward(restarts, normalizer=2, **inputs(restarts))
