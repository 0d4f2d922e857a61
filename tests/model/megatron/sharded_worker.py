"""What test_sharded_checkpoint.py compares: the same state written in parts and whole, and read in other layouts (ranks.py)."""

from pathlib import Path

from training_cases import KINDS, LORA, call, everything, same, set_up, step, stored

from twinkle_research.checkpoint.config import CheckpointConfig, CheckpointFormat
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.checkpoint.sharded import ShardedWriter
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.megatron.multi_lora import MultiLoraMegatronModel
from twinkle_research.model.saving import TRAINER_STATE
from twinkle_research.trainer.rundir import RunFolder

TP2, PP2, EP2, ZERO = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}, {"distributed_optimizer": True}
# processes -> layout -> what is trained in it
LAYOUTS = {
    1: {"1": ({}, ("tied",))},
    2: {
        "tp2": (TP2, ("tied", "lora")),
        "pp2": (PP2, ("lora", "companions")),
        "dp2-zero": (ZERO, ("tied",)),
        "ep2": (EP2, ("mixture",)),
    },
    4: {"tp2-dp2-zero": (TP2 | ZERO, ("tied", "lora"))},
}
WRITTEN = [(name, kind) for layouts in LAYOUTS.values() for name, (_, kinds) in layouts.items() for kind in kinds]
OTHERS = [("tp2", TP2), ("pp2", PP2), ("dp2-zero", ZERO)]


def build(folders: Path, kind: str, options: dict, runtime: Runtime) -> MegatronModel:
    layout = MegatronBackendConfig(**options)
    model = MegatronModel(folders / KINDS[kind].model, dtype=KINDS[kind].dtype, seed=3, layout=layout, runtime=runtime)
    return set_up(model, KINDS[kind], accumulation=2)


def save_parts(model: MegatronModel, out: Path, name: str) -> None:
    """As SavingMixin.save, in parts."""
    with ShardedWriter(
        out, name, runtime=model.runtime, step=model.training_state().cur_step, backend=model.backend, layout=model.layout
    ) as writer:
        state = model.save_state(writer)
        progress = {"step": model.training_state().cur_step, "consumed_train_samples": 0}
        writer.add_json(TRAINER_STATE, progress | {"model": state})
    model.runtime.barrier()


def write(folders: Path, out: Path, kind: str, name: str, options: dict, runtime: Runtime) -> None:
    """Two updates and half a window; then what follows from there."""
    model = build(folders, kind, options, runtime)
    for number in range(2):
        step(model, number)
    call(model, 4)
    model.clip_grad_and_step(None)
    model.save(f"{name}-{kind}-whole", str(out), save_optimizer=True)
    save_parts(model, out, f"{name}-{kind}")
    call(model, 5)
    model.clip_grad_and_step(0.5)
    step(model, 3)
    model.save(f"{name}-{kind}-end", str(out), save_optimizer=True)
    model.close()


def read(folders: Path, out: Path, kind: str, written: str, name: str, options: dict, runtime: Runtime) -> None:
    """The bits that were written are there, and are written again. In the same layout training goes on with the same bits."""
    model = build(folders, kind, options, runtime)
    model.resume_from_checkpoint(out / f"{written}-{kind}")
    found, wanted = everything(model), stored(out / f"{written}-{kind}-whole")
    if not runtime.is_main:  # the gradients of an open window are with the one that writes them
        found, wanted = ({n: t for n, t in tensors.items() if not n.startswith("window")} for tensors in (found, wanted))
    assert same(found, wanted), (kind, written, name)
    if written == name:
        call(model, 5)
        model.clip_grad_and_step(0.5)
        step(model, 3)
        found = everything(model)
        assert same(found, stored(out / f"{written}-{kind}-end")), (kind, name)
    model.close()
    if runtime.is_main:
        (out / f"{written}-{kind}-{name}.read").touch()


def several(folder: Path, out: Path, runtime: Runtime) -> None:
    """Two adapters in one checkpoint, written in the background while one of them goes on."""
    models = []
    for _ in range(2):
        model = MultiLoraMegatronModel(folder, layout=MegatronBackendConfig(**TP2), runtime=runtime)
        for name in "ab":
            model.add_adapter_to_model(name, LORA)
            model.set_optimizer("AdamW", adapter_name=name, lr=1e-2)
        models.append(model)
    first, second = models
    for seed, name in enumerate("ab"):
        call(first, seed, adapter_name=name)
        first.clip_grad_and_step(1.0, adapter_name=name)
    settings = CheckpointConfig(format=CheckpointFormat.sharded, background=True)
    manager = CheckpointManager(RunFolder(out / "several"), settings, runtime)
    expected = [everything(first, name) for name in "ab"]
    path = manager.save(1, first, {})
    call(first, 3, adapter_name="a")
    first.clip_grad_and_step(1.0, adapter_name="a")
    manager.wait()
    runtime.barrier()
    reader = CheckpointReader(path)
    second.load_state(reader, reader.json(TRAINER_STATE)["model"])
    assert all(same(everything(second, name), wanted) for name, wanted in zip("ab", expected, strict=True))
    for model in models:
        model.close()


def main(runtime: Runtime, folders: str, out: str, *parts: str) -> None:
    own, where = Path(folders), Path(out)
    if "write" in parts:
        for name, (options, kinds) in LAYOUTS[runtime.world_size].items():
            for kind in kinds:
                write(own, where, kind, name, options, runtime)
        if runtime.world_size == 2:
            several(own / "tied", where, runtime)
    if "read" in parts:
        for kind, written, name, options in readings(runtime.world_size):
            read(own, where, kind, written, name, options, runtime)


def readings(size: int) -> list[tuple[str, str, str, dict]]:
    """(kind, written, read, options): everything is read in its own layout and in one of OTHERS; what trains all weights on four
    processes in each of them, and in one process."""
    found = []
    for number, (written, kind) in enumerate(WRITTEN):
        whole = (written, kind) == ("tp2-dp2-zero", "tied")
        others = [other for other in OTHERS if other[0] != written]
        others = others if whole else [others[number % len(others)]]
        layouts = dict(others if size == 2 else [("1", {})] if size == 1 and whole else [])
        if written in LAYOUTS[size]:
            layouts[written] = LAYOUTS[size][written][0]
        found += [(kind, written, name, options) for name, options in layouts.items()]
    return found
