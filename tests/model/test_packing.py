"""Packed documents are scored and trained as if each stood alone, and models that cannot do so are refused (S03)."""

import pytest
import torch
from test_architectures import build
from tiny_models import make_rows, relative_distance

from twinkle_research.errors import ConfigError
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.transformers import TransformersModel

# Rows longer than the sliding windows of the models that have one.
ROWS = make_rows(7, low=5, high=23, seed=3)

# family -> (dtype, limit of the relative distance). Gemma's norms and the experts' products are float32 in any case.
FAMILIES = dict.fromkeys(("llama_tied", "mistral_sliding", "qwen2", "qwen3", "gpt2", "phi_bias"), ("float64", 1e-12))
FAMILIES |= dict.fromkeys(("gemma2", "gemma3", "qwen3_moe", "cohere", "granite"), ("float32", 1e-06))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> folder of a random model of that family, made on first use."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build(name).save_pretrained(made[name])
        return made[name]

    return folder


def scored(folder, attention="auto", dtype="float64", **processor):
    """(log-probabilities of all rows, gradients) of one call."""
    model = TransformersModel(folder, dtype=dtype, attention=attention)
    model.set_processor("InputProcessor", **processor)
    result = model.forward_backward(ROWS, normalizer=model.count(ROWS)).result
    return {"logps": torch.tensor(sum(result["logps"], []))}, model.training_state().gradients.tensors()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_is_padded_is_alone(folders, name):
    dtype, limit = FAMILIES[name]
    alone = scored(folders(name), dtype=dtype)
    for processor in (
        {"micro_batch_size": 3},
        {"micro_batch_tokens": 60},
        {"micro_batch_tokens": 30, "packing": True},
        {"micro_batch_tokens": 1000, "packing": True},
    ):
        for one, other in zip(alone, scored(folders(name), dtype=dtype, **processor), strict=True):
            assert relative_distance(one, other) <= limit


@pytest.mark.parametrize("name", ["llama_tied", "mistral_sliding", "qwen3"])
def test_eager_attention_keeps_them_apart_too(folders, name):
    alone = scored(folders(name), dtype="float32", attention="eager")
    packed = scored(folders(name), dtype="float32", attention="eager", micro_batch_tokens=1000, packing=True)
    assert relative_distance(alone[0], packed[0]) <= 1e-6 and relative_distance(alone[1], packed[1]) <= 1e-6


def test_windows_are_shorter_than_the_rows(folders):
    """Else the test above would say nothing about them."""
    windows = [build(name).config.get_text_config().sliding_window for name in ("mistral_sliding", "gemma2", "gemma3")]
    assert max(windows) < max(row["length"] for row in ROWS)


@pytest.mark.parametrize(("name", "kind"), [("qwen3_5", "linear_attention")])
def test_a_model_that_leaks_is_refused(folders, name, kind):
    model = TransformersModel(folders(name))
    with pytest.raises(ConfigError, match=rf"{name}.* lets packed documents see each other.*{kind}.*data.packing=false"):
        model.set_processor("InputProcessor", packing=True, micro_batch_tokens=64)
    model.set_processor("InputProcessor", micro_batch_tokens=64)


def test_a_model_with_masks_of_its_own_is_refused(folders):
    """It does not ask for the registered attention: here because its attention layer was replaced."""
    model = TransformersModel(folders("llama_tied"))
    for layer in model.module.model.layers:
        layer.self_attn.forward = lambda hidden_states, **settings: (hidden_states.cumsum(1), None)
    with pytest.raises(ConfigError, match="lets packed documents see each other"):
        model.set_processor("InputProcessor", packing=True)


def trained(folder, rows, lora, dropout, checkpointing, by_hand, **processor):
    model = TransformersModel(folder, seed=5, gradient_checkpointing=checkpointing)
    if lora:
        model.add_adapter_to_model("default", LoraAdapterConfig(r=4, dropout=dropout))
    else:
        model.start_training(1)
    model.set_processor("InputProcessor", **processor)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    for step in range(3):
        share = [rows[i] for i in range(step, len(rows), 2)]
        if by_hand:
            for half in (share[:2], share[2:]):
                model.forward(half)
                model.calculate_loss()
                model.backward()
        else:
            model.forward_backward(share, normalizer=model.count(share))
        model.clip_grad_and_step()
    return model.get_state_dict()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("lora", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_updates_do_not_depend_on_packing(tiny_llama, lora, dropout, checkpointing, by_hand):
    rows = [row | {"labels": [-100] * row["length"]} if i == 4 else row for i, row in enumerate(make_rows(9, seed=1))]
    settings = (rows, lora, dropout, checkpointing, by_hand)
    padded = trained(tiny_llama, *settings, micro_batch_size=2)
    for tokens in (8, 16, 64, 1000):
        packed = trained(tiny_llama, *settings, micro_batch_tokens=tokens, packing=True)
        assert relative_distance(padded, packed) <= 1e-6


def test_results_come_back_in_the_order_of_the_rows(tiny_llama):
    model = TransformersModel(tiny_llama)
    alone = [model.forward_only([row]).result["logps"][0] for row in ROWS]
    advantages = [[float(i)] * sum(label != -100 for label in row["labels"]) for i, row in enumerate(ROWS)]
    seen = []

    class Keep(type(model.trained().loss)):
        def __call__(self, scores, inputs, normalizer):
            seen.append((inputs.advantages * inputs.mask).sum())
            return super().__call__(scores, inputs, normalizer)

    model.set_loss(Keep())
    for processor in ({"micro_batch_tokens": 40}, {"micro_batch_tokens": 40, "packing": True}):
        seen.clear()
        model.set_processor("InputProcessor", **processor)
        result = model.forward_only(ROWS, advantages=advantages).result["logps"]
        for one, other in zip(alone, result, strict=True):
            assert other == pytest.approx(one, abs=1e-5)
        assert float(sum(seen)) == sum(sum(values) for values in advantages)


def test_a_bad_document_is_named(tiny_llama):
    model = TransformersModel(tiny_llama)
    model.set_processor("InputProcessor", packing=True, micro_batch_tokens=1000)
    rows = make_rows(4)
    rows[2]["input_ids"][1] = 500
    with pytest.raises(Exception, match=r"rows.jsonl:3: input_ids\[1\] is 500"):
        model.forward_only(rows)


def test_saved_configs_do_not_name_the_attention(tiny_llama, tmp_path):
    model = TransformersModel(tiny_llama)
    model.set_processor("InputProcessor", packing=True)
    model.forward_only(ROWS)
    model.save("one", str(tmp_path))
    assert "twinkle" not in (tmp_path / "one" / "model" / "config.json").read_text()
    assert model.module.config._attn_implementation == "sdpa"
