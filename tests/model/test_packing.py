"""Packed documents are scored and trained as if each stood alone, and models that cannot do so are refused (S03)."""

import pytest
import torch
from test_architectures import ARCHITECTURES, BASE, build
from tiny_models import make_rows, relative_distance

from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model.base import NonFiniteLoss
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


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size=(-1, -1)):
    """What flash-attn's function of that name computes. q, k, v [T, heads, D]; the documents end at ``cu_seqlens_q[1:]``."""
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k)
    ends = cu_seqlens_q.tolist()
    lengths = [end - start for start, end in zip(ends, ends[1:])]
    assert max(lengths) == max_seqlen_q == max_seqlen_k and sum(lengths) == len(q)
    done = []
    for parts in zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True):
        q1, k1, v1 = (part.transpose(0, 1).repeat_interleave(q.shape[1] // part.shape[1], 0) for part in parts)
        age = torch.arange(len(parts[0]))[:, None] - torch.arange(len(parts[0]))
        hidden = (age < 0) | (age > window_size[0] if window_size[0] >= 0 else False)
        scores = (q1 @ k1.mT * softmax_scale).masked_fill(hidden, -torch.inf)
        done.append((scores.softmax(-1) @ v1).transpose(0, 1))
    return torch.cat(done)


@pytest.mark.parametrize("name", ["llama_tied", "mistral_sliding", "qwen3"])
def test_flash_attention_is_told_where_documents_end(folders, monkeypatch, name):
    """transformers' own way to flash attention, with its kernel (which needs a GPU) replaced by the same in plain torch."""
    from transformers import modeling_flash_attention_utils as flash

    calls = []

    def of_rows(q, k, v, **settings):
        rows, length = q.shape[:2]
        ends = torch.arange(rows + 1) * length
        out = varlen(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, length, length, **settings)
        return out.unflatten(0, (rows, length))

    def of_documents(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size=(-1, -1)
    ):
        calls.append(cu_seqlens_q.tolist())
        return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size)

    found = (of_rows, of_documents, None, None, None), (flash._lazy_define_process_function(of_documents), None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *args, **settings: found)
    alone = scored(folders(name))
    model = TransformersModel(folders(name), dtype="float64")
    model.module.config._attn_implementation = "flash_attention_2"
    model.set_processor("InputProcessor", packing=True, micro_batch_tokens=1000)
    calls.clear()
    result = model.forward_backward(ROWS, normalizer=model.count(ROWS)).result
    ends = torch.tensor([0, *sorted((row["length"] for row in ROWS), reverse=True)]).cumsum(0).tolist()
    assert calls == [ends] * model.module.config.num_hidden_layers
    assert relative_distance(alone[0], {"logps": torch.tensor(sum(result["logps"], []))}) <= 1e-12
    assert relative_distance(alone[1], model.training_state().gradients.tensors()) <= 1e-12
    model.set_processor("InputProcessor", micro_batch_size=2)
    with pytest.raises(UserError, match="position_ids restart .* packing=True"):
        model.forward_only([by_hand(ROWS[:2]), ROWS[2]])


def test_windows_are_shorter_than_the_rows(folders):
    """Else the test above would say nothing about them."""
    windows = [build(name).config.get_text_config().sliding_window for name in ("mistral_sliding", "gemma2", "gemma3")]
    assert max(windows) < max(row["length"] for row in ROWS)


# name -> (class, config, attention, what the refusal says)
LEAKING = {
    "qwen3_5": (
        "Qwen3_5",
        {**ARCHITECTURES["qwen3_5"][1]},
        "auto",
        r"qwen3_5_text lets .* \(layers of the kind linear_attention\)",
    ),
    "convolution": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "auto", r"lfm2 lets .* \(layers of the kind conv\)"),
    "states": ("Mamba", {"state_size": 8}, "eager", r"mamba .* \(layers of the kind linear_attention\)"),
    "no positions": (
        "GptOss",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "eager",
        "gpt_oss with model.attention=eager lets",
    ),
    "own masks": ("Falcon", {}, "auto", "falcon builds attention masks of its own"),
    "chunks": ("Llama", {"attention_chunk_size": 8}, "auto", "llama attends in chunks"),
}


@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_leaks_is_refused(tmp_path, name):
    import transformers

    family, options, attention, expected = LEAKING[name]
    sizes = {key: value for key, value in BASE.items() if key != "head_dim"}
    config = getattr(transformers, f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config")(**{**sizes, **options})
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    model = TransformersModel(tmp_path, attention=attention)
    with pytest.raises(ConfigError, match=rf"^model {expected}.*; set data.packing=false"):
        model.set_processor("InputProcessor", packing=True, micro_batch_tokens=64)
    model.set_processor("InputProcessor", micro_batch_tokens=64)  # and is as before
    assert model.forward_only(ROWS).result["num_tokens"] > 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_small_leaks_are_found_in_bfloat16_and_rounding_is_none(tmp_path, name):
    """With the weights that a model begins with, a document changes another by 7e-4 only: less than it is rounded by."""
    import transformers

    family, options, _ = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}TextConfig" if name == "qwen3_5" else f"{family}Config")
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config(**{**BASE, **options, "initializer_range": 0.02})).save_pretrained(
        tmp_path
    )
    model = TransformersModel(tmp_path, dtype="bfloat16")
    if name != "qwen3_5":
        model.set_processor("InputProcessor", packing=True)
        return
    with pytest.raises(ConfigError, match=r"change by [1-9]\.\de-04 when another one stands beside it"):
        model.set_processor("InputProcessor", packing=True)


