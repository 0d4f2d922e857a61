"""Reference models: what they score with, bit for bit, and that training does not notice them."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_rows

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model import MultiLoraTransformersModel, TransformersModel
from twinkle_research.model.config import LoraAdapterConfig

# Dropout while training, so that a reference pass in the wrong mode shows.
KINDS = {
    "full": None,
    "lora": LoraAdapterConfig(r=4, dropout=0.3),
    "dora": LoraAdapterConfig(r=4, dora=True, target_modules=["q_proj", "up_proj"]),
    "embeddings": LoraAdapterConfig(r=4, modules_to_save=["embed_tokens"]),
}
ROWS = make_rows(3, seed=99)


def new_model(folder, kind="lora", dtype="float32", window=1, **options):
    model = TransformersModel(folder, dtype=dtype, seed=3, **options)
    if KINDS[kind] is None:
        model.start_training(window)
    else:
        model.add_adapter_to_model("default", KINDS[kind], gradient_accumulation_steps=window)
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    return model


def train(model, first, count=1, name=None):
    for number in range(first, first + count):
        model.forward_backward(make_rows(4, seed=number), adapter_name=name)
        model.clip_grad_and_step(adapter_name=name)


def trained(model, name=None):
    return {n: p.detach().clone() for n, p in model.training_state(name).parameters.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def holding(folder, kind, dtype, weights):
    """A second model that really has these weights."""
    model = new_model(folder, kind, dtype)
    with torch.no_grad():
        for name, parameter in model.training_state().parameters.items():
            parameter.copy_(weights[name])
    return model


def scores(model, name=None):
    return model.forward_only(ROWS, adapter_name=name).result["logps"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_scores_as_a_model_with_its_weights(tiny_llama, kind, dtype):
    model, undisturbed = new_model(tiny_llama, kind, dtype), new_model(tiny_llama, kind, dtype)
    train(model, 0, 2)
    model.set_reference("frozen")
    frozen = holding(tiny_llama, kind, dtype, trained(model))
    assert model.reference_logps(ROWS) == scores(frozen)
    train(model, 2, 2)
    assert model.reference_logps(ROWS) == scores(frozen) != scores(model)

    model.set_reference("refreshed")
    train(model, 4)
    model.refresh_reference()
    latest = holding(tiny_llama, kind, dtype, trained(model))
    train(model, 5)
    assert model.reference_logps(ROWS) == scores(latest) != scores(model)

    train(undisturbed, 0, 6)
    assert same(trained(model), trained(undisturbed))
    states = [list(m.training_state().optimizer.state()) for m in (model, undisturbed)]
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(*states, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_base_is_the_model_without_its_adapter(tiny_llama, kind):
    model = new_model(tiny_llama, kind)
    model.set_reference("base")
    train(model, 0, 2)
    assert model.reference_logps(ROWS) == scores(TransformersModel(tiny_llama)) != scores(model)
    assert not model.trained().reference.copy


@pytest.mark.parametrize("reference", ["base", "frozen"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scored_anywhere_in_a_step(tiny_llama, reference, checkpointing):
    """Inside an accumulation window, and between a forward pass and its backward pass: nothing of the step changes."""
    ends = []
    for scored in (False, True):
        model = new_model(tiny_llama, window=2, gradient_checkpointing=checkpointing)
        train(model, 0)
        model.set_reference(reference)
        gradients = {}
        for number in (1, 2):
            model.forward(make_rows(4, seed=number))
            if scored:
                model.reference_logps(ROWS)
            model.calculate_loss()
            if scored:
                model.reference_logps(ROWS)
            model.backward()
            if scored:
                gradients = {n: g.clone() for n, g in model.training_state().gradients.tensors().items()}
                model.reference_logps(ROWS)
                assert same(gradients, model.training_state().gradients.tensors())
            model.clip_grad_and_step()
        model.finish_window()
        ends.append((trained(model), model.calculate_metric(is_training=True).result))
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_only_part_of_the_way(tiny_llama):
    """The copy after refresh(rate) is (1 - rate) copy + rate weights."""
    model = new_model(tiny_llama, "full")
    model.set_reference("refreshed")
    start = trained(model)
    train(model, 0, 2)
    model.refresh_reference(rate=0.25)
    mixed = {name: torch.lerp(start[name], tensor, 0.25) for name, tensor in trained(model).items()}
    assert model.reference_logps(ROWS) == scores(holding(tiny_llama, "full", "float32", mixed))


def test_small_moves_add_up_in_low_precision(tiny_llama):
    """500 moves by 1/500 go 1 - (1 - 1/500)^500 = 0.6325 of the way; in bfloat16 most of them would round to nothing."""
    model = new_model(tiny_llama, "full", "bfloat16")
    model.set_reference("refreshed")
    start = trained(model)
    train(model, 0, 2)
    for _ in range(500):
        model.refresh_reference(rate=1 / 500)
    end, copy = trained(model), model.trained().reference.copy
    moved, whole = (torch.cat([(x[n].double() - start[n].double()).flatten() for n in start]) for x in (copy, end))
    assert float(moved @ whole / (whole @ whole)) == pytest.approx(0.6325, abs=5e-3)
    assert model.reference_logps(ROWS) == scores(holding(tiny_llama, "full", "bfloat16", copy))
    model.refresh_reference()
    assert model.reference_logps(ROWS) == scores(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["full", "embeddings"])
@pytest.mark.parametrize("reference", ["frozen", "refreshed"])
def test_resume_is_exact(tiny_llama, tmp_path, kind, dtype, reference):
    def refresh(model):
        if reference == "refreshed":
            model.refresh_reference(rate=0.1)

    model = new_model(tiny_llama, kind, dtype, window=2)
    model.set_reference(reference)
    train(model, 0, 3)
    refresh(model)
    saved = model.save("x", output_dir=str(tmp_path), save_optimizer=True)
    before = model.reference_logps(ROWS)
    train(model, 3, 3)
    refresh(model)

    for announced in (True, False):  # whether the new run says itself that it wants one
        other = new_model(tiny_llama, kind, dtype, window=2)
        if announced:
            other.set_reference(reference)
        other.resume_from_checkpoint(saved)
        assert other.reference_logps(ROWS) == before
        train(other, 3, 3)
        refresh(other)
        assert other.reference_logps(ROWS) == model.reference_logps(ROWS)
        assert (other.reference_logps(ROWS) == before) == (reference == "frozen")
        assert same(trained(other), trained(model))
        assert same(other.trained().reference.stored(), model.trained().reference.stored())


def test_what_a_checkpoint_holds(tiny_llama, tmp_path):
    model = new_model(tiny_llama)
    model.set_reference("frozen")
    start = model.get_state_dict()
    train(model, 0)
    model.save("copy", output_dir=str(tmp_path), save_optimizer=True)
    assert same(load_file(tmp_path / "copy/reference/reference.safetensors"), start)

    model.set_reference("base")
    model.save("base", output_dir=str(tmp_path), save_optimizer=True)
    assert not (tmp_path / "base/reference").exists()
    resumed = new_model(tiny_llama)
    resumed.load("base", output_dir=str(tmp_path), load_optimizer=True)
    assert resumed.trained().reference.kind == "base"

    with pytest.raises(CheckpointError, match="holds the reference 'frozen', but this run has 'base'"):
        model.load("copy", output_dir=str(tmp_path), load_optimizer=True)
    train(model, 1)
    model.set_reference("frozen")
    kept = model.reference_logps(ROWS)
    model.load("copy", output_dir=str(tmp_path))  # weights alone: the reference stays what it is
    assert model.reference_logps(ROWS) == kept != scores(model)


def test_several_adapters_have_their_own(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)
    kinds = {"a": "frozen", "b": "base", "c": "refreshed"}
    for name in kinds:
        model.add_adapter_to_model(name, LoraAdapterConfig(r=2 + len(kinds), dropout=0.2))
        model.set_optimizer("AdamW", lr=1e-2, eps=1e-3, adapter_name=name)
    train(model, 0, name="a")
    for name, kind in kinds.items():
        model.set_reference(kind, adapter_name=name)
    expected = {"a": scores(model, "a"), "b": scores(TransformersModel(tiny_llama))}
    for number in range(1, 3):
        for name in kinds:
            train(model, number, name=name)
            model.reference_logps(ROWS, adapter_name=name)
    model.refresh_reference(adapter_name="c")
    expected["c"] = scores(model, "c")
    train(model, 3, name="c")
    assert {name: model.reference_logps(ROWS, adapter_name=name) for name in kinds} == expected
    with pytest.raises(UserError, match="which adapter"):
        model.reference_logps(ROWS)
    held = {name: model.trained(name).reference.copy for name in kinds}
    assert held["a"].keys() == model.training_state("a").parameters.keys() and not held["b"]


def test_a_value_head_is_no_part_of_it(tiny_llama):
    model = TransformersModel(tiny_llama)
    model.add_value_head()
    model.set_reference("frozen")
    assert model.trained().reference.copy.keys() == model.get_state_dict().keys()


def test_what_is_refused(tiny_llama):
    model = TransformersModel(tiny_llama)
    with pytest.raises(UserError, match="set_reference first"):
        model.reference_logps(ROWS)
    with pytest.raises(UserError, match="set_reference first"):
        model.refresh_reference()
    with pytest.raises(ConfigError, match="did you mean 'frozen'"):
        model.set_reference("forzen")
    with pytest.raises(UserError, match="without its adapter.*take 'frozen'"):
        model.set_reference("base")
    model.set_reference("frozen")
    with pytest.raises(UserError, match="'frozen' cannot be refreshed"):
        model.refresh_reference()
    model.set_reference("refreshed")
    for rate in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="rate must be in"):
            model.refresh_reference(rate)
