"""How much memory a rank needs to load and to save a sharded model (see ranks.py)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from growth import Growth
from tiny_models import make_rows

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.model.transformers.loading import load_skeleton
from twinkle_research.model.transformers.sharding import ShardedModel


def sharded(folder: str, runtime: Runtime) -> TransformersModel:
    model = TransformersModel(folder, runtime=runtime, sharding="fsdp2")
    model.set_optimizer("AdamW", lr=1e-3)
    return model


def step(model: TransformersModel) -> None:
    rows = make_rows(2)
    model.forward_backward(rows, normalizer=model.count(rows))
    model.clip_grad_and_step()


def weights(folder: str, runtime: Runtime) -> ShardedModel:
    options = {"dtype": torch.float32, "attention": "auto", "device": runtime.device}
    module, files = load_skeleton(folder, **options)
    return ShardedModel(module, runtime, torch.float32, files, trained=True)


def main(runtime: Runtime, small: str, folder: str, out: str) -> None:
    model = sharded(small, runtime)  # what is imported and set up once is not part of what is measured
    step(model)
    model.resume_from_checkpoint(model.save("small", out, save_optimizer=True))
    found = {}

    def measure(name: str, action: Callable[[], Any]) -> Any:
        with Growth() as growth:
            result = action()
        found[name] = growth.mb
        return result

    del model
    measure("weights", lambda: weights(folder, runtime))
    model = measure("model", lambda: sharded(folder, runtime))
    step(model)
    saved = measure("save", lambda: model.save("x", out, save_optimizer=True))
    measure("weights at once", lambda: {name: tensor.clone() for name, tensor in TensorFolder(folder).items()})
    measure("save at once", model.get_state_dict)
    model = sharded(folder, runtime)
    measure("resume", lambda: model.resume_from_checkpoint(saved))
    Path(out, f"memory-{runtime.rank}.json").write_text(json.dumps(found))
