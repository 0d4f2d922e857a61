"""How much memory a rank needs to load and to stream a model in a layout (see ranks.py)."""

import json
from pathlib import Path

import torch
from growth import Growth
from pieces_worker import Opened

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.mesh import Mesh

BUCKET = 2 << 20


def drain(model: Opened) -> None:
    for _, tensor in model.directory.stream(model.parameters.__getitem__):
        del tensor  # only the stream may keep it


def main(runtime: Runtime, small: str, folder: str, out: str) -> None:
    found: dict[str, dict[str, float]] = {}
    for name, layout in (("tp2", {"tensor_parallel": 2}), ("pp2", {"pipeline_parallel": 2})):
        mesh = Mesh.open(runtime, MegatronBackendConfig(**layout))
        first = Opened(Path(small), mesh, torch.float32, BUCKET)  # what is set up once is not part of what is measured
        first.load()
        drain(first)
        model = Opened(Path(folder), mesh, torch.float32, BUCKET)
        found[name] = {"shard": sum(p.nbytes for p in model.parameters.values()) / 1e6}
        for what, action in (("load", model.load), ("stream", lambda own=model: drain(own))):
            runtime.barrier()
            with Growth() as growth:
                action()
            found[name][what] = growth.mb
        with Growth() as growth:
            kept = [tensor.clone() for _, tensor in model.directory.stream(model.parameters.__getitem__)]
        found[name]["whole"] = growth.mb
        del kept, model
        mesh.close()
    Path(out, f"memory-{runtime.rank}.json").write_text(json.dumps(found))
