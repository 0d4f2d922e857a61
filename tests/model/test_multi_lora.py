"""Adapters on one base do not notice each other: each becomes bit for bit what it becomes alone."""

import gc
import json
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_models import VOCABULARY, make_rows
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
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


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_scoring_between_forward_and_backward(tiny_llama, checkpointing):
    """With another adapter, with the base or in the mode without dropout: the gradient is that of the forward pass."""
    models = [MultiLoraTransformersModel(tiny_llama, seed=3, gradient_checkpointing=checkpointing) for _ in range(2)]
    for model in models:
        for name in ("b", "c"):
            prepare(model, name, name, 1)
        rows = [{key: row[key] for key in row if key != "sample_index"} for row in rows_of("b", 0)]  # numbered by the model
        for part in (rows[:2], rows[2:]):
            model.forward(part, adapter_name="b")
            model.calculate_loss(adapter_name="b")
            if model is models[1]:
                model.forward_only(rows_of("c", 1), adapter_name="c")
                model.forward_only(rows_of("b", 1), adapter_name="b", disable_lora=True)
                model.forward_only(rows_of("b", 1), adapter_name="b")
            model.backward(adapter_name="b")
    first, second = (model.training_state("b").gradients.tensors() for model in models)
    assert all(torch.equal(first[key], second[key]) for key in first) and any(g.norm() > 0 for g in first.values())


def test_names_that_begin_alike_and_targets_that_differ(untied, tmp_path):
    """Adding "a" beside "ab" leaves "ab" alone; one may adapt the projection to the vocabulary and the other not."""
    configs = {
        "ab": LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
        "a": LoraConfig(r=2, target_modules=["v_proj"]),
        "abc": LoraConfig(r=3, target_modules=r".*layers\.1\..*(up|down)_proj", rank_pattern={"up_proj": 2}),
        "all": LoraConfig(r=2, target_modules="all-linear"),
    }

    def train(model, name, step):
        model.forward_backward(rows_of("a", step), adapter_name=name)
        model.clip_grad_and_step(adapter_name=name)

    model = MultiLoraTransformersModel(untied, seed=3)
    for name, config in configs.items():
        model.add_adapter_to_model(name, config)
        model.set_optimizer("AdamW", lr=1e-2, eps=1e-3, adapter_name=name)
        train(model, name, 0)
    for name in reversed(configs):
        train(model, name, 1)
    for name, config in configs.items():
        alone = TransformersModel(untied, seed=3)
        alone.add_adapter_to_model("default", config)
        alone.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
        for step in range(2):
            train(alone, "default", step)
        weights = alone.get_state_dict()
        assert all(torch.equal(weights[key], tensor) for key, tensor in model.get_state_dict(name).items()), name
        assert alone.forward_only(make_rows(2)).result == model.forward_only(make_rows(2), adapter_name=name).result
        assert alone.get_train_configs().adapter == model.get_train_configs(name).adapter
        merged = dict(alone.named_weights())
        assert all(torch.equal(merged.pop(key), tensor) for key, tensor in model.named_weights(name)) and not merged


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


def test_all_in_one_checkpoint(tiny_llama, tmp_path):
    """Each in its own folders, open windows, value heads and references included; one alone can be taken out of it."""

    def new_model(names):
        model = MultiLoraTransformersModel(tiny_llama, seed=3)
        for name in names:
            model.add_adapter_to_model(name, CONFIGS[name], gradient_accumulation_steps=2)
            if name == "b":
                model.add_value_head(adapter_name=name)
                model.set_reference("frozen", adapter_name=name)
            model.set_optimizer(OPTIMIZERS[name][0], adapter_name=name, **OPTIMIZERS[name][1])
        return model

    def finish(model, name):
        for step in (3, 4):
            train_step(model, name, name, step)
        return model.get_state_dict(name)

    model = new_model(["a", "b"])
    for step, name in enumerate(["a", "b", "a", "a", "b"]):  # a window of "a" stays open
        train_step(model, name, name, step)
    with CheckpointWriter(tmp_path, "all", step=3, backend="transformers") as writer:
        state = model.save_state(writer)
    reader = CheckpointReader(tmp_path / "all")
    parts = ["adapters/a", "adapters/b", "optimizer/a", "optimizer/b", "window/a", "critic/b", "reference/b"]
    assert all(reader.has(part) for part in parts) and not reader.has("adapter") and not reader.has("window/b")
    ends = {name: finish(model, name) for name in ("a", "b")}

    for names, wanted in ((["b", "a"], None), (["b"], "b"), (["c", "a"], "a")):
        again = new_model(names)
        again.load_state(reader, state, adapter_name=wanted)
        for name in [wanted] if wanted else names:
            assert all(torch.equal(ends[name][key], tensor) for key, tensor in finish(again, name).items()), name
    with pytest.raises(CheckpointError, match="holds the adapters a, b, but this run has c, a"):
        new_model(["c", "a"]).load_state(reader, state)
    other = new_model(["a", "b"])
    other.set_optimizer("AdamW", adapter_name="b")
    before = other.get_state_dict("a")
    with pytest.raises(CheckpointError, match="written by another optimizer"):
        other.load_state(reader, state)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.get_state_dict("a").items())
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert PeftModel.from_pretrained(base, tmp_path / "all/adapters/a").peft_config["default"].r == CONFIGS["a"].r


def test_a_refused_adapter_leaves_the_model_as_it_was(tiny_llama, tmp_path):
    model = MultiLoraTransformersModel(tiny_llama, seed=3)

    def wrong_adapters():
        with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
            model.add_adapter_to_model("a", CONFIGS["c"], gradient_accumulation_steps=0)
        with pytest.raises(ConfigError, match="no module named 'q_prj'"):
            model.add_adapter_to_model("a", LoraConfig(target_modules=["q_prj"]))
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
        with pytest.raises(CheckpointError, match="adapter_model.safetensors"):
            model.add_adapter_to_model("a", tmp_path)

    wrong_adapters()
    assert model.adapters == [] and not any("lora" in name for name, _ in model.module.named_parameters())
    prepare(model, "b", "b", 1)
    train_step(model, "b", "b", 0)
    wrong_adapters()
    assert model.adapters == ["b"]
    prepare(model, "a", "a", 1)
    for step in range(STEPS):
        train_step(model, "a", "a", step)
        if step:
            train_step(model, "b", "b", step)
    for name in model.adapters:
        weights, _ = alone(tiny_llama, name, name, {})
        assert all(torch.equal(weights[key], tensor) for key, tensor in model.get_state_dict(name).items()), name


def test_a_released_adapter_leaves_nothing(tiny_llama):
    model = MultiLoraTransformersModel(tiny_llama, seed=3, gradient_checkpointing=True)

    def held_by_the_module():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules())
        return hooks, sum(p.numel() for p in model.module.parameters())

    before = held_by_the_module()
    prepare(model, "a", "x", 1)
    train_step(model, "a", "x", 0)
    first = {key: t.clone() for key, t in model.get_state_dict("x").items()}
    held = [weakref.ref(p) for p in model.training_state("x").parameters.values()]
    model.remove_adapter("x")
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert held_by_the_module() == before and model.adapters == []
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
    for name in ("../up", "with.dot", "keys", "a" * 129):
        with pytest.raises(UserError, match="adapter name '.*' is refused"):
            model.add_adapter_to_model(name, CONFIGS["a"])
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        model.add_adapter_to_model("fourth", LoraConfig(target_modules=["q_prj"]))
    assert model.adapters == ["first", "second"]
