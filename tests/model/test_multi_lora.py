"""Adapters on one base do not notice each other: each becomes bit for bit what it becomes alone."""

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_models import make_rows
from transformers import AutoModelForCausalLM

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model import MultiLoraTransformersModel, TransformersModel

CONFIGS = {
    "a": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "b": LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, use_rslora=True),
    "c": LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1),
    "dora": LoraConfig(r=2, target_modules=["o_proj", "up_proj"], use_dora=True),
}
OPTIMIZERS = {
    "a": ("AdamW", {"lr": 1e-2, "eps": 1e-3}),
    "b": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "c": ("Adam", {"lr": 3e-3, "eps": 1e-3}),
    "dora": ("AdamW", {"lr": 1e-2, "eps": 1e-3}),
}
STEPS = 3


def prepare(model, name, own, window):
    model.add_adapter_to_model(own, CONFIGS[name], gradient_accumulation_steps=window)
    kind, options = OPTIMIZERS[name]
    model.set_processor("InputProcessor", adapter_name=own, micro_batch_size=len(name) + 1)
    model.set_loss("CrossEntropyLoss", adapter_name=own, normalization="sequence" if name == "b" else "token")
    model.set_optimizer(kind, adapter_name=own, **options)
    model.set_lr_scheduler("linear", total_steps=6, adapter_name=own)


def rows_of(name, step):
    return make_rows(4, seed=step * 10 + len(name) + ord(name[0]))


def train_step(model, name, own, step):
    model.forward_backward(rows_of(name, step), adapter_name=own)
    model.clip_grad_and_step(adapter_name=own)


def alone(folder, name, own, options, window=1):
    """As a TransformersModel of its own, under another name."""
    model = TransformersModel(folder, seed=3, **options)
    prepare(model, name, own, window)
    for step in range(STEPS):
        train_step(model, name, own, step)
    model.finish_window(adapter_name=own)
    return model.get_state_dict(own), model.calculate_metric(True, own).result


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_each_is_bit_equal_to_training_alone(tiny_llama, options):
    model = MultiLoraTransformersModel(tiny_llama, seed=3, **options)
    windows = {"a": 1, "b": 2, "c": 1, "dora": 1}
    for name in ("a", "b"):
        prepare(model, name, name, windows[name])
    for step in range(STEPS):
        for name in list(model.adapters):
            train_step(model, name, name, step)
        if step == 0:  # company comes and goes
            prepare(model, "c", "passing", 1)
            train_step(model, "c", "passing", 7)
            model.remove_adapter("passing")
    for name in ("c", "dora"):
        prepare(model, name, name, windows[name])
        for step in range(STEPS):
            train_step(model, name, name, step)
    model.finish_window(adapter_name="b")
    assert model.adapters == ["a", "b", "c", "dora"]
    for name in model.adapters:
        weights, metrics = alone(tiny_llama, name, "another_name", options, windows[name])
        together = model.get_state_dict(name)
        assert weights.keys() == together.keys()
        assert all(torch.equal(weights[key], together[key]) for key in weights), name
        assert model.calculate_metric(True, name).result == metrics


def test_parts_of_calls_interleaved(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)
    for name in ("a", "b"):
        prepare(model, name, name, 1)
    for step in range(STEPS):
        for name in ("a", "b"):
            model.forward(rows_of(name, step), adapter_name=name)
        for name in ("a", "b"):
            model.calculate_loss(adapter_name=name)
        model.backward(adapter_name="a")
        model.forward_only(rows_of("b", 9), adapter_name="b")
        model.backward(adapter_name="b")
        for name in ("b", "a"):
            model.clip_grad_and_step(adapter_name=name)
    for name in ("a", "b"):
        weights, _ = alone(tiny_llama, name, name, {})
        assert all(torch.equal(weights[key], tensor) for key, tensor in model.get_state_dict(name).items())


