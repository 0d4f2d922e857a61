"""How much memory a rank needs to load and to save a sharded model (see ranks.py).

Measured is RssAnon of /proc/<pid>/status: what the process has allocated. VmRSS and its peak VmHWM also count the pages of
memory-mapped safetensors files, which belong to the page cache and go when something else needs the room. RssAnon has no
peak of its own, so another process reads it every half millisecond.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_rows

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.model.transformers.loading import load_skeleton
from twinkle_research.model.transformers.sharding import ShardedModel

WATCH = """
import select, sys
def read():
    with open(f"/proc/{sys.argv[1]}/status") as file:
        return int(file.read().split("RssAnon:")[1].split()[0])
start = peak = read()
print(start, flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    peak = max(peak, read())
print(max(peak, read()) - start)
"""


class Growth:
    """MB that this process had at most more than at the start of the block."""

    def __enter__(self) -> "Growth":
        self._watch = subprocess.Popen(
            [sys.executable, "-S", "-c", WATCH, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watch.stdout.readline()
        return self

    def __exit__(self, *_) -> None:
        self.mb = int(self._watch.communicate("\n")[0]) * 1024 / 1e6


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