def by_hand(rows):
    """One feature that holds them all."""
    both = {name: [value for row in rows for value in row[name]] for name in ("input_ids", "labels")}
    return both | {"position_ids": [t for row in rows for t in range(row["length"])], "sample_index": 0}


def test_rows_that_came_packed_are_tried_out_too(folders, tiny_llama):
    with pytest.raises(ConfigError, match="lets packed documents see each other"):
        TransformersModel(folders("qwen3_5")).forward_backward([by_hand(ROWS[:2])])
    gradients = []
    for rows in ([by_hand(ROWS[:2])], ROWS[:2]):
        model = TransformersModel(tiny_llama)
        model.forward_backward(rows, normalizer=1.0)
        assert model.module.training
        gradients.append(model.training_state().gradients.tensors())
    assert relative_distance(*gradients) <= 1e-6


def test_a_model_with_masks_of_its_own_is_refused(folders):
    """It does not ask for the registered attention: here because its attention layer was replaced."""
    model = TransformersModel(folders("llama_tied"))
    for layer in model.module.model.layers:
        layer.self_attn.forward = lambda hidden_states, **settings: (hidden_states.cumsum(1), None)
    with pytest.raises(ConfigError, match="lets packed documents see each other"):
        model.set_processor("InputProcessor", packing=True)


def update(folder, rows, lora, dropout, checkpointing, by_hand, loss, **processor):
    """The change of the weights in three steps: the weights themselves would hide it."""
    model = TransformersModel(folder, seed=5, gradient_checkpointing=checkpointing)
    if lora:
        model.add_adapter_to_model("default", LoraAdapterConfig(r=4, dropout=dropout))
    else:
        model.start_training(1)
    model.set_processor("InputProcessor", **processor)
    model.set_loss("CrossEntropyLoss", **loss)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    start = {name: p.detach().clone() for name, p in model.training_state().parameters.items()}
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
    return {name: p.detach() - start[name] for name, p in model.training_state().parameters.items()}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("lora", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_updates_do_not_depend_on_packing(tiny_llama, lora, dropout, checkpointing, by_hand):
    rows = [row | {"labels": [-100] * row["length"]} if i == 4 else row for i, row in enumerate(make_rows(9, seed=1))]
    loss = {"normalization": "sequence"} if by_hand else {"label_smoothing": 0.1, "z_loss": 1e-2}
    settings = (rows, lora, dropout, checkpointing, by_hand, loss)
    padded = update(tiny_llama, *settings, micro_batch_size=2)
    for tokens in (8, 16, 64, 1000):
        packed = update(tiny_llama, *settings, micro_batch_tokens=tokens, packing=True)
        assert relative_distance(padded, packed) <= 1e-6


def test_dropout_of_rows_without_a_number_goes_by_their_place(tiny_llama):
    rows = [{name: row[name] for name in ("input_ids", "labels", "length")} for row in make_rows(9, seed=1)]
    settings = (rows, True, 0.3, False, False, {})
    padded = update(tiny_llama, *settings, micro_batch_size=9)
    for processor in ({"micro_batch_tokens": 30}, {"micro_batch_tokens": 30, "packing": True}):
        assert relative_distance(padded, update(tiny_llama, *settings, **processor)) <= 1e-6
    assert relative_distance(padded, update(tiny_llama, rows, True, 0.0, False, False, {}, packing=True)) > 0.1


def test_a_document_that_is_not_finite_is_named_and_spoils_no_other(tiny_llama):
    rows = make_rows(5, vocabulary=96)  # ids below 96
    rows[2]["input_ids"][0] = 96
    model = TransformersModel(tiny_llama)
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_processor("InputProcessor", packing=True, micro_batch_tokens=1000)
    alone = model.forward_only(rows).result["logps"]
    embedding = model.module.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out.masked_fill((args[0] == 96)[..., None], float("nan")))
    logps = model.forward_backward(rows, normalizer=1.0).result["logps"]
    assert [values == pytest.approx(right) for values, right in zip(logps, alone)] == [True, True, False, True, True]
    with pytest.raises(NonFiniteLoss) as caught:
        model.clip_grad_and_step()
    assert caught.value.rows == ["rows.jsonl:3"]


def test_results_come_back_in_the_order_of_the_rows(tiny_llama):
    model = TransformersModel(tiny_llama)
    alone = [model.forward_only([row]).result["logps"][0] for row in ROWS]
    advantages = [[float(i)] * sum(label != -100 for label in row["labels"]) for i, row in enumerate(ROWS)]
    seen = []

    class Keep(type(model.trained().loss)):
        reads = frozenset({"advantages"})

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
