"""Building a TransformersModel: from the config, with wrong settings, and with a template."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from tiny_models import make_rows
from transformers import Gemma2Config

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.loss.base import Loss
from twinkle_research.model import TransformersModel
from twinkle_research.model.config import DType, LoraAdapterConfig, ModelConfig, NoAdapterConfig, TransformersBackendConfig
from twinkle_research.model.transformers.loading import attention_kind
from twinkle_research.trainer.config import AdamConfig, ConstantScheduleConfig, SftTrainerConfig


def config(**changes):
    parts = {
        "model": ModelConfig(name="hf", dtype=DType.bfloat16),
        "backend": TransformersBackendConfig(logits_chunk=7, gradient_checkpointing=True),
        "adapter": LoraAdapterConfig(r=2, alpha=3.0),
        "trainer": SftTrainerConfig(micro_batch_size=None, micro_batch_tokens=32),
        "data": SimpleNamespace(packing=False),
        "seed": 11,
    }
    return SimpleNamespace(**(parts | changes))


def test_from_config(tiny_llama):
    model = TransformersModel.from_config(config(), tiny_llama, Runtime())
    assert model.module.dtype == torch.bfloat16 and model.module.is_gradient_checkpointing and model.seed == 11
    assert model.trained().processor.micro_batch_tokens == 32 and model.data_parallel == (0, 1)
    model.set_optimizer(AdamConfig(name="adamw", lr=1e-3))
    model.set_lr_scheduler(ConstantScheduleConfig(), total_steps=5)
    rows = make_rows(3)
    model.forward_backward(rows, normalizer=model.count(rows))
    model.clip_grad_and_step()
    dump = model.get_train_configs().model_dump()
    assert dump["adapter"]["r"] == 2 and dump["adapter"]["lora_alpha"] == 3 and dump["optimizer"]["lr"] == 1e-3
    full = TransformersModel.from_config(config(adapter=NoAdapterConfig()), tiny_llama, Runtime())
    configs = full.get_train_configs()
    assert configs.adapter is None and configs.trainable_parameters == configs.total_parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "model.dtype must be one of float32, bfloat16"),
        ({"logits_chunk": 0}, "logits_chunk must be >= 1"),
        ({"attention": "flash"}, "model.attention=flash needs a GPU"),
    ],
)
def test_wrong_settings(tiny_llama, options, message):
    with pytest.raises(ConfigError, match=message):
        TransformersModel(tiny_llama, **options)


def test_what_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match="model.path="):
        TransformersModel(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TransformersModel(tmp_path)


def test_attention_kinds():
    assert attention_kind("auto", torch.device("cpu")) == "sdpa"
    assert attention_kind("eager", torch.device("cpu")) == "eager"


def test_a_softcap_of_attention_scores_is_not_left_out():
    """transformers' sdpa ignores Gemma 2's."""
    config, cpu = Gemma2Config(attn_logit_softcapping=20.0), torch.device("cpu")
    assert attention_kind("auto", cpu, config) == attention_kind("eager", cpu, config) == "eager"
    with pytest.raises(
        ConfigError, match="sdpa would leave out the attn_logit_softcapping=20.0 of this model; write eager, or auto"
    ):
        attention_kind("sdpa", cpu, config)
    assert attention_kind("auto", cpu, Gemma2Config(attn_logit_softcapping=None)) == "sdpa"


def test_eager_and_sdpa_agree(tiny_llama):
    rows = make_rows(3)
    eager, sdpa = (TransformersModel(tiny_llama, attention=kind).forward_only(rows).result["logps"] for kind in ("eager", "sdpa"))
    for a, b in zip(eager, sdpa):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_custom_loss_is_taken_and_may_ask_for_entropy(tiny_llama):
    class EntropyBonus(Loss):
        needs = frozenset({"entropy"})

        def __call__(self, scores, inputs, normalizer):
            from twinkle_research.loss.base import LossOutput

            loss = -(scores.entropy * inputs.mask).sum() / normalizer
            return LossOutput(
                loss, torch.zeros(inputs.num_sequences), {"entropy": (scores.entropy.detach().sum(), inputs.mask.sum())}
            )

    rows = make_rows(4)
    model = TransformersModel(tiny_llama)
    model.set_loss(EntropyBonus)
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("SGD", lr=0.5)
    entropies = []
    for _ in range(3):
        model.forward_backward(rows, normalizer=model.count(rows))
        model.clip_grad_and_step()
        entropies.append(model.calculate_metric(is_training=True).result["entropy"])
    assert entropies[0] < entropies[1] < entropies[2] < torch.tensor(97.0).log()
    with pytest.raises(ConfigError, match="did you mean 'CrossEntropyLoss'"):
        model.set_loss("CrosEntropyLoss")


def test_template_and_processor_by_name_or_object(tiny_llama):
    from twinkle_research.processor import InputProcessor

    model = TransformersModel(tiny_llama)
    ready = InputProcessor(micro_batch_size=3)
    model.set_processor(ready)
    assert model.trained().processor is ready
    with pytest.raises(ConfigError, match="InputProcessor"):
        model.set_processor("InputProcesor")
    template = SimpleNamespace(tokenizer=None)
    model.set_template(template)
    assert model.trained().template is template
    with pytest.raises(UserError, match="no adapter 'x'; the model has none"):
        model.forward_only(make_rows(1), adapter_name="x")
    with pytest.raises(UserError, match="adapter_name is empty"):
        TransformersModel(tiny_llama).add_adapter_to_model("", LoraAdapterConfig())


def test_an_index_that_leaves_the_folder_is_refused(tiny_llama, tmp_path):
    """S34 for the class as for the command: transformers itself would follow it."""
    folder = tmp_path / "in"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with safe_open(tmp_path / "outside.safetensors", "pt") as tensors:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.keys(), "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside.safetensors' is not the name of a safetensors file in this folder"):
        TransformersModel(folder)


@pytest.mark.parametrize("steps", [1.5, 0, True])
def test_accumulation_counts_whole_steps(tiny_llama, steps):
    model = TransformersModel(tiny_llama)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be a whole number"):
        model.add_adapter_to_model("default", LoraConfig(target_modules="all-linear"), gradient_accumulation_steps=steps)
