"""The engine follows the trainer: weights, LoRA merged or beside them, and what is raised where it does not."""

import math

import pytest
import torch
from engines import answers, needs_vllm, perturbed, sharp_model, values
from peft import LoraConfig
from sampling import PROMPTS, small_qwen
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from twinkle_research.data_format import SamplingParams
from twinkle_research.errors import UserError
from twinkle_research.model.prepare import prepare
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.sampler.engine import EngineOptions
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.sampler.vllm import VLLMSampler
from twinkle_research.sampler.vllm_env import CPU_HEAD_DIMS

pytestmark = needs_vllm
PARAMS = SamplingParams(max_tokens=16, seed=3, logprobs=1, num_samples=2)
LONG = [(7 * i) % 500 + 5 for i in range(100)]  # three blocks of the prefix cache


def follows(sampler, model, prompts=(*PROMPTS, LONG), **options):
    plain = TransformersSampler(model.module, sampler.template)
    got, expected = sampler.sample(prompts, PARAMS, **options), plain.sample(prompts, PARAMS, **options)
    return answers(got) == answers(expected) and values(got) == pytest.approx(values(expected), abs=3e-5)


@pytest.fixture(scope="module")
def model():
    return sharp_model()


@pytest.fixture(scope="module")
def sampler(model, template):
    made = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=160))
    yield made
    made.close()


def with_adapter(seed=0, **settings):
    model = sharp_model()
    targets = settings.pop("target_modules", "all-linear")
    model.add_adapter_to_model("default", LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings))
    draw(model, seed)
    return model


def draw(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


# --- weights --------------------------------------------------------------------------------------------------------


def test_each_sync_changes_the_policy_and_drops_what_was_cached(model, sampler):
    for version in range(3):
        perturbed(model, version)
        measured = sampler.sync(model, version)
        assert sampler.version == version and measured["sync/probe_gap"] < 1e-4
        assert follows(sampler, model)


@pytest.mark.parametrize(
    "architecture",
    [
        lambda shared: LlamaForCausalLM(LlamaConfig(**shared, num_key_value_heads=2, head_dim=32)),
        lambda shared: Qwen2ForCausalLM(Qwen2Config(**shared, num_key_value_heads=1, tie_word_embeddings=True)),  # biases
    ],
    ids=["llama untied", "qwen2 tied"],
)
def test_other_architectures(architecture, tmp_path):
    torch.manual_seed(0)
    shared = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 2}
    module = architecture({**shared, "max_position_embeddings": 128, "initializer_range": 0.2})
    module.save_pretrained(tmp_path)
    model = TransformersModel(tmp_path)
    sampler = VLLMSampler(tmp_path)
    perturbed(model, 1)
    sampler.sync(model, 0)
    assert follows(sampler, model, [[5, 6, 7], [98], [3] * 70])
    sampler.close()


def test_a_coarser_engine_gets_rounded_weights(model, template):
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(dtype="bfloat16", max_model_len=64))
    gap = sampler.sync(model, 0)["sync/probe_gap"]
    assert 1e-4 < gap < 0.5
    (response,) = sampler.sample([PROMPTS[0]], PARAMS)
    assert all(math.isfinite(value) for value in values([response]))
    sampler.close()


def test_what_vllm_cannot_run_is_said(tmp_path, sampler):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_DIMS
    small_qwen().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="on a CPU vLLM has no attention for head_dim 16; write sampler=transformers"):
        VLLMSampler(tmp_path)
    with pytest.raises(UserError, match="(?s)vLLM cannot run the model in .* here: .*max_model_len.*write sampler=transformers"):
        VLLMSampler(prepare("tiny"), options=EngineOptions(max_model_len=2000))


# --- LoRA -----------------------------------------------------------------------------------------------------------


def test_lora_merged_on_the_way(sampler):
    model = with_adapter()
    for version in range(2):
        draw(model, version)
        sampler.sync(model, version)
        assert follows(sampler, model)
        assert follows(sampler, model, adapter_name="default")
    with pytest.raises(UserError, match="the adapter is merged into the engine's weights"):
        sampler.sample(PROMPTS, PARAMS, use_base_model=True)
    with pytest.raises(UserError, match="adapter 'other' is not in the engine, which has default"):
        sampler.sample(PROMPTS, PARAMS, "other")


def test_lora_as_an_adapter(template, tmp_path):
    model = with_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
    model.module.get_base_model().save_pretrained(tmp_path)  # sharper than the prepared one
    folder = prepare("tiny")
    model = TransformersModel(folder)
    model.add_adapter_to_model("default", LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules="all-linear"))
    sampler = VLLMSampler(folder, template, options=EngineOptions(load_weights=True, max_lora_rank=4, max_model_len=160))
    for version in range(3):
        draw(model, version)
        before = {name: p.clone() for name, p in model.module.named_parameters()}
        sampler.sync(model, version)
        assert all(torch.equal(before[name], p) for name, p in model.module.named_parameters())
        assert follows(sampler, model)
        assert follows(sampler, model, use_base_model=True)
    held = sampler.engine.runner.lora_manager.list_adapters()
    assert len(held) == 1  # old versions are gone
    _corrupt_adapter(sampler, model)
    sampler.close()