def test_the_base_is_what_it_was(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)
    rows = make_rows(3)
    base = TransformersModel(tiny_llama).forward_only(rows).result["logps"]
    for name in ("a", "c"):
        prepare(model, name, name, 1)
        train_step(model, name, name, 0)
    assert model.forward_only(rows, adapter_name="a").result["logps"] != base
    for name in ("a", "c"):
        assert model.forward_only(rows, adapter_name=name, disable_lora=True).result["logps"] == base
    assert model.forward_only(rows, adapter_name="a").result["logps"] != base


def test_save_and_load_one_of_them(tiny_llama, tmp_path):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)
    for name in ("a", "c"):
        prepare(model, name, name, 1)
        train_step(model, name, name, 0)
    saved = model.save("one", str(tmp_path), save_optimizer=True, adapter_name="c")
    reference = model.get_state_dict("c")
    train_step(model, "c", "c", 1)
    after = model.get_state_dict("c")

    prepare(model, "c", "again", 1)
    progress = model.resume_from_checkpoint(saved.twinkle_path, adapter_name="again")
    assert progress["cur_step"] == 1
    assert all(torch.equal(reference[key], tensor) for key, tensor in model.get_state_dict("again").items())
    train_step(model, "c", "again", 1)
    assert all(torch.equal(after[key], tensor) for key, tensor in model.get_state_dict("again").items())

    model.add_adapter_to_model("from_folder", tmp_path / "one" / "adapter")
    assert all(torch.equal(reference[key], tensor) for key, tensor in model.get_state_dict("from_folder").items())
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), tmp_path / "one" / "adapter").eval()
    row = make_rows(1)[0]
    logits = peft(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
    expected = [0.0 if label < 0 else logits[t, label].item() for t, label in enumerate(row["labels"])]
    assert model.forward_only([row], adapter_name="from_folder").result["logps"][0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(CheckpointError, match="has shape|is missing|is not part"):
        model.resume_from_checkpoint(saved.twinkle_path, resume_only_model=True, adapter_name="a")


def test_a_released_adapter_leaves_nothing(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)
    before = sum(p.numel() for p in model.module.parameters())
    prepare(model, "a", "x", 1)
    train_step(model, "a", "x", 0)
    first = {key: t.clone() for key, t in model.get_state_dict("x").items()}
    held = [weakref.ref(p) for p in model.training_state("x").parameters.values()]
    model.remove_adapter("x")
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert sum(p.numel() for p in model.module.parameters()) == before and model.adapters == []
    with pytest.raises(UserError, match="no adapter 'x'"):
        model.forward_only(make_rows(1), adapter_name="x")
    prepare(model, "a", "x", 1)  # the name again, from fresh values
    train_step(model, "a", "x", 0)
    assert all(torch.equal(first[key], tensor) for key, tensor in model.get_state_dict("x").items())


def test_what_is_refused(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama)
    with pytest.raises(UserError, match="no adapter yet"):
        model.set_optimizer("AdamW")
    with pytest.raises(UserError, match="not trained"):
        model.start_training()
    model.add_adapter_to_model("first", CONFIGS["a"])
    model.set_optimizer("AdamW", lr=1e-3)  # the only one
    with pytest.raises(UserError, match="'first' already"):
        model.add_adapter_to_model("first", CONFIGS["b"])
    model.add_adapter_to_model("second", CONFIGS["b"])
    with pytest.raises(UserError, match="which adapter. The model has first, second"):
        model.forward_only(make_rows(1))
    with pytest.raises(UserError, match="did you mean 'first'"):
        model.forward_only(make_rows(1), adapter_name="frist")
    with pytest.raises(ConfigError, match="modules_to_save"):
        model.add_adapter_to_model("third", LoraConfig(modules_to_save=["lm_head"], target_modules=["q_proj"]))
    with pytest.raises(CheckpointError):
        model.add_adapter_to_model("../up", CONFIGS["a"])
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        model.add_adapter_to_model("fourth", LoraConfig(target_modules=["q_prj"]))
    assert model.adapters == ["first", "second"]
