"""backend=megatron before anything is started: what it refuses and what to write instead, its processes, its memory."""

import functools
import re
from pathlib import Path

import pytest
from headers import mixture, write_headers

from twinkle_research.config import compose, megatronchecks, to_object, validate
from twinkle_research.config import plan as planning
from twinkle_research.config.layouts import data_parallel_size, fewest_processes
from twinkle_research.config.plan import RunPlan, print_plan, run_plan
from twinkle_research.config.resume import check_resume
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.errors import ConfigError
from twinkle_research.model.facts import read_facts
from twinkle_research.model.megatron.config import MegatronBackendConfig

WORDS = ["backend=megatron", "model=tiny", "backend.device=cpu", "data.sample_prompts=[]"]


def word(text: str) -> str:
    """``tensor_parallel=2`` is short for ``backend.tensor_parallel=2``."""
    return f"backend.{text}" if text.partition("=")[0] in MegatronBackendConfig.__dataclass_fields__ else text


def refusal(*texts: str, world: WorldInfo | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        run_plan(validate(compose([*WORDS, *map(word, texts)])), world or WorldInfo("plain"))
    return str(refused.value)


@functools.cache
def plan(*texts: str, world: WorldInfo | None = None) -> RunPlan:
    return run_plan(validate(compose([*WORDS, *map(word, texts)])), world or WorldInfo("plain"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """6 experts of 12 columns, 4 heads, 2 layers."""
    return f"model.path={write_headers(tmp_path_factory.mktemp('mixture'), *mixture())}"


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # 4 heads, 2 key-value heads, 384 columns, 4 layers.
        (["tensor_parallel=3"], "=3 must divide the 4 attention heads and the 2 key-value heads of model=tiny; write 2"),
        (["tensor_parallel=4"], "backend.tensor_parallel=4 must divide the 2 key-value heads of model=tiny; write 2"),
        (["tensor_parallel=0"], "'backend.tensor_parallel' must be >= 1, got 0"),
        (["pipeline_parallel=3"], "must divide the 4 layers of model=tiny: the stages are equal; write 2 or 4"),
        (["pipeline_parallel=8"], "the stages are equal; write 4"),
        (["pipeline_parallel=2", "virtual_stages=3"], "2 layers that each of the 2 pipeline stages of model=tiny has; write 2"),
        (["virtual_stages=2"], "backend.pipeline_parallel=1; write backend.virtual_stages=1, or backend.pipeline_parallel=2"),
        (["recompute=full", "recompute_layers=3"], "backend.recompute_layers=3 must divide the 4 layers that a process"),
        (["recompute=full", "recompute_layers=4", "pipeline_parallel=2"], "must divide the 2 layers that a process"),
        (["recompute_layers=2"], "has no effect with backend.recompute=none; write 1, or backend.recompute=full"),
        (["recompute=selective", "recompute_layers=2"], "has no effect with backend.recompute=selective"),
        (["sequence_parallel=true"], "backend.sequence_parallel=true has no effect with backend.tensor_parallel=1"),
        (["overlap_param_gather=true", "distributed_optimizer=true"], "and backend.overlap_grad_reduce=true, without which"),
        (["expert_parallel=2"], "backend.expert_parallel=2 has no effect: model=tiny has no experts; write 1"),
        (["expert_tensor_parallel=1"], "'backend.expert_tensor_parallel' has no effect: model=tiny has no experts; write null"),
        (["overlap_param_gather=true"], "is for training all weights, but adapter=lora; write false"),
        (["transformer_engine=true"], "needs a GPU, but backend.device=cpu; write null"),
        (["transformer_engine=true", "device=auto"], "needs Transformer Engine, which is not installed: pip install"),
        # What works with backend=transformers and not here.
        (["optimizer=muon"], "optimizer=muon needs whole matrices, which backend=megatron cuts; write optimizer=adamw"),
        (["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true"], "optimizer.nesterov=true: Megatron-Core's SGD"),
        (["optimizer=sgd", "distributed_optimizer=true"], "splits the state of Adam only; write optimizer=adamw, or false"),
        (["adapter.dora=true"], "adapter.dora=true reads whole weights, which backend=megatron cuts; write backend=transformers"),
        (["adapter.modules_to_save=[lm_head]"], "adapter.modules_to_save copies whole weights, which backend=megatron cuts"),
        (["adapter.target_modules=[lm_head]"], "names lm_head, which backend=megatron cuts along the vocabulary; write"),
        (["adapter.target_modules=[model.embed_tokens]"], "names model.embed_tokens, which backend=megatron cuts"),
        (["model.attention=sdpa"], "'model.attention' has no effect with backend=megatron"),
        (["checkpoint.background=true"], "checkpoint.background=true copies the whole model, which backend=megatron avoids"),
        (["backend.sharding=ddp"], "'backend.sharding'"),
        (["tensor_paralel=2"], "did you mean 'backend.tensor_parallel'?"),
        # Processes.
        (["tensor_parallel=2", "launch.nproc_per_node=3"], "= 2 x 1 x 1 = 2 must divide the 3 processes; start 2 or 4 of them"),
        (["pipeline_parallel=4", "launch.nproc_per_node=2"], "= 4 must divide the 2 processes; start 4 of them (launch."),
        (["context_parallel=4", "launch.nproc_per_node=7"], "= 4 must divide the 7 processes; start 4 or 8 of them"),
        (
            ["tensor_parallel=2", "launch.nodes=3", "launch.nproc_per_node=3"],
            "must divide the 9 processes; start 2 or 4 of them (launch.nproc_per_node, on each of the 3 machines)",
        ),
        (["tensor_parallel=2", "loss=grpo", "sampler=vllm", "sampler.tensor_parallel=4"], "give launch.nproc_per_node=4"),
    ],
)  # fmt: skip
def test_refused(texts: list[str], expected: str) -> None:
    assert expected in refusal(*texts)


WIDE = ["device=auto", "expert_parallel=6", "pipeline_parallel=2", "expert_tensor_parallel=2"]  # 24 processes


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["expert_parallel=4"], r"backend.expert_parallel=4 must divide the 6 experts of .*; write 3 or 6"),
        (
            ["expert_parallel=3", "launch.nproc_per_node=4"],
            r"= 3 must divide the 4 .* give backend.expert_parallel=2, or start 3 or 6 ",
        ),
        (
            ["expert_tensor_parallel=5"],
            r"divide the 12 columns of each expert of .* backend.expert_tensor_parallel=4 or 6",
        ),
        (  # More processes than a machine has GPUs.
            [*WIDE, "launch.nproc_per_node=8"],
            r"give backend.expert_parallel=2, or start 8 of them on each machine \(launch.nproc_per_node\) with launch.nodes=3$",
        ),
        (
            [*WIDE, "launch.nodes=5", "launch.nproc_per_node=4"],
            r"give backend.expert_parallel=1, or start 4 of them on each machine \(launch.nproc_per_node\) with launch.nodes=6$",
        ),
        (["tensor_parallel=2", "sequence_parallel=false"], "does not train experts, which"),
        # The first layer has no experts, so that its 48 columns count, too.
        (["tensor_parallel=5"], "the 4 attention heads and the 4 key-value heads and the 48 columns of the MLP of"),
    ],
)
def test_refused_of_experts(experts: str, texts: list[str], expected: str) -> None:
    assert re.search(expected, refusal(experts, *texts))