def _corrupt_adapter(sampler, model):
    adapter = sampler._sync.adapter
    load = adapter.load

    def load_wrong(tensors, config):
        arriving = load(tensors, config)
        (target, *_) = (t for name, t in adapter.targets().items() if "qkv_proj.lora_b" in name)
        target[0, 0] += 1
        return arriving

    adapter.load = load_wrong
    with pytest.raises(UserError, match=r"checksums: .*self_attn\.q_proj\.lora_B\.weight \(1 of 56 tensors differ\)"):
        sampler.sync(model, 9)
    adapter.load = load


def test_an_adapter_that_vllm_cannot_hold_is_refused(template):
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(load_weights=True, max_lora_rank=8, max_model_len=64))
    for settings, message in (
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "only supports modules_to_save"),
    ):
        with pytest.raises(UserError, match=f"vLLM cannot take this adapter: .*{message}.*sampler.lora=merge"):
            sampler.sync(with_adapter(**settings), 0)
    with pytest.raises(UserError, match="sends an adapter, but the model has none"):
        sampler.sync(sharp_model(), 0)
    sampler.close()


# --- the canary -----------------------------------------------------------------------------------------------------


def test_a_failed_sync_leaves_nothing_to_sample_from(model, sampler, monkeypatch):
    sampler.sync(model, 0)
    monkeypatch.setattr(sampler.engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(UserError, match="requests under way"):
        sampler.sync(model, 1)
    with pytest.raises(UserError, match="no weights"):
        sampler.sample(PROMPTS, PARAMS)
    assert sampler.version == -1


def _without(name):
    return lambda weights: ((n, t) for n, t in weights if n != name)


def _altered(name, change):
    return lambda weights: ((n, change(t.clone()) if n == name else t) for n, t in weights)


def _one_bit(tensor):
    tensor.view(torch.int32).flatten()[7] ^= 1
    return tensor


K_PROJ = "model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (_without(K_PROJ), rf"{K_PROJ} \(1 of 46 tensors differ\)"),
        (_altered("model.layers.0.mlp.up_proj.weight", _one_bit), r"layers\.0\.mlp\.up_proj\.weight \(1 of 46"),
        (_altered("model.norm.weight", _one_bit), r"model\.norm\.weight"),
        (lambda weights: iter(()), r"model\.embed_tokens\.weight \(46 of 46"),
    ],
    ids=["stale", "one bit of a matrix", "one bit of a vector", "nothing"],
)
def test_weights_that_do_not_arrive_are_named(model, sampler, monkeypatch, loads, message):
    """``loads``: what the engine makes of what it is sent."""
    sampler.sync(model, 0)
    perturbed(model, 11)
    load = sampler.engine.model.load_weights
    monkeypatch.setattr(sampler.engine.model, "load_weights", lambda weights: load(loads(list(weights))))
    with pytest.raises(UserError, match="does not have the trainer's weights after a sync, by their checksums: .*" + message):
        sampler.sync(model, 1)


def test_what_the_trainer_does_not_send_is_named(model, sampler, monkeypatch):
    sampler.sync(model, 0)
    weights = model.disk_weights
    monkeypatch.setattr(model, "disk_weights", lambda: _without(K_PROJ)(weights()))
    with pytest.raises(UserError, match=f"checksums: {K_PROJ}"):
        sampler.sync(model, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda weights: (w for w in weights if ".layers.1.mlp." not in w[0]), r"no tensor of the trainer reaches .*mlp"),
        (lambda weights: [*weights, ("model.layers.0.nothing.weight", torch.ones(3))], "vLLM cannot take over .*nothing"),
    ],
    ids=["a layer is missing", "an unknown name"],
)
def test_names_that_do_not_fit_are_found_at_the_first_sync(model, template, monkeypatch, names, message):
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=64))
    weights = model.disk_weights
    monkeypatch.setattr(model, "disk_weights", lambda: names(weights()))
    with pytest.raises(UserError, match=message):
        sampler.sync(model, 0)
    sampler.close()


def test_the_probe_finds_what_checksums_cannot(sampler, monkeypatch):
    """The same wrong weights on both sides: the adapter is left out."""
    model = with_adapter()
    sampler.sync(model, 0)
    base = sharp_model()
    monkeypatch.setattr(model, "disk_weights", base.disk_weights)
    with pytest.raises(UserError, match="log-probabilities of one text differ by .* than the 0.001 of torch.float32"):
        sampler.sync(model, 1)


def test_nan_weights_stop_the_run(sampler):
    model = sharp_model()
    with torch.no_grad():
        model.module.get_input_embeddings().weight[:] = math.nan
    with pytest.raises(UserError, match="differ by nan on average"):
        sampler.sync(model, 1)


def test_without_the_canary_nothing_is_compared(model, template, monkeypatch):
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=160), canary=False)
    monkeypatch.setattr(model, "policy_scores", None)
    assert sampler.sync(model, 0).keys() == {"sync/push_seconds", "sync/check_seconds"}
    assert follows(sampler, model)
    sampler.close()
