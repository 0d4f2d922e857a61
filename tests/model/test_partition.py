"""However a step is cut, the update is the same: micro-batches, calls, windows, padding, masked rows."""

import pytest
import torch
from tiny_models import make_rows, relative_distance

from twinkle_research.errors import DataError
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.transformers import TransformersModel

LOSSES = [
    {"normalization": "token"},
    {"normalization": "sequence"},
    {"normalization": "token", "label_smoothing": 0.1, "z_loss": 1e-2},
]
LORA = LoraAdapterConfig(r=4, alpha=8.0)


def rows_with_empty():
    """Eight uneven rows; one has nothing to train."""
    rows = make_rows(8, seed=3)
    rows[2] = rows[2] | {"labels": [-100] * rows[2]["length"]}
    return rows


def new_model(
    folder, *, lora=False, dtype="float32", loss=None, micro=None, accumulation=1, optimizer=("sgd", {"lr": 4.0}), **options
):
    model = TransformersModel(folder, dtype=dtype, seed=5, **options)
    if lora:
        model.add_adapter_to_model("default", LORA, gradient_accumulation_steps=accumulation)
        if dtype == "float64":
            model.module.double()
        with torch.no_grad():  # B is 0 at the start, and then A has no gradient
            for i, (name, p) in enumerate(model.training_state().parameters.items()):
                if "lora_B" in name:
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view(p.shape) + 0.01 * i)
    elif accumulation > 1:
        model.start_training(accumulation)
    model.set_processor("InputProcessor", micro_batch_size=micro)
    model.set_loss("CrossEntropyLoss", **(loss or {}))
    model.set_optimizer(optimizer[0], **optimizer[1])
    return model


def weights(model):
    return {name: p.detach().clone() for name, p in model.training_state().parameters.items()}


def one_step(model, rows, max_grad_norm=1.0):
    result = model.forward_backward(rows, normalizer=model.count(rows)).result
    model.clip_grad_and_step(max_grad_norm)
    return result["loss"]


def updates(start, models):
    """The change of the weights, which is what must agree: the weights themselves hide it."""
    return [{name: w - start[name] for name, w in weights(model).items()} for model in models]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
def test_micro_batches_calls_and_windows(tiny_llama, tiny_gpt2, lora, loss, dtype, bound):
    folder = tiny_llama if dtype == "float32" else tiny_gpt2
    rows = rows_with_empty()
    models, losses = [], []

    def make(**options):
        models.append(new_model(folder, lora=lora, loss=loss, dtype=dtype, **options))
        return models[-1]

    start = weights(make(micro=8))
    losses.append(one_step(models[0], rows))
    for micro in (1, 2, 3, 4):
        losses.append(one_step(make(micro=micro), rows))
    losses.append(one_step(make(micro=2, logits_chunk=3), rows))

    by_hand = make(micro=4)  # the trainer's way in several calls
    n = by_hand.count(rows)
    losses.append(sum(by_hand.forward_backward(part, normalizer=n).result["loss"] for part in (rows[:1], rows[1:6], rows[6:])))
    by_hand.clip_grad_and_step(1.0)

    window = make(micro=2, accumulation=3)  # the seed's way: sums and counts, one update at the third call
    for part in (rows[:3], rows[3:4], rows[4:]):
        window.forward_backward(part)
        window.clip_grad_and_step(1.0)

    tail = make(micro=2, accumulation=5)  # a window that is never filled
    for part in (rows[:5], rows[5:]):
        tail.forward_backward(part)
        tail.clip_grad_and_step(1.0)
    assert all(torch.equal(w, start[name]) for name, w in weights(tail).items())
    tail.finish_window(1.0)

    parts = make(micro=3)  # one call after the other
    parts.forward(rows)
    assert parts.calculate_loss() == pytest.approx(losses[0], rel=1e-6)
    parts.backward()
    assert parts.clip_grad_norm(1.0) == pytest.approx(models[0].calculate_metric(True).result["grad_norm"], rel=1e-6)
    parts.step()
    parts.zero_grad()
    parts.lr_step()

    assert losses == pytest.approx([losses[0]] * len(losses), rel=bound)
    reference, *others = updates(start, models)
    distances = [relative_distance(reference, other) for other in others]
    assert max(distances) <= bound, distances


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-14)])
def test_weights_after_some_steps_of_muon(tiny_llama, lora, dtype, bound):
    """Its iterations make small singular values of a gradient up to 500 times larger, and the rounding in them. Measured:
    3.5e-7 and 5.4e-16; 8.4e-4 with torch's Muon, which does them in bfloat16."""

    def trained(micro):
        optimizer = ("Muon", {"lr": 2e-2, "adamw_lr": 1e-2, "adamw_eps": 1e-3})
        model = new_model(tiny_llama, lora=lora, dtype=dtype, micro=micro, optimizer=optimizer)
        for seed in range(4):
            one_step(model, make_rows(5, seed=seed))
        return weights(model)

    whole = trained(8)
    assert max(relative_distance(whole, trained(micro)) for micro in (1, 2, 3)) <= bound


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_micro_batch_tokens(tiny_llama, side):
    rows = rows_with_empty()
    models = [new_model(tiny_llama, micro=1) for _ in range(2)]
    start = weights(models[0])
    models[1].set_processor("InputProcessor", padding_side=side, micro_batch_tokens=40)
    for model in models:
        one_step(model, rows)
    assert relative_distance(*updates(start, models)) <= 1e-6


