"""One optimizer step of the real SmolLM2-135M in a layout, compared with the one that transformers does (see ranks.py)."""

from __future__ import annotations

import json
from pathlib import Path

from equality_worker import OPTIMIZER, Gaps, compare_metrics, compare_weights
from safetensors.torch import load_file, save_file

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.template import Template

# 9 heads, 3 of them for keys and values; 30 layers.
LAYOUTS = {
    2: {"PP2": {"pipeline_parallel": 2, "recompute": Recompute.full}},
    3: {"TP3": {"tensor_parallel": 3}, "PP3": {"pipeline_parallel": 3}, "DP3-zero": {"distributed_optimizer": True}},
}
TALKS = [
    ("Who are you?", "I am a small language model."),
    ("Name a colour.", "Blue is one of them, and so is green."),
    ("What is 7 times 8?", "56"),
    ("Write a sentence about the sea.", "The sea was calm in the morning, but by noon the wind had turned and the waves rose."),
]


def rows(folder: Path) -> list[dict]:
    """Each turn ends with the token that is also the model's padding."""
    template = Template(model_id=str(folder))
    talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": told}] for asked, told in TALKS]
    return [template.encode({"messages": messages}) for messages in talks]


def step(model: SavingMixin, folder: Path) -> tuple[list[list[float]], dict[str, float]]:
    rank, size = model.data_parallel
    own = rows(folder)[rank::size]
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("AdamW", **OPTIMIZER)
    done = model.forward_backward(own, normalizer=model.count(own)).result
    model.clip_grad_and_step(1.0)
    return done["logps"], model.calculate_metric(is_training=True).result


def reference(folder: Path, stem: Path) -> None:
    model = TransformersModel(folder)
    logps, metrics = step(model, folder)
    save_file({name: tensor.detach().contiguous() for name, tensor in model.disk_weights()}, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps({"logps": logps, "metrics": metrics}))


def main(runtime: Runtime, folder: str, expected: str, out: str) -> None:
    stored, wanted = json.loads(Path(f"{expected}.json").read_text()), load_file(f"{expected}.safetensors")
    for name, options in LAYOUTS[runtime.world_size].items():
        model = MegatronModel(folder, layout=MegatronBackendConfig(**options), runtime=runtime)
        logps, metrics = step(model, Path(folder))
        gaps = Gaps()
        compare_metrics(0, metrics, stored["metrics"], gaps)
        rank, size = model.data_parallel
        for row, other in zip(logps, stored["logps"][rank::size], strict=True):
            gaps.note("logps", max(abs(a - b) for a, b in zip(row, other, strict=True)))
        compare_weights(model.disk_weights(), wanted, gaps)
        model.close()
        del model
        Path(out, f"{name}-{runtime.rank}.json").write_text(json.dumps(vars(gaps)))
