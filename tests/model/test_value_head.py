"""A critic beside the policy: its values, its gradient into both, and that it is saved with them."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_rows, relative_distance

from twinkle_research.errors import CheckpointError, UserError
from twinkle_research.loss.base import Loss, LossOutput
from twinkle_research.model import MultiLoraTransformersModel, TransformersModel
from twinkle_research.model.config import LoraAdapterConfig

LORA = LoraAdapterConfig(r=4, dropout=0.0)


class SquaredError(Loss):
    """Cross entropy, and half the squared distance of the values from ``advantages``."""

    needs = frozenset({"values"})
    reads = frozenset({"advantages"})

    def __call__(self, scores, inputs, normalizer):
        error_BT = 0.5 * (scores.values - inputs.advantages).square()
        loss = ((error_BT - scores.logprobs) * inputs.mask).sum() / normalizer
        return LossOutput(loss, torch.zeros(inputs.num_sequences), {"error": (error_BT.detach().sum(), inputs.mask.sum())})


class Likelihood(SquaredError):
    """Its first part alone."""

    needs = frozenset()

    def __call__(self, scores, inputs, normalizer):
        loss = -(scores.logprobs * inputs.mask).sum() / normalizer
        return LossOutput(loss, torch.zeros(inputs.num_sequences), {})


def prepare(model, lora, name=None, detach=False, window=1, start=0.0):
    if lora:
        model.add_adapter_to_model(name or "default", LORA, gradient_accumulation_steps=window)
    else:
        model.start_training(window)
    model.add_value_head(adapter_name=name, detach=detach)
    model.set_loss(SquaredError, adapter_name=name)
    model.set_processor("InputProcessor", adapter_name=name, micro_batch_size=2)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3, adapter_name=name)
    head = model.trained(name).value_head.linear
    with torch.no_grad():  # a head of zeros sends no gradient on
        head.weight.copy_(start * torch.linspace(-1, 1, head.weight.shape[1]))
    return model


def new_model(folder, lora, dtype="float32", **options):
    return prepare(TransformersModel(folder, dtype=dtype, seed=3), lora, **options)


def targets(rows):
    return [float(i % 3) - 0.5 for i, _ in enumerate(rows)]


def step(model, rows, name=None):
    result = model.forward_backward(rows, advantages=targets(rows), adapter_name=name).result
    model.clip_grad_and_step(adapter_name=name)
    return result


def trained(model, name=None):
    return {n: p.detach().clone() for n, p in model.training_state(name).parameters.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_values_and_gradients_are_those_of_plain_autograd(tiny_llama, lora):
    """value[t] = w . h[t] + b with h[t] the state that predicts labels[t]."""
    model = new_model(tiny_llama, lora, start=0.3)
    rows = make_rows(3)
    result = model.forward_backward(rows, advantages=targets(rows)).result
    mine = {name: g.clone() for name, g in model.training_state().gradients.tensors().items()}
    model.zero_grad()
    head, total = model.trained().value_head.linear, 0.0
    for row, target, values in zip(rows, targets(rows), result["values"], strict=True):
        output = model.module(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True)
        labels = torch.tensor(row["labels"])
        kept = labels >= 0
        expected = head(output.hidden_states[-1][0]).squeeze(-1)
        logps = output.logits[0].log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        assert len(values) == len(row["labels"])
        assert values == pytest.approx((expected * kept).tolist(), abs=1e-6)
        total = total + ((0.5 * (expected - target) ** 2 - logps) * kept).sum()
    total.backward()
    right = {name: p.grad for name, p in model.training_state().parameters.items()}
    assert relative_distance(mine, right) < 1e-6
    assert result["loss"] == pytest.approx(total.item() / model.count(rows), rel=1e-6)


def test_starts_at_zero_and_learns(tiny_llama):
    model = new_model(tiny_llama, True)
    rows = make_rows(6)
    first = model.forward_only(rows, advantages=targets(rows)).result
    assert {value for row in first["values"] for value in row} == {0.0}
    errors = []
    for _ in range(8):
        step(model, rows)
        errors.append(model.calculate_metric(is_training=True).result["error"])
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.9 * errors[0]
    for name in ("value_head.weight", "value_head.bias"):
        parameter = model.training_state().parameters[name]
        assert parameter.dtype == torch.float32 and parameter.abs().sum() > 0
    assert model.get_train_configs().trainable_parameters == sum(p.numel() for p in model.training_state().parameters.values())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_how_a_step_is_cut_changes_nothing(tiny_llama, lora):
    rows = make_rows(7)
    ways = [
        {"micro_batch_size": 1},
        {"micro_batch_size": 7},
        {"micro_batch_tokens": 30},
        {"micro_batch_tokens": 30, "packing": True},
    ]
    ends, values = [], []
    for way in ways:
        model = new_model(tiny_llama, lora, start=0.3)
        model.set_processor("InputProcessor", **way)
        for _ in range(2):
            for part in (rows[:3], rows[3:]):  # two calls a step
                model.forward_backward(part, model.count(rows), advantages=targets(rows)[: len(part)])
            model.clip_grad_and_step()
        ends.append(trained(model))
        values.append(
            torch.cat([torch.tensor(row) for row in model.forward_only(rows, advantages=targets(rows)).result["values"]])
        )
    for end, found in zip(ends[1:], values[1:], strict=True):
        assert relative_distance(ends[0], end) < 1e-6
        assert relative_distance({"v": values[0]}, {"v": found}) < 1e-5


def test_parts_of_a_call_are_the_call(tiny_llama):
    models = [new_model(tiny_llama, True, start=0.3) for _ in range(2)]
    rows = make_rows(5)
    whole = step(models[0], rows)
    parts = models[1].forward(rows).result
    assert models[1].calculate_loss(advantages=targets(rows)) == pytest.approx(whole["loss"], rel=1e-6)
    models[1].backward()
    models[1].clip_grad_and_step()
    assert parts["values"] == whole["values"] and parts["logps"] == whole["logps"]
    assert same(*map(trained, models))


def test_detach_keeps_the_critics_gradient_out_of_the_policy(tiny_llama):
    rows = make_rows(5)
    detached, policy = new_model(tiny_llama, False, detach=True, start=0.3), new_model(tiny_llama, False, start=0.3)
    policy.set_loss(Likelihood)
    for model in (detached, policy):
        model.forward_backward(rows, advantages=targets(rows))
    by_name = [model.training_state().gradients.tensors() for model in (detached, policy)]
    assert by_name[0]["value_head.weight"].norm() > 0 and by_name[1]["value_head.weight"].norm() == 0
    assert all(torch.equal(by_name[0][name], g) for name, g in by_name[1].items() if not name.startswith("value_head."))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resume_is_bit_exact_inside_an_open_window(tiny_llama, tmp_path, lora, dtype):
    batches = [make_rows(4, seed=seed) for seed in range(5)]
    model = new_model(tiny_llama, lora, dtype, window=2)
    for rows in batches[:3]:
        step(model, rows)
    saved = model.save("x", output_dir=str(tmp_path), save_optimizer=True)
    for rows in batches[3:]:
        step(model, rows)
    other = new_model(tiny_llama, lora, dtype, window=2, start=1.0)
    other.resume_from_checkpoint(saved)
    for rows in batches[3:]:
        step(other, rows)
    assert same(trained(model), trained(other))
    for (_, _, a), (_, _, b) in zip(
        model.training_state().optimizer.state(), other.training_state().optimizer.state(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_what_a_checkpoint_holds(tiny_llama, tmp_path, lora):
    model = new_model(tiny_llama, lora)
    step(model, make_rows(3))
    folder = tmp_path / "x"
    model.save("x", output_dir=str(tmp_path), save_optimizer=True)
    critic = load_file(folder / "critic/value_head.safetensors")
    assert {name: tuple(t.shape) for name, t in critic.items()} == {"value_head.weight": (1, 32), "value_head.bias": (1,)}
    assert "value_head.weight.exp_avg" in load_file(folder / "optimizer/optimizer.safetensors")
    weights = load_file(folder / ("adapter/adapter_model.safetensors" if lora else "model/model.safetensors"))
    assert not any("value_head" in name for name in weights)  # PEFT and transformers load the folders as ever
    assert weights.keys() == model.get_state_dict().keys()

    again = new_model(tiny_llama, lora, start=1.0)
    again.resume_from_checkpoint(folder, resume_only_model=True)
    assert same(trained(again), trained(model))


def test_checkpoints_with_and_without_one_are_told_apart(tiny_llama, tmp_path):
    with_head = new_model(tiny_llama, True)
    with_head.save("with", output_dir=str(tmp_path))
    without = TransformersModel(tiny_llama)
    without.add_adapter_to_model("default", LORA)
    with pytest.raises(CheckpointError, match="holds a value head, but this run has none: call add_value_head"):
        without.load("with", output_dir=str(tmp_path))
    without.save("without", output_dir=str(tmp_path))
    before = trained(with_head)
    step(with_head, make_rows(2))
    after = trained(with_head)
    with pytest.raises(CheckpointError, match="holds no value head, but this run has one: load its weights before"):
        with_head.load("without", output_dir=str(tmp_path))
    assert same(trained(with_head), after) and not same(before, after)


def test_several_adapters_have_their_own(tiny_llama):
    model, options = MultiLoraTransformersModel(tiny_llama, seed=3), {"a": {"detach": True}, "b": {"start": 0.5}}
    for name in options:
        prepare(model, True, name, **options[name])
    model.add_adapter_to_model("none", LORA)
    rows = {name: make_rows(4, seed=i) for i, name in enumerate(options)}
    for _ in range(2):
        for name in options:
            step(model, rows[name], name)
    assert "values" not in model.forward_only(rows["a"], adapter_name="none").result
    for name in options:
        alone = new_model(tiny_llama, True, **options[name])
        for _ in range(2):
            step(alone, rows[name])
        assert same(trained(alone), trained(model, name))


def test_what_is_refused(tiny_llama):
    model = TransformersModel(tiny_llama)
    model.set_loss(SquaredError)
    rows = make_rows(2)
    with pytest.raises(UserError, match="SquaredError needs values: call add_value_head first"):
        model.forward_backward(rows, advantages=targets(rows))
    model.zero_grad()
    model.add_value_head()
    with pytest.raises(UserError, match="a value head already"):
        model.add_value_head()
    late = TransformersModel(tiny_llama)
    late.set_optimizer("SGD", lr=0.1)
    with pytest.raises(UserError, match="before set_optimizer"):
        late.add_value_head()