def test_a_step_with_nothing_to_train_changes_nothing(tiny_llama):
    rows = [row | {"labels": [-100] * row["length"]} for row in make_rows(3)]
    for normalizer in (0, None):
        model = new_model(tiny_llama, micro=2, optimizer=("AdamW", {"lr": 0.1, "weight_decay": 0.0}))
        start = weights(model)
        result = model.forward_backward(rows, normalizer=normalizer).result
        model.clip_grad_and_step(1.0)
        assert result["loss"] == 0.0 and result["num_tokens"] == 0
        assert result["logps"] == [[0.0] * row["length"] for row in rows]
        assert all(torch.equal(w, start[name]) for name, w in weights(model).items())
        assert model.calculate_metric(True).result == {"loss": 0.0, "grad_norm": 0.0, "lr": 0.1, "tokens": 0}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bfloat16_differs_by_its_own_rounding_only(tiny_llama, lora):
    """Bound measured: bfloat16 activations move a gradient by about 0.5 % here; masters and gradient sums are float32."""
    rows = rows_with_empty()
    models = [new_model(tiny_llama, lora=lora, dtype="bfloat16", micro=micro) for micro in (8, 1, 3)]
    start = {name: w.clone() for name, w in models[0].training_state().optimizer.masters.items()}
    for model in models:
        one_step(model, rows)
    changes = [
        {name: m.detach() - start[name] for name, m in model.training_state().optimizer.masters.items()} for model in models
    ]
    assert all(m.dtype == torch.float32 for m in changes[0].values())
    for other in changes[1:]:
        assert relative_distance(changes[0], other) <= 0.03
    wide = new_model(tiny_llama, lora=lora, micro=8)
    before = weights(wide)
    one_step(wide, rows)
    assert relative_distance(updates(before, [wide])[0], changes[0]) <= 0.1


def test_gradient_checkpointing_changes_nothing(tiny_llama):
    rows = rows_with_empty()
    models = [
        new_model(tiny_llama, lora=lora, micro=4, gradient_checkpointing=on) for lora in (False, True) for on in (False, True)
    ]
    for plain, checkpointed in (models[:2], models[2:]):
        start = weights(plain)
        for model in (plain, checkpointed):
            one_step(model, rows)
        assert relative_distance(*updates(start, [plain, checkpointed])) <= 1e-6


# --- results, metrics, errors -------------------------------------------------------------------------------------------


def test_results_and_metrics(tiny_llama):
    rows = make_rows(5)
    model = new_model(tiny_llama, micro=2)
    scored = model.forward_only(rows).result
    trained = model.forward_backward(rows, normalizer=model.count(rows)).result
    tokens = sum(label != -100 for row in rows for label in row["labels"])
    assert trained["num_tokens"] == scored["num_tokens"] == tokens
    assert trained["loss"] == pytest.approx(scored["loss"], rel=1e-6)
    for row, ours, again in zip(rows, trained["logps"], scored["logps"]):
        assert len(ours) == row["length"] and ours == pytest.approx(again, abs=1e-5)
        assert all((value == 0.0) == (label == -100) for value, label in zip(ours, row["labels"]))
    assert -sum(map(sum, trained["logps"])) / tokens == pytest.approx(trained["loss"], rel=1e-5)
    model.clip_grad_and_step()
    metrics = model.calculate_metric(is_training=True).result
    assert metrics["loss"] == pytest.approx(trained["loss"], rel=1e-9) and metrics["tokens"] == tokens and metrics["lr"] == 4.0
    assert model.calculate_metric(is_training=True).result == {"loss": 0.0, "tokens": 0}  # read and reset
    assert model.calculate_metric(is_training=False).result["loss"] == pytest.approx(scored["loss"], rel=1e-9)


