"""Each family's own parts give the losses, scores, gradients and updates of transformers and PEFT, in every layout.

The measured distances are printed by ``pytest -s``. One launch for each number of processes.
"""

import json

import families_worker as worker
import pytest
import torch
import transformers
from families_worker import LAYOUTS, LOCAL, YARN
from hf_folders import BASE, LATENT
from lora_worker import BOUNDS
from ranks import launch

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError
from twinkle_research.model import MegatronModel
from twinkle_research.model.megatron.architecture import Architecture

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def measured(once):
    """World size -> folder with the distances of each layout and process."""

    def run(size):
        def make(out):
            (out / "expected").mkdir()
            worker.references(out, out / "expected", size)
            arguments = (out, out / "expected", out)
            if size == 1:
                worker.main(Runtime(), *map(str, arguments))
            else:
                launch("families_worker", *arguments, processes=size)

        return once(f"megatron-families-{size}", make)

    return run


def cases():
    for size, layouts in LAYOUTS.items():
        yield from (pytest.param(size, name, marks=[pytest.mark.long] if size > 1 else []) for name in layouts)


@pytest.mark.parametrize(("size", "layout"), cases())
def test_as_transformers(measured, size, layout):
    """Measured over all layouts: log-probabilities 9.5e-7, gradients 9.4e-7, losses 7.2e-7, metrics 5.2e-7."""
    for rank in range(size):
        for kind, found in json.loads((measured(size) / f"{layout}-{rank}.json").read_text()).items():
            print(layout, rank, kind, {name: f"{value:.1e}" for name, value in found.items()})
            assert found["gradients"] <= 1e-6 and found["metrics"] <= 2e-6 and max(found["logps"], found["loss"]) <= 2e-6


@pytest.mark.long
@pytest.mark.parametrize(("size", "layout"), [(size, name) for size in (2, 4) for name in LAYOUTS[size]])
def test_as_peft(measured, size, layout):
    for rank in range(size):
        found = json.loads((measured(size) / f"{layout}-{rank}-lora.json").read_text())
        print(layout, rank, {name: f"{value:.1e}" for name, value in found.items()})
        assert all(value <= BOUNDS[name] for name, value in found.items()) and len(found) == len(BOUNDS)


@pytest.mark.parametrize("name", ["gemma3", "shared"])
def test_bfloat16_rounds_as_transformers(tmp_path, name):
    """Norms, embeddings and caps: what is not rounded in the same places differs by far more than sums in another order."""
    worker.save(tmp_path, [name])
    folder = tmp_path / name
    ids = torch.randint(0, BASE["vocab_size"], (1, 30), generator=torch.Generator().manual_seed(0))
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    wanted = own(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    model = MegatronModel(folder, dtype="bfloat16")
    try:
        found = model.forward_only([{"input_ids": ids[0].tolist(), "labels": [*ids[0, 1:].tolist(), -100]}]).result["logps"][0]
    finally:
        model.close()
    assert (torch.tensor(found[:-1]) - wanted).abs().max() < 0.05


# --- what is refused ----------------------------------------------------------------------------------------------------

REFUSED = [
    ("Mistral", {"attention_bias": True}, "model type mistral with attention_bias=True is not supported"),
    ("Qwen3", {"mlp_bias": True}, "model type qwen3 with mlp_bias=True is not supported"),
    ("Llama", {"hidden_act": "gelu"}, "model type llama with an MLP of 'gelu' is not supported .* only with silu"),
    ("Gemma2", {"hidden_activation": "gelu"}, "model type gemma2 with an MLP of 'gelu' .* only with gelu_pytorch_tanh"),
    ("Gemma3Text", {"use_bidirectional_attention": True}, "gemma3_text with use_bidirectional_attention=True is not supported"),
    ("Gemma3Text", {"attn_logit_softcapping": 50.0}, "gemma3_text with attn_logit_softcapping=50.0 is not supported"),
    (
        "Gemma3Text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": {**YARN, "attention_factor": 1.2}},
        },
        "rotary embeddings whose scale differs between layers",
    ),
    ("DeepseekV2", {**LATENT, "norm_topk_prob": True}, "deepseek_v2 with norm_topk_prob=True is not supported"),
    ("DeepseekV2", {**LATENT, "topk_method": "noaux_tc"}, "deepseek_v2 with topk_method=noaux_tc is not supported"),
    ("DeepseekV2", {**LATENT, "attention_bias": True}, "deepseek_v2 with attention_bias=True is not supported"),
    ("Qwen3Next", {}, r"whose model_type is qwen3_next \(Megatron-Core's gated delta net takes no packed rows"),
    ("Olmoe", {}, "whose model_type is olmoe; it has deepseek_v2, gemma"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "message"), REFUSED)
def test_what_has_no_exact_counterpart_is_refused_by_name(tmp_path, family, options, message):
    getattr(transformers, f"{family}Config")(**{**BASE, **options}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Architecture.read(tmp_path)
