"""Settings that exclude or need each other, that have no effect, or that do not fit files, model and machine."""

import functools
from pathlib import Path

import pytest

from twinkle_research.config import compose, to_object, validate
from twinkle_research.config.plan import RunPlan, print_plan, run_plan
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.errors import ConfigError


def refusal(*words: str, world: WorldInfo | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        run_plan(validate(compose(["model=tiny", "backend.device=cpu", *words])), world or WorldInfo("plain"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data=jsonl"], "data=jsonl needs rows"),
        (["model=hf"], "model=hf has no model of its own"),
        (["model.revision=main"], "'model.revision' has no effect without model.path"),
        (["model.trust_remote_code=true"], "'model.trust_remote_code' has no effect"),
        (["model.attention=flash"], "needs a GPU"),
        (["model.architecture.num_layers=2"], "'model.architecture' cannot be set"),
        (["model.source=smollm2_135m"], "'model.source' cannot be set"),
        (["adapter.modules_to_save=[q_proj]", "adapter.target_modules=[q_proj]"], "q_proj cannot be in both"),
        (["optimizer=sgd", "optimizer.nesterov=true"], "needs optimizer.momentum > 0"),
        (["optimizer=muon", "optimizer.momentum=0"], "needs optimizer.momentum > 0"),
        (["scheduler.warmup_steps=11", "trainer.max_steps=10"], "longer than trainer.max_steps=10"),
        (["scheduler=wsd", "scheduler.decay_steps=8", "scheduler.warmup_steps=3", "trainer.max_steps=10"], "= 11 is longer"),
        (["scheduler=linear", "scheduler.total_steps=5", "scheduler.warmup_steps=6"], "longer than scheduler.total_steps=5"),
        (["data.subset=en"], "'data.subset' has no effect"),
        (["data.split=test"], "'data.split' has no effect"),
        (["data.processor=SelfCognitionProcesor"], "did you mean 'SelfCognitionProcessor'?"),
        (["+data.processor_args.modle_name=x"], "did you mean 'model_name'?"),
        (["data.template=Templat"], "did you mean 'Template'?"),
        (["data.processor=null"], "'data.processor_args' has no effect"),
        (["data.sample_prompts=[]", "trainer.eval_every=5"], "'trainer.eval_every' has no effect"),
        (["data.eval_rows=5", "data.limit=5"], "leaves no row to train on"),
        (["data.sample_prompts=[]", "trainer.sample_max_tokens=8"], "'trainer.sample_max_tokens' has no effect"),
        (["tracking.wandb.mode=disabled", "tracking.wandb.tags=[a]"], "'tracking.wandb.tags' has no effect"),
        (["tracking.wandb.mode=online"], "needs an API key"),
        (["eval_only=true"], "eval_only=true needs a checkpoint"),
        (["eval_only=true", "resume=never", "run_dir=x"], "resume=never contradicts"),
        (["backend.sharding=none", "launch.nproc_per_node=2"], "backend.sharding=none runs in one process"),
        (["backend.sharding=fsdp2"], "give launch.nproc_per_node=2"),
        (["backend.sharding=fsdp2", "optimizer=muon", "adapter=none"], "optimizer=muon needs whole matrices"),
        (["backend.sharding=fsdp2", "adapter.dora=true"], "adapter.dora=true reads whole weights"),
        (["backend.sharding=fsdp2", "adapter.modules_to_save=[lm_head]"], "adapter.modules_to_save copies whole weights"),
        (["backend.sharding=fsdp2", "checkpoint.background=true"], "checkpoint.background=true copies the whole model"),
        (
            ["checkpoint.format=sharded"],
            "checkpoint.format=sharded is for backend=megatron, whose processes have parts of tensors; write consolidated",
        ),
        (["launch.nodes=2"], "needs torchrun or srun"),
        (["resume=nevr"], "did you mean 'never'?"),
        (["resume=no/such/folder"], "there is no such folder"),
        (["data.max_length=4096"], "more than the 1024 positions of model=tiny"),
        (["model.path=./no/such/folder"], "no such folder"),
        (["run_dir=' '"], "'run_dir' is empty"),
        (["resume="], "'resume' is empty"),
        (["data.path="], "'data.path' is empty"),
        (["data.eval_path="], "'data.eval_path' is empty"),
        (["model.path="], "'model.path' is empty"),
        (["resume=foo"], "there is no such folder. It must be auto"),
        (["adapter.target_modules=[all-linear,q_proj]"], "all-linear stands alone"),
        (["adapter.modules_to_save=[all-linear]"], "all-linear is a value of adapter.target_modules only"),
        (["adapter.target_modules=[lm_head]"], "lm_head and model.embed_tokens share one weight in this model"),
        (["adapter.target_modules=[embed_tokens]"], "train them in full with adapter.modules_to_save=[embed_tokens]"),
    ],
)
def test_refused(words: list[str], expected: str) -> None:
    assert expected in refusal(*words)


def test_a_module_to_save_is_no_group_of_modules() -> None:
    message = refusal("adapter.modules_to_save=[nonsense]")
    assert "valid: " in message and "lm_head" in message and "all-linear" not in message
    assert "all-linear" in refusal("adapter.target_modules=[nonsense]")


def test_data_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "rows.xls").write_text("")
    (tmp_path / "empty").mkdir()
    assert f"did you mean '{tmp_path}/rows.jsonl'?" in refusal("data=jsonl", f"data.path={tmp_path}/row.jsonl")
    assert "unknown file type '.xls'" in refusal("data=jsonl", f"data.path={tmp_path}/rows.xls")
    assert "no data files in the folder" in refusal("data=jsonl", f"data.path={tmp_path}/empty")
    assert "data.eval_path" in refusal(f"data.eval_path={tmp_path}/none.jsonl")
    assert "not both" in refusal(f"data.eval_path={tmp_path}/rows.jsonl", "data.eval_rows=1")
    validate(compose(["data=jsonl", f"data.path={tmp_path}/rows.jsonl", f"data.eval_path={tmp_path}"]))