def test_the_reported_lr_is_the_one_that_the_step_used(tiny_llama):
    rows = make_rows(2)
    model = new_model(tiny_llama, optimizer=("AdamW", {"lr": 1e-3}))
    model.set_lr_scheduler("linear", total_steps=10, warmup_steps=4)
    lrs = []
    for _ in range(6):
        one_step(model, rows)
        lrs.append(model.calculate_metric(is_training=True).result["lr"])
    assert lrs == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 8.3333e-4], abs=1e-8)


@pytest.mark.parametrize("normalizer", [1, None])
def test_a_non_finite_loss_names_its_rows_and_changes_nothing(tiny_llama, normalizer):
    rows = make_rows(4)
    model = new_model(tiny_llama, micro=2, optimizer=("AdamW", {"lr": 0.1}))
    one_step(model, rows)
    with torch.no_grad():  # a token that only the third row has
        rows[2]["input_ids"][0] = 96
        assert all(96 not in row["input_ids"] for i, row in enumerate(rows) if i != 2)
    embedding = model.module.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out.masked_fill((args[0] == 96)[..., None], float("nan")))
    start, moments = weights(model), [t.clone() for _, _, t in model.training_state().optimizer.state()]
    model.forward_backward(rows, normalizer=normalizer)
    with pytest.raises(NonFiniteLoss, match="rows.jsonl:3") as caught:
        model.clip_grad_and_step()
    assert caught.value.rows == ["rows.jsonl:3"]
    assert all(torch.equal(w, start[name]) for name, w in weights(model).items())
    assert all(torch.equal(a, b) for a, (_, _, b) in zip(moments, model.training_state().optimizer.state()))
    position = model.training_state().schedule_position
    model.lr_step()  # on_nan=skip moves the schedule on
    assert model.training_state().schedule_position == position + 1
    one_step(model, rows[:2])
    assert all(torch.isfinite(w).all() for w in weights(model).values())


@pytest.mark.parametrize(("name", "value"), [("input_ids", 97), ("input_ids", -1), ("labels", 97), ("labels", -5)])
def test_ids_outside_the_vocabulary_are_named(tiny_llama, name, value):
    rows = make_rows(3)
    rows[1][name][2] = value
    model = new_model(tiny_llama, micro=3)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: {name}\[2\] is {value}, but the model knows the tokens 0 to 96"):
        model.forward_backward(rows, normalizer=1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_that_were_packed_by_hand_are_scored_as_if_alone(tiny_llama, side):
    rows = make_rows(3)
    model = new_model(tiny_llama, micro=2)
    apart = model.forward_only(rows).result["logps"]
    both = {name: rows[0][name] + rows[1][name] for name in ("input_ids", "labels")}
    both["position_ids"] = [*range(rows[0]["length"]), *range(rows[1]["length"])]
    model.set_processor("InputProcessor", micro_batch_size=2, padding_side=side)
    packed, single = model.forward_only([both, rows[2]]).result["logps"]
    assert packed == pytest.approx(apart[0] + apart[1], abs=1e-5) and single == pytest.approx(apart[2], abs=1e-5)


def test_s06_the_padding_id_may_be_the_end_of_text_id(tiny_llama):
    """Id 0 pads and ends the text: the row's own end is trained, its padding is not."""
    rows = [{"input_ids": [5, 6, 0], "labels": [6, 0, -100], "length": 3}, make_rows(1, low=9)[0]]
    alone, padded = new_model(tiny_llama, micro=1), new_model(tiny_llama, micro=2)
    results = [model.forward_backward(rows, normalizer=model.count(rows)).result for model in (alone, padded)]
    assert results[0]["num_tokens"] == results[1]["num_tokens"] == 2 + sum(label != -100 for label in rows[1]["labels"])
    assert results[1]["logps"][0] == pytest.approx(results[0]["logps"][0], abs=1e-5)
    assert results[1]["logps"][0][1] < 0 and results[1]["logps"][0][2] == 0.0
    gradients = [model.training_state().gradients.tensors() for model in (alone, padded)]
    assert relative_distance(*gradients) <= 1e-6
