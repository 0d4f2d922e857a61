"""What processes hold and send in one real step of each layout (see ranks.py), for the plan's formulas to be compared with."""

import json
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from plan_cases import CASES, Case, features
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.transformers import TransformersModel

# c10d's operators: which argument is the tensor that a collective is about, and what it is called in the plan.
OPS = {
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0), "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1), "alltoall_base_": ("all_to_all", 1), "send": ("send", 0),
    "broadcast_": ("broadcast", 0), "allgather_": ("all_gather", 0),
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts the bytes of collectives of more than one process, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname in OPS:
            name, place = OPS[func._opname]
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            if dist.ProcessGroup.unbox(group).size() > 1:
                tensors = args[place] if isinstance(args[place], list) else [args[place]]
                tensors = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
                self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        elif func.namespace == "_c10d_functional" and func._opname == "all_gather_into_tensor":  # of DTensor
            self.bytes["all_gather"] += args[0].numel() * args[0].element_size() * args[1]
        return func(*args, **(kwargs or {}))


def build(case: Case, folder: Path, runtime: Runtime) -> MegatronModel | TransformersModel:
    if case.megatron:
        options = dict(case.options)
        if "recompute" in options:
            options["recompute"] = Recompute(options["recompute"])
        model = MegatronModel(folder, dtype=case.dtype, layout=MegatronBackendConfig(**options), runtime=runtime)
    else:
        model = TransformersModel(folder, dtype=case.dtype, runtime=runtime, **case.options)
    if case.lora:
        model.add_adapter_to_model("a", LoraAdapterConfig(r=case.lora))
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_processor("InputProcessor", micro_batch_size=case.micro)
    return model


def step(model: MegatronModel | TransformersModel, case: Case) -> None:
    rank, size = model.data_parallel
    model.forward_backward(features(case)[rank::size], normalizer=1.0)
    model.clip_grad_and_step()


def held(model: MegatronModel | TransformersModel) -> dict[str, int]:
    """Bytes of what stays between steps; of gradients what sums them."""
    training = model.training_state()
    sums = training.gradients.tensors()
    if isinstance(model, MegatronModel):
        parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    else:
        parameters = [getattr(p, "to_local", lambda p=p: p)() for p in model.module.parameters()]
    state = {}
    optimizer = training.optimizer
    if isinstance(model, MegatronModel):
        for parameter, own in optimizer._updated.items():
            tensors = [own.optimizer.state[own.master][key] for key in ("exp_avg", "exp_avg_sq")]
            master = own.master.dtype != parameter.dtype
            state[id(parameter)] = sum(t.numel() * 4 for t in tensors) + (own.master.numel() * 4 if master else 0)
    else:
        for name, parameter in training.parameters.items():
            tensors = [optimizer.tensor(name, slot) for slot in optimizer.slots(name)]
            state[name] = sum(t.nbytes for t in tensors if t.data_ptr() != parameter.data_ptr())  # its own master, sharded
    return {
        "weights": sum(p.nbytes for p in parameters), "gradients": sum(t.nbytes for t in sums.values()),
        "optimizer": sum(state.values()),
    }  # fmt: skip


def main(runtime: Runtime, folders: str, out: str) -> None:
    for name, case in CASES.items():
        if case.processes != runtime.world_size:
            continue
        model = build(case, Path(folders) / case.model, runtime)
        step(model, case)
        traffic, pushed = Traffic(), Traffic()
        with traffic:
            step(model, case)
        with pushed:
            for _ in model.named_weights():
                pass
        found = {"held": held(model), "sent": traffic.bytes, "pushed": pushed.bytes}
        Path(out, f"{name}-{runtime.rank}.json").write_text(json.dumps(found))
        if case.megatron:
            model.close()
