"""Saving and resuming a model: bit-exact, loud about what is missing, also inside an open accumulation window."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tiny_models import make_rows

from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
from twinkle_research.errors import CheckpointError
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.transformers import TransformersModel

OPTIMIZERS = [("AdamW", {"lr": 1e-2}), ("SGD", {"lr": 1e-2}), ("SGD", {"lr": 1e-2, "momentum": 0.9}), ("Muon", {"lr": 1e-2})]


def new_model(folder, lora=False, dtype="float32", optimizer=("AdamW", {"lr": 1e-2}), accumulation=1, dropout=0.3):
    model = TransformersModel(folder, dtype=dtype, seed=2)
    if lora:
        model.add_adapter_to_model("default", LoraAdapterConfig(r=4, dropout=dropout), gradient_accumulation_steps=accumulation)
    else:
        model.start_training(accumulation)
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer(optimizer[0], **optimizer[1])
    model.set_lr_scheduler("cosine", total_steps=8, warmup_steps=2)
    return model


def train(model, first, count):
    rows = [make_rows(4, seed=step) for step in range(first, first + count)]
    metrics = []
    for batch in rows:
        model.forward_backward(batch, normalizer=model.count(batch))
        model.clip_grad_and_step()
        metrics.append(model.calculate_metric(is_training=True).result)
    return metrics


def everything(model):
    training = model.training_state()
    tensors = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return tensors | {f"{name}.{slot}": tensor.clone() for name, slot, tensor in training.optimizer.state()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd", "momentum", "muon"])
def test_resume_is_bit_exact(tiny_llama, tmp_path, lora, dtype, optimizer):
    whole = new_model(tiny_llama, lora, dtype, optimizer)
    first = train(whole, 0, 3)
    saved = whole.save(save_optimizer=True, output_dir=str(tmp_path), consumed_train_samples=12)
    assert saved.checkpoint_dir.endswith("checkpoint-step-3")
    rest = train(whole, 3, 3)

    resumed = new_model(tiny_llama, lora, dtype, optimizer)
    assert resumed.resume_from_checkpoint(str(saved)) == {
        "cur_step": 3, "consumed_train_samples": 12, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert train(resumed, 3, 3) == rest and rest != first
    assert same(everything(whole), everything(resumed))


def test_before_the_first_step(tiny_llama, tmp_path):
    model = new_model(tiny_llama)
    other = new_model(tiny_llama)
    other.resume_from_checkpoint(model.save("start", str(tmp_path), save_optimizer=True))
    assert train(other, 0, 2) == train(model, 0, 2)


def test_optimizer_tensors_carry_the_names_on_disk(tiny_llama, tmp_path):
    model = new_model(tiny_llama, dtype="bfloat16")
    train(model, 0, 1)
    reader = CheckpointReader(model.save("x", str(tmp_path), save_optimizer=True).checkpoint_dir)
    weights, optimizer = set(reader.tensors("model")), set(reader.tensors("optimizer"))
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights  # tied: stored once
    assert optimizer == {f"{name}.{slot}" for name in weights for slot in ("master", "exp_avg", "exp_avg_sq")}
    assert all(reader.tensors("optimizer").spec(name).dtype == "float32" for name in optimizer)
    assert json.loads((reader.path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    saved = new_model(tiny_llama, lora=True).save("y", str(tmp_path))
    assert not CheckpointReader(saved.checkpoint_dir).has("optimizer") and CheckpointReader(saved.checkpoint_dir).has("adapter")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_an_open_window_is_kept(tiny_llama, tmp_path, lora):
    def calls(model, *numbers):
        for n in numbers:
            model.forward_backward(make_rows(2, seed=n))
            model.clip_grad_and_step()

    whole = new_model(tiny_llama, lora, accumulation=3)
    calls(whole, 0, 1, 2, 3, 4)
    saved = whole.save("x", str(tmp_path), save_optimizer=True)
    resumed = new_model(tiny_llama, lora, accumulation=3)
    resumed.resume_from_checkpoint(saved)
    before = everything(resumed)
    for model in (whole, resumed):
        calls(model, 5)
    assert same(everything(whole), everything(resumed)) and not same(before, everything(resumed))
    with pytest.raises(CheckpointError, match="inside an accumulation window of 3 calls"):
        new_model(tiny_llama, lora, accumulation=2).resume_from_checkpoint(saved)


def test_weights_only_is_something_else(tiny_llama, tmp_path):
    model = new_model(tiny_llama, dtype="bfloat16")
    train(model, 0, 2)
    weights_only = model.save("weights", str(tmp_path))
    full = model.save("full", str(tmp_path), save_optimizer=True)
    other = new_model(tiny_llama, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="saved without optimizer state"):
        other.resume_from_checkpoint(weights_only)
    for checkpoint in (weights_only, full):
        other = new_model(tiny_llama, dtype="bfloat16")
        train(other, 5, 1)
        other.resume_from_checkpoint(checkpoint, resume_only_model=True)
        assert same(dict(other.module.named_parameters()), dict(model.module.named_parameters()))
        assert other.training_state().optimizer.steps_done == 0
        assert all(
            torch.equal(m, other.training_state().parameters[n].float())
            for n, m in other.training_state().optimizer.masters.items()
        )
    other.load("full", str(tmp_path), load_optimizer=True)
    assert same(everything(other), everything(model))


def test_what_does_not_fit_is_refused(tiny_llama, tmp_path):
    full, lora = new_model(tiny_llama), new_model(tiny_llama, lora=True)
    for model in (full, lora):
        train(model, 0, 1)
    saved_full = full.save("full", str(tmp_path), save_optimizer=True)
    saved_lora = lora.save("lora", str(tmp_path), save_optimizer=True)
    with pytest.raises(CheckpointError, match="holds model, but this run trains an adapter"):
        lora.resume_from_checkpoint(saved_full)
    with pytest.raises(CheckpointError, match="holds adapter, but this run trains the model"):
        full.resume_from_checkpoint(saved_lora)
    with pytest.raises(CheckpointError, match="written by another optimizer"):
        new_model(tiny_llama, optimizer=("SGD", {"momentum": 0.9})).resume_from_checkpoint(saved_full)
    wider = TransformersModel(tiny_llama)
    wider.add_adapter_to_model("default", LoraAdapterConfig(r=8))
    wider.set_optimizer("AdamW")
    with pytest.raises(CheckpointError, match="has shape"):
        wider.resume_from_checkpoint(saved_lora)
    fewer = TransformersModel(tiny_llama)
    fewer.add_adapter_to_model("default", LoraAdapterConfig(r=4, target_modules=["q_proj"]))
    fewer.set_optimizer("AdamW")
    with pytest.raises(CheckpointError, match="is not part of this model"):
        fewer.resume_from_checkpoint(saved_lora)
    more = TransformersModel(tiny_llama)
    more.add_adapter_to_model("default", LoraAdapterConfig(r=4, modules_to_save=["norm"]))
    more.set_optimizer("AdamW")
    with pytest.raises(CheckpointError, match=r"norm.weight is missing"):
        more.resume_from_checkpoint(saved_lora)
    with pytest.raises(CheckpointError, match="set_optimizer"):
        TransformersModel(tiny_llama).resume_from_checkpoint(saved_full)


@pytest.mark.parametrize("what", ["optimizer", "window", "last shape", "moment shape", "reference"])
def test_a_refused_checkpoint_changes_nothing(tiny_llama, tmp_path, what):
    def made(seed, optimizer=("AdamW", {"lr": 1e-2}), **lora):
        model = TransformersModel(tiny_llama, seed=seed)
        model.add_adapter_to_model(
            "default", LoraConfig(target_modules="all-linear", r=4, lora_alpha=8, **lora), gradient_accumulation_steps=2
        )
        model.set_optimizer(optimizer[0], **optimizer[1])
        return model

    written = made(1, rank_pattern={"layers.1.self_attn.v_proj": 8} if what == "last shape" else {})
    if what == "reference":
        written.set_reference("frozen")
    train(written, 0, 3)
    saved = written.save("x", str(tmp_path), save_optimizer=True)
    model = made(2, ("SGD", {"lr": 1e-2, "momentum": 0.9}) if what == "optimizer" else ("AdamW", {"lr": 1e-2}))
    if what == "window":
        model.training_state().gradient_accumulation_steps = 3
    if what in ("moment shape", "reference"):
        folder, stem = {"moment shape": ("optimizer", "optimizer"), "reference": ("reference", "reference")}[what]
        tensors = CheckpointReader(saved.checkpoint_dir).tensors(folder, stem)
        last = list(tensors)[-1]
        save_file({name: t[:1].clone() if name == last else t.clone() for name, t in tensors.items()}, tmp_path / "other")
        (tmp_path / "other").replace(Path(saved.checkpoint_dir) / folder / f"{stem}.safetensors")
    train(model, 5, 3)
    before, gradients = everything(model), model.training_state().gradients.tensors()
    gradients, state = {name: g.clone() for name, g in gradients.items()}, model.training_state().state()
    reader = CheckpointReader(saved.checkpoint_dir)
    expected = {"optimizer": "written by another", "window": "inside an accumulation window"}.get(what, "has shape")
    with pytest.raises(CheckpointError, match=expected):
        model.load_state(reader, reader.json("trainer_state.json")["model"])
    assert same(everything(model), before) and model.training_state().state() == state
    assert same(model.training_state().gradients.tensors(), gradients) and model.trained().reference is None


def test_the_trainers_checkpoint(tiny_llama, tmp_path):
    """save_state and load_state, with the writer that the trainer uses."""
    model = new_model(tiny_llama, lora=True)
    train(model, 0, 2)
    with CheckpointWriter(tmp_path, "step-000002", step=2, backend="transformers") as writer:
        state = model.save_state(writer)
        writer.add_json("trainer_state.json", {"model": state})
    reader = CheckpointReader(tmp_path / "step-000002")
    other = new_model(tiny_llama, lora=True)
    other.load_state(reader, reader.json("trainer_state.json")["model"])
    assert train(other, 2, 2) == train(model, 2, 2)
    reader.verify()


def test_two_saves_of_the_same_state_have_the_same_bytes(tiny_llama, tmp_path):
    model = new_model(tiny_llama, lora=True)
    train(model, 0, 1)
    files = [
        CheckpointReader(model.save(name, str(tmp_path), save_optimizer=True).checkpoint_dir).manifest.files
        for name in ("a", "b")
    ]
    assert files[0] == files[1]


def test_upload_takes_the_weights_alone(tiny_llama, tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, exist_ok):
            calls.append(("create", repo_id))

        def upload_folder(self, *, repo_id, folder_path, run_as_future):
            calls.append(("upload", repo_id, sorted(p.name for p in folder_path.iterdir()), run_as_future))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model = new_model(tiny_llama, lora=True)
    model.upload_to_hub(model.save("x", str(tmp_path), save_optimizer=True), "me/mine", "secret", async_upload=False)
    assert calls == [
        ("token", "secret"),
        ("create", "me/mine"),
        ("upload", "me/mine", ["adapter_config.json", "adapter_model.safetensors"], False),
    ]