def test_a_model_type_without_counterpart(tmp_path: Path) -> None:
    config, shapes = mixture()
    folder = write_headers(tmp_path, config | {"model_type": "olmoe"}, shapes)
    text = refusal(f"model.path={folder}")
    assert "whose model_type is olmoe; it has deepseek_v2, gemma, gemma2, gemma3_text, granite, llama, mistral, mixtral" in text
    assert "write backend=transformers" in text
    write_headers(tmp_path, config | {"model_type": "qwen3_next"}, shapes)
    assert "whose model_type is qwen3_next (Megatron-Core's gated delta net takes no packed rows" in refusal(
        f"model.path={folder}"
    )


def test_what_latent_attention_and_shared_experts_ask_for(tmp_path: Path) -> None:
    config, shapes = mixture()
    attention, shared = "model.layers.1.self_attn", "model.layers.1.mlp.shared_experts"
    more = {
        f"{attention}.kv_a_proj_with_mqa.weight": (18, 32), f"{attention}.q_a_proj.weight": (16, 32),
        f"{shared}.up_proj.weight": (22, 32),
    }  # fmt: skip
    folder = write_headers(tmp_path, config | {"model_type": "deepseek_v2"}, shapes | more)
    facts = read_facts(folder)
    assert facts.compressed == (("kv_a_proj_with_mqa", 18), ("q_a_proj", 16)) and facts.shared_expert_size == 22
    text = refusal(f"model.path={folder}", "tensor_parallel=4")
    assert "the 22 columns of the shared expert and the 18 rows of kv_a_proj_with_mqa of" in text and "write 2" in text