def test_a_peft_folder_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "PEFT adapter" in refusal(f"model.path={tmp_path}")


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer=muon"],  # LoRA's matrices are two-dimensional
        ["adapter.target_modules=[q_proj,layers.0.mlp.up_proj]"],
        ["adapter.modules_to_save=[lm_head]", "adapter.target_modules=[k_proj]"],
        ["scheduler=wsd", "scheduler.decay_steps=8", "trainer.max_steps=8"],
        ["trainer.eval_every=null"],
        ["resume=never"],
        ["launch.nproc_per_node=2", "backend.sharding=auto"],
    ],
)
def test_allowed(words: list[str]) -> None:
    validate(compose(["model=tiny", *words]))


# --- the plan -------------------------------------------------------------------------------------------------------


@functools.cache
def plan(*words: str, world: WorldInfo | None = None) -> RunPlan:
    return run_plan(validate(compose(["model=tiny", "backend.device=cpu", *words])), world or WorldInfo("plain"))


def test_processes_started_plainly() -> None:
    assert (plan().world_size, plan().nproc_per_node, plan().layout) == (1, 1, "one process")
    assert plan("backend.sharding=ddp").world_size == 1  # on a CPU only what is asked for
    two = plan("launch.nproc_per_node=2")
    assert (two.world_size, two.nodes, two.device) == (2, 1, "cpu")
    assert "data-parallel over 2 processes" in two.layout
    sharded = plan("launch.nproc_per_node=2", "backend.sharding=fsdp2", "adapter=none")
    assert "the model sharded, over 2 processes" in sharded.layout
    whole = plan("launch.nproc_per_node=2", "adapter=none")
    assert (sharded.memory.gradients, sharded.memory.optimizer) == (whole.memory.gradients // 2, whole.memory.optimizer // 2)


def test_processes_started_by_others() -> None:
    world = WorldInfo("torchrun", rank=0, world_size=4, local_world_size=2, job_key="x")
    assert (plan(world=world).nodes, plan(world=world).nproc_per_node, plan(world=world).world_size) == (2, 2, 4)
    assert plan("launch.nproc_per_node=2", "launch.nodes=2", world=world).world_size == 4
    assert "contradict torchrun" in refusal("launch.nproc_per_node=3", world=world)
    assert "backend.sharding=none" in refusal("backend.sharding=none", world=world)


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_research.config import plan as module

    monkeypatch.setattr(module, "version", lambda name: "2.13.0")
    monkeypatch.setattr(module.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(4)])
    for value, count in ((None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("MIG-a,MIG-b", 2)):
        if value is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert module.visible_gpus() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    config = to_object(compose(["model=tiny", "backend.sharding=ddp"]))
    assert module.run_plan(config, WorldInfo("plain")).nproc_per_node == 4
    config.launch.nproc_per_node = 5
    with pytest.raises(ConfigError, match="needs as many GPUs, but 4 are visible"):
        module.run_plan(config, WorldInfo("plain"))
    monkeypatch.setattr(module, "version", lambda name: "2.13.0+cpu")
    assert module.visible_gpus() == 0
    config = to_object(compose(["backend.device=cuda"]))
    with pytest.raises(ConfigError, match="no GPU is visible"):
        module.run_plan(config, WorldInfo("plain"))


def test_parameters() -> None:
    assert plan("adapter=none").trainable == plan().parameters
    # q, o: 128 -> 128; k, v: 128 -> 64; gate, up: 128 -> 384; down: 384 -> 128; 4 layers.
    per_rank = 4 * (2 * 256 + 2 * 192 + 3 * 512)
    assert plan("adapter.r=1").trainable == per_rank
    assert plan("adapter.r=8").trainable == 8 * per_rank
    smollm = run_plan(to_object(compose(["backend.device=cpu"])), WorldInfo("plain"))
    assert smollm.parameters == 134_515_008


def test_memory_grows_with_what_needs_it() -> None:
    base = plan().memory.total
    assert plan("trainer.micro_batch_size=2").memory.total < base
    assert plan("backend.gradient_checkpointing=true").memory.total < base
    assert plan("adapter=none").memory.optimizer == 8 * plan().parameters
    assert plan("adapter=none", "optimizer=sgd").memory.optimizer == 0


def test_packed_rows_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.max_length=100", "data.packing=true"]
    print_plan(plan(*words), compose(["model=tiny", *words]))
    assert "packed into rows of at most 400 tokens" in capsys.readouterr().out
    assert plan(*words).memory == plan("data.max_length=100", "trainer.micro_batch_tokens=400").memory


def test_notes() -> None:
    assert any("stay idle" in note for note in plan("launch.nproc_per_node=8").warnings)
    assert any("does not divide" in note for note in plan("launch.nproc_per_node=3").warnings)
    assert not plan().warnings
    unknown = run_plan(validate(compose(["model=hf", "model.path=some-one/some-model"])), WorldInfo("plain"))
    assert unknown.parameters is None and "not in the local cache" in unknown.warnings[0]