@pytest.mark.parametrize(
    ("found", "said"),
    [(None, "which is not installed"), ("0.15.3", "but 0.15.3 is installed"), ("0.20.0", "but 0.20.0 is installed")],
)
def test_without_megatron_core(monkeypatch: pytest.MonkeyPatch, found: str | None, said: str) -> None:
    monkeypatch.setattr(megatronchecks, "megatron_version", lambda: found)
    assert f"{said}: pip install -e '.[megatron]'; or write backend=transformers" in refusal()


@pytest.mark.parametrize("found", ["0.16.1", "0.19.2"])
def test_versions_of_megatron_core(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(megatronchecks, "megatron_version", lambda: found)
    validate(compose(WORDS))


# --- the processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "processes", "layout"),
    [
        ([], 1, "one process"),
        (["tensor_parallel=2", "pipeline_parallel=2"], 4, "tensor 2 x pipeline 2 x data 1"),
        (["tensor_parallel=2", "launch.nproc_per_node=8"], 8, "tensor 2 x data 4"),
        (["launch.nproc_per_node=3", "trainer.batch_size=3"], 3, "data 3"),
        (["pipeline_parallel=2", "virtual_stages=2"], 2, "pipeline 2 (2 chunks each) x data 1"),
        (["context_parallel=4"], 4, "context 4 x data 1"),
    ],
)
def test_processes_started_plainly(texts: list[str], processes: int, layout: str) -> None:
    found = plan(*texts)
    assert (found.world_size, found.layout) == (processes, layout)


def test_processes_that_experts_need(experts: str) -> None:
    assert (plan(experts, "expert_parallel=2").world_size, plan(experts, "expert_parallel=2").layout) == (2, "data 2, experts 2")
    both = plan(experts, "tensor_parallel=2", "expert_parallel=3", "expert_tensor_parallel=1")
    assert (both.world_size, both.layout) == (6, "tensor 2 x data 3, experts 3")
    inner = plan(experts, "expert_tensor_parallel=2")
    assert (inner.world_size, inner.layout) == (2, "data 2, experts 1 x tensor 2")


def test_processes_started_by_others() -> None:
    world = WorldInfo("torchrun", rank=0, world_size=8, local_world_size=4, job_key="x")
    assert plan("tensor_parallel=2", world=world).layout == "tensor 2 x data 4 (2 machines x 4)"
    text = refusal("pipeline_parallel=4", world=WorldInfo("torchrun", rank=0, world_size=6, local_world_size=3, job_key="x"))
    assert "= 4 must divide the 6 processes; start 2 or 4 of them (launch.nproc_per_node, on each of the 2 machines)" in text


def test_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "visible_gpus", lambda: 8)
    words = ["backend=megatron", "model=tiny"]

    def processes(*texts: str) -> int:
        return run_plan(to_object(compose([*words, *map(word, texts)])), WorldInfo("plain")).nproc_per_node

    assert processes("tensor_parallel=2") == 8
    assert processes("tensor_parallel=2", "launch.nproc_per_node=2") == 2
    assert processes("tensor_parallel=2", "pipeline_parallel=4") == 8
    with pytest.raises(ConfigError, match=r"needs 16 GPUs, but 8 are visible; lower tensor_parallel"):
        processes("tensor_parallel=4", "pipeline_parallel=4")
    with pytest.raises(ConfigError, match=r"= 3 must divide the 8 processes; start 6 of them"):
        processes("context_parallel=3")


def test_numbers_of_the_layout() -> None:
    layout = MegatronBackendConfig(tensor_parallel=2, pipeline_parallel=2, expert_parallel=3, expert_tensor_parallel=1)
    assert fewest_processes(layout) == 12  # 4 for the dense part, 6 for the experts
    assert data_parallel_size(layout, 12) == 3
    assert fewest_processes(MegatronBackendConfig(tensor_parallel=2, expert_parallel=2)) == 4


def test_the_plan_counts_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four processes work on each share of 4 rows."""
    words = ["tensor_parallel=2", "launch.nproc_per_node=4", "trainer.batch_size=8", "trainer.micro_batch_size=2"]
    print_plan(plan(*words), compose([*WORDS, *map(word, words)]))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "8 rows a step = 2 shares x 4, in 2 micro-batches of 2" in shown
    assert "tensor 2 x data 2 on cpu (megatron backend)" in shown
    assert not plan(*words).warnings
    (note,) = plan("tensor_parallel=2", "launch.nproc_per_node=8", "trainer.batch_size=2").warnings
    assert note == "trainer.batch_size=2 is less than 4 data-parallel shares: 2 of them stay idle"


def test_notes() -> None:
    (note,) = plan("tensor_parallel=2", "distributed_optimizer=true").warnings
    assert "splits nothing here" in note
    (note,) = plan("tensor_parallel=2", "overlap_grad_reduce=true").warnings
    assert "overlaps nothing here" in note
    assert not plan("context_parallel=2", "distributed_optimizer=true", "overlap_grad_reduce=true").warnings
    (note,) = plan("pipeline_parallel=2", "trainer.batch_size=4").warnings
    assert note.startswith("fewer micro-batches than the 2 pipeline stages") and "trainer.micro_batch_size=2" in note
    assert not plan("pipeline_parallel=2", "trainer.batch_size=4", "trainer.micro_batch_size=2").warnings


# --- memory ---------------------------------------------------------------------------------------------------------


def test_one_process_needs_what_it_does_with_transformers() -> None:
    for words in (["adapter=none"], ["model.dtype=bfloat16"], ["adapter=none", "optimizer=sgd", "data.packing=true"]):
        other = run_plan(validate(compose(["backend=transformers", *WORDS[1:], *words])), WorldInfo("plain")).memory
        own = plan(*words).memory
        assert (own.weights, own.gradients, own.optimizer) == (other.weights, other.gradients, other.optimizer)
        if "model.dtype=bfloat16" not in words:  # in which transformers copies the input of each LoRA
            assert own.activations > other.activations  # keys and values are kept for each head


def test_layouts_split_the_memory() -> None:
    whole = plan("adapter=none", "launch.nproc_per_node=2").memory
    tensor = plan("adapter=none", "tensor_parallel=2").memory
    norms = 4 * (2 * 128 + 2 * 32) + 128  # whole on both
    for part, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        assert getattr(tensor, part) == (getattr(whole, part) + size * norms) // 2
    # 4 layers of 128 x 128 (q, o), 64 x 128 (k, v), 384 x 128 (gate, up, down), their norms; one embedding on either stage.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128 + 2 * 128 + 2 * 32
    stages = plan("adapter=none", "pipeline_parallel=2").memory
    assert stages.weights == 4 * (2 * layer + 128 + 512 * 128)
    shared = plan("adapter=none", "distributed_optimizer=true", "launch.nproc_per_node=2").memory
    assert (shared.weights, shared.gradients, shared.optimizer) == (whole.weights, whole.gradients, whole.optimizer // 2)
    context = plan("adapter=none", "distributed_optimizer=true", "context_parallel=2").memory  # all rows, but half of each
    assert context.optimizer == shared.optimizer and context.activations == shared.activations


def test_a_model_to_generate_with_is_whole() -> None:
    def weights(*words: str) -> int:
        config = validate(compose([*WORDS[:3], "backend.tensor_parallel=2", "adapter=none", *words]))
        return run_plan(config, WorldInfo("plain")).memory.sampler.weights

    assert weights("data.sample_prompts=[a]") == weights("loss=grpo", "sampler=transformers") == 4 * plan().parameters
    assert weights("data.sample_prompts=[]") == 0
    # An engine has its own in any case, and several processes may share one.
    assert weights("loss=grpo", "sampler=vllm") == 2 * weights("loss=grpo", "sampler=vllm", "sampler.tensor_parallel=2")


def test_masters_are_split_with_the_optimizer() -> None:
    words = ["adapter=none", "model.dtype=bfloat16", "launch.nproc_per_node=2"]
    parameters = plan().parameters
    assert plan(*words).memory.optimizer == 12 * parameters
    assert plan(*words, "distributed_optimizer=true").memory.optimizer == 12 * (parameters // 2)


def test_activations() -> None:
    ways = [["launch.nproc_per_node=2", "trainer.batch_size=8"], ["tensor_parallel=2", "sequence_parallel=false"]]
    ways.append(["tensor_parallel=2"])
    most, fewer, fewest = (plan(*words).memory.activations for words in ways)
    assert most > fewer > fewest
    once, twice = plan("recompute=full").memory.activations, plan("recompute=full", "recompute_layers=2").memory.activations
    assert once < twice < plan().memory.activations
    # A stage that begins as many micro-batches as there are stages holds as much as one process; interleaved, more.
    words = ["data.max_length=512", "backend.logits_chunk=1", "trainer.micro_batch_size=1"]
    one, two = plan(*words).memory.activations, plan(*words, "pipeline_parallel=2").memory.activations
    assert one == two < plan(*words, "pipeline_parallel=2", "virtual_stages=2").memory.activations


def test_experts_are_split(experts: str) -> None:
    facts = read_facts(experts.partition("=")[2])
    assert (facts.num_experts, facts.experts_per_token, facts.expert_intermediate_size) == (6, 2, 12)
    assert facts.expert_parameters == 6 * 3 * 12 * 32 and facts.has_dense_layers
    words = [experts, "adapter=none"]
    whole, split = plan(*words).memory, plan(*words, "expert_parallel=2").memory
    assert whole.weights == 4 * facts.parameters
    assert whole.weights - split.weights == 4 * facts.expert_parameters // 2
    # Of 6 processes each has 1 expert, and all have the rest.
    many = plan(*words, "expert_parallel=6", "distributed_optimizer=true").memory
    rest = facts.parameters - facts.expert_parameters
    assert many.optimizer == 8 * (rest // 6 + facts.expert_parameters // 6)


# --- continuing -----------------------------------------------------------------------------------------------------


def test_backend_and_layout_may_change() -> None:
    layouts = [["backend=transformers"], ["backend=transformers", "backend.sharding=fsdp2"], ["backend=megatron"]]
    layouts.append(["backend=megatron", "backend.tensor_parallel=2", "backend.distributed_optimizer=true"])
    configs = [to_object(compose(["model=tiny", *words])) for words in layouts]
    for old in configs:
        for new in configs:
            check_resume(old, new)
    with pytest.raises(ConfigError, match="'seed' was 0, is now 1"):
        check_resume(configs[0], to_object(compose(["model=tiny", "backend=megatron", "seed=1"])))


def test_sharded_checkpoints_may_be_written_in_the_background() -> None:
    """Each process copies its own part only."""
    validate(compose([*WORDS, "checkpoint.format=sharded", "checkpoint.background=true"]))
    assert "write false, or checkpoint.format=sharded" in refusal("checkpoint.background=true")
