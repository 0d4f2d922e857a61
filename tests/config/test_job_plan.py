"""The plan of a job on GPUs that are not here: hand-derived numbers, what it refuses and what it proposes instead."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpujobs import FULL, H100, SAMPLED, config, plan, proposed, refusal
from omegaconf import OmegaConf

from twinkle_research.config import compose, validate
from twinkle_research.config.jobplan.fit import fits
from twinkle_research.config.jobplan.flow import Flow, Group
from twinkle_research.config.jobplan.hardware import hardware_of
from twinkle_research.config.jobplan.memory import estimate
from twinkle_research.config.jobplan.step import idle_share, step_flops, step_time
from twinkle_research.config.jobplan.traffic import flows
from twinkle_research.config.jobplan.workload import workload
from twinkle_research.config.plan import print_plan
from twinkle_research.config.schema import config_dir, options
from twinkle_research.distributed.gpus import GIB, GPUS
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import ArchitectureConfig
from twinkle_research.model.facts import read_facts
from twinkle_research.sampler.kv_cache import bytes_per_token
from twinkle_research.trainer.config import Gpu


def total(words: list[str], world_size: int, kind: str, op: str) -> float:
    facts = plan(*words).facts
    found = flows(config(*words), facts, world_size, 8)
    return sum(flow.size for flow in found if (flow.kind, flow.op) == (kind, op))


# --- the models -----------------------------------------------------------------------------------------------------

# Public parameter counts, of the model cards and of the hub's safetensors headers.
PUBLISHED = {
    "qwen3_0_6b": 596_049_920, "qwen3_1_7b": 1_720_574_976, "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264, "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560, "qwen2_5_7b": 7_615_616_512, "qwen2_5_72b": 72_706_203_648,
    "llama3_2_1b": 1_235_814_400, "llama3_1_8b": 8_030_261_248, "llama3_1_70b": 70_553_706_496, "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
}  # fmt: skip


def architecture(name: str) -> ArchitectureConfig:
    return ArchitectureConfig(**OmegaConf.load(config_dir() / "model" / f"{name}.yaml").architecture)


def test_parameters_of_the_models_on_the_hub() -> None:
    of_hub = {name for name in options("model") if OmegaConf.load(config_dir() / "model" / f"{name}.yaml").hub_id}
    assert of_hub == set(PUBLISHED)
    assert {name: read_facts(architecture(name)).parameters for name in of_hub} == PUBLISHED


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_facts_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    a = architecture(name)
    mixture = {} if not a.num_experts else {
        "num_experts": a.num_experts, "num_local_experts": a.num_experts, "num_experts_per_tok": a.experts_per_token,
        "moe_intermediate_size": a.expert_intermediate_size,
    }  # fmt: skip
    made = CONFIG_MAPPING[a.model_type](
        vocab_size=a.vocab_size, hidden_size=a.hidden_size, intermediate_size=a.intermediate_size, head_dim=a.head_dim,
        num_hidden_layers=a.num_layers, num_attention_heads=a.num_heads, num_key_value_heads=a.num_kv_heads,
        tie_word_embeddings=a.tied_embeddings, max_position_embeddings=a.max_positions, **mixture,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    facts = read_facts(a)
    assert sum(p.numel() for p in model.parameters()) == facts.parameters
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert experts == facts.expert_parameters
    assert made.head_dim == a.head_dim and bool(made.tie_word_embeddings) == a.tied_embeddings


def test_what_an_option_stands_for_cannot_be_changed() -> None:
    with pytest.raises(ConfigError, match="'model.hub_id' cannot be set: it says what model=qwen3_8b is; for another model give"):
        validate(compose(["model=qwen3_8b", "model.hub_id=a/b"]))
    with pytest.raises(ConfigError, match="'model.architecture' cannot be set"):
        validate(compose(["model=qwen3_8b", "model.architecture.num_layers=35"]))
    assert validate(compose(["model=qwen3_8b", "model.revision=main"])).model.revision == "main"


# --- numbers derived by hand ----------------------------------------------------------------------------------------


def test_a_dense_model_by_hand() -> None:
    """Qwen3-8B on 16 x 8 GPUs, tensor 2 x data 64."""
    words = [*FULL, "model=qwen3_8b", H100, "launch.nodes=16", "backend.tensor_parallel=2", "data.max_length=4096"]
    words += ["trainer.batch_size=128", "trainer.micro_batch_size=1"]
    found = plan(*words).memory
    # A layer's matrices: q and o 4096 x 4096, k and v 1024 x 4096, three of 12288 x 4096. Its norms are whole on both.
    cut = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096
    held = 36 * (cut // 2 + 2 * 4096 + 2 * 128) + 2 * (151936 // 2) * 4096 + 4096
    assert held == 4_095_521_792
    assert (found.weights, found.gradients, found.optimizer) == (2 * held, 4 * held, 12 * (held // 64))
    # Gradients are float32, weights bfloat16; the 64 copies are 4 on each of 16 machines.
    moved = [flow for flow in flows(config(*words), plan(*words).facts, 128, 8) if flow.kind == "data"]
    assert [(flow.op, flow.size) for flow in moved] == [("reduce_scatter", 4 * held), ("all_gather", 2 * held)]
    assert (moved[0].group.here, moved[0].group.machines) == (4, 16)
    assert moved[0].node == 4 * held * 3 / 4 and moved[0].network == 4 * held * 15 / 16 / 4
    # Hidden states of 2 rows of 4,096 tokens. A layer gathers them twice forward, twice backward, and twice again for the
    # gradients of its matrices; it scatters twice in each direction. Once more each at either end of the model.
    states = 2 * 2 * 4096 * 4096
    assert total(words, 128, "tensor", "all_gather") == (6 * 36 + 2) * states
    assert total(words, 128, "tensor", "reduce_scatter") == (4 * 36 + 2) * states
    # 6 operations a parameter and token but for the embedding; q k' and its product with v on half of the length.
    matrices, tokens = 8_190_735_360 - 2 * 151936 * 4096, 4096
    forward = 2 * matrices * tokens + 36 * 2 * 4096 * tokens**2 + 2 * 151936 * 4096 * tokens
    assert step_flops(config(*words), plan(*words).facts, workload(config(*words), 128)) == 3 * 128 * forward
    # What a layer keeps of a token: 5 MLP widths of its half, 16 bytes of a hidden state's half, for each of 16 heads 4 x 128
    # numbers and their output, cosines and sines, normed queries and keys, and what norms and the softmax need.
    layer = 2 * 5 * 6144 + 16 * 2048 + 4 + 2 * (5 * 2048 + 4 * 128) + 6 * (2048 + 512) + 4 * (16 + 4) + 4 * 16
    head = 6 * 512 * 75968 + 6 * 75968 * 4096
    assert found.activations == 4096 * (36 * layer + 4 * 2 * 2048) + head


def test_a_mixture_by_hand() -> None:
    """Qwen3-30B-A3B on 8 x 8 GPUs, pipeline 2 x data 32, 8 experts on each."""
    words = [*FULL, "model=qwen3_30b_a3b", "launch.gpu=h200_141gb", "launch.nodes=8", "data.max_length=2048"]
    words += ["backend.pipeline_parallel=2", "backend.expert_parallel=16", "trainer.batch_size=256", "trainer.micro_batch_size=1"]
    found = plan(*words).memory
    attention = 2 * 4096 * 2048 + 2 * 512 * 2048 + 2 * 2048 + 2 * 128
    dense = 24 * (attention + 128 * 2048) + 151936 * 2048 + 2048  # with routers, projection and final norm
    experts = 24 * 8 * 3 * 768 * 2048
    assert (dense, experts) == (770_547_712, 905_969_664)
    assert found.weights == 2 * (dense + experts)
    assert found.optimizer == 12 * (dense // 32 + experts // 2)  # 32 processes have the same layers, 2 the same experts
    # 8 rows of 2,048 tokens, each to 8 experts and back, forward and backward, in 24 layers; weights in float32 with them.
    routed = 8 * 2048 * 8 * 24
    assert total(words, 64, "expert", "all_to_all") == 2 * routed * (2 * 2 * 2048 + 4)
    moved = {flow.kind: flow for flow in flows(config(*words), plan(*words).facts, 64, 8)}
    assert (moved["expert"].group.here, moved["expert"].group.machines) == (8, 2)  # 16 processes side by side
    assert moved["expert"].network == moved["expert"].size / 2
    assert moved["pipeline"].size == 2 * 8 * 2048 * 2048 and moved["pipeline"].node == 0  # the other stage is 4 machines away
    assert idle_share(config(*words), workload(config(*words), 64)) == 1 / 9  # 8 micro-batches through 2 stages


def test_an_engine_by_hand() -> None:
    """Qwen3-8B: keys and values of 36 layers of 8 heads of 128 in bfloat16."""
    facts = plan("model=qwen3_8b", H100).facts
    assert bytes_per_token(facts, 2) == 2 * 36 * 8 * 128 * 2 == 147_456
    assert bytes_per_token(facts, 2, 16) == 147_456 // 8  # each process has one head at least
    words = ["model=qwen3_8b", "launch.gpu=h200_141gb", *SAMPLED, "adapter=lora", "trainer.batch_size=64"]
    words += ["rollout.num_generations=8", "trainer.micro_batch_size=1", "sampler.enforce_eager=true"]
    found = plan(*words).memory
    assert found.sampler.weights == 2 * facts.parameters
    room = int(0.3 * 139 * GIB)
    assert found.sampler.weights + found.sampler.cache + found.sampler.workspace == room
    assert found.sampler.wanted == 64 * 4096  # a GPU's completions, prompts included
    assert found.sampling == found.weights + found.optimizer + room + found.runtime  # gradients come with the first pass
    asleep = plan(*words, "sampler.sleep=none").memory
    assert asleep.training - found.training == room - found.sampler.asleep
    assert plan(*words, "sampler.kv_cache_gib=4").memory.sampler.cache == 4 * GIB


def test_copies_that_algorithms_keep() -> None:
    words = ["model=qwen3_0_6b", H100, *SAMPLED, "trainer.batch_size=64", "trainer.micro_batch_size=1"]
    parameters = plan(*words).facts.parameters
    for backend in ("transformers", "megatron"):
        base = plan(*words, f"backend={backend}", "adapter=none").memory
        copied = plan(*words, f"backend={backend}", "adapter=none", "loss.beta=0.1").memory
        assert (base.reference, copied.reference) == (0, 2 * parameters)
        assert copied.training - base.training == copied.sampling - base.sampling == 2 * parameters
        assert (
            plan(*words, f"backend={backend}", "loss.beta=0.1", "adapter=lora").memory.reference == 0
        )  # the model without its adapter
    critic = plan("loss=ppo", *words[:2], *words[3:], "adapter=none").memory
    alone = plan(*words, "adapter=none").memory
    assert critic.optimizer - alone.optimizer == 8 * (1024 + 1) and critic.gradients - alone.gradients == 4 * (1024 + 1)


def test_a_reference_of_pairs(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    words = ["model=qwen3_0_6b", H100, "loss=dpo", f"data.path={rows}", "adapter=none", "trainer.batch_size=8"]
    assert plan(*words).memory.reference == 2 * plan(*words).parameters
    assert plan(*words, "loss.reference_free=true").memory.reference == 0
    work = workload(config(*words), 8)
    assert work.scored == 1 and work.unit_tokens == 2 * config(*words).data.max_length


# --- groups on machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "here", "machines"),
    [
        (Group(8, 1, 8), 8, 1),
        (Group(16, 1, 8), 8, 2),
        (Group(16, 2, 8), 4, 4),
        (Group(4, 8, 8), 1, 4),
        (Group(2, 4, 8), 2, 1),
        # Of 8 groups of 5 one has its first member alone on a machine; of those of 12 each has 4 somewhere.
        (Group(5, 1, 8), 1, 2),
        (Group(12, 1, 8), 4, 2),
        (Group(6, 1, 6), 6, 1),
        (Group(2, 3, 8), 1, 2),
    ],
)
def test_where_a_group_lies(group: Group, here: int, machines: int) -> None:
    assert (group.here, group.machines) == (here, machines)


def test_bytes_of_a_collective() -> None:
    """Of 16 processes on 2 machines: an all-gather of n bytes brings n / 2 to each machine, through 8 adapters."""
    group, n = Group(16, 1, 8), 1600.0
    gather, reduce = (Flow("data", op, n, group) for op in ("all_gather", "all_reduce"))
    assert (gather.node, gather.network) == (n * 7 / 8, n / 2 / 8)
    assert (reduce.node, reduce.network) == (2 * gather.node, 2 * gather.network)
    dealt = Flow("expert", "all_to_all", n, group)
    assert (dealt.node, dealt.network) == (n * 7 / 16, n * 8 / 16)
    assert gather.seconds(GPUS["h100_80gb"]) == n * 7 / 8 / 450e9 + n / 16 / 50e9


# --- planning for GPUs that are not here ----------------------------------------------------------------------------


def test_a_dry_run_plans_for_many_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FULL, *SAMPLED, "model=qwen3_8b", H100, "launch.nodes=16", "backend.tensor_parallel=2", "trainer.batch_size=512"]
    words.append("trainer.micro_batch_size=1")
    found = plan(*words)
    assert (found.nodes, found.nproc_per_node, found.world_size, found.device) == (16, 8, 128, "cuda")
    print_plan(found, config(*words))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in ("job plan, 128 GPUs (H100)", "GiB of 79 a process while it trains: weights 7.63, gradients 15.26", "KV cache",
                 "4,096 rows of 4,096: a prompt of 1,024, a completion of 3,072", "tensor parallel", "weights to the sampler",
                 "between machines", "at least"):  # fmt: skip
        assert text in shown, text
    other = plan("model=tiny", "launch.nodes=2", "launch.nproc_per_node=3", "trainer.batch_size=6")
    assert (other.world_size, other.device, other.hardware) == (6, "cpu", None)
    assert plan("model=tiny", "launch.nodes=4", "backend=megatron", "backend.tensor_parallel=2").world_size == 4
    assert plan("model=tiny", "backend.device=cuda", "launch.nodes=2").world_size == 16


def test_a_real_start_needs_the_machines() -> None:
    real = ["model=tiny", "dry_run=false"]
    text = refusal(*real, "launch.nodes=16")
    assert "sbatch --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 slurm/train.sbatch" in text and "dry_run=true" in text
    assert "none is visible here; add dry_run=true to see the plan" in refusal(*real, H100)
    assert "no GPU is visible here" in refusal(*real, "backend.device=cuda")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([H100, "backend.device=cpu"], "launch.gpu=h100_80gb has no effect with backend.device=cpu"),
        (["launch.gpu_memory_gib=40"], "'launch.gpu_memory_gib' has no effect without launch.gpu"),
        (["launch.network_gbytes=25"], "'launch.network_gbytes' has no effect without launch.gpu"),
        (
            [H100, "launch.nproc_per_node=12"],
            "=12 is more than the 8 GPUs of a machine (h100_80gb); write 8 (with launch.nodes=2",
        ),
        (["launch.gpu=h100"], "did you mean 'h100_80gb'?"),
        ([H100, "launch.node_gbytes=0"], "'launch.node_gbytes' must be > 0"),
        (["launch.nodes=100000000"], "'launch.nodes' must be in [1, 100000], got 100000000"),
    ],
)
def test_refused_settings(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        validate(compose(["model=tiny", "dry_run=true", *words]))


def test_more_processes_than_seem_meant() -> None:
    """Only a note, where nothing says how many GPUs or cores there will be."""
    many = plan("model=tiny", "backend.device=cuda", "launch.nodes=2", "launch.nproc_per_node=12", "trainer.batch_size=24")
    assert many.warnings == ("launch.nproc_per_node=12 is more than the 8 GPUs that a machine usually has",)
    cores = len(os.sched_getaffinity(0))
    for number, noted in ((4 * cores, False), (4 * cores + 1, True)):
        words = ["model=tiny", "backend.device=cpu", f"launch.nproc_per_node={number}", f"trainer.batch_size={number}"]
        assert any("they wait for each other" in note for note in plan(*words).warnings) == noted


def test_settings_correct_what_is_known() -> None:
    launch = config("model=tiny", H100, "launch.gpu_memory_gib=40", "launch.network_gbytes=12.5").launch
    known, own = GPUS["h100_80gb"], hardware_of(launch)
    assert (own.memory, own.network, own.node, own.flops) == (40 * GIB, 12.5e9, known.node, known.flops)
    assert {gpu.value for gpu in Gpu} == set(GPUS)


# --- all sizes --------------------------------------------------------------------------------------------------------

SIZES = ("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "llama3_1_70b", "qwen3_235b_a22b")


@pytest.mark.long
@pytest.mark.parametrize("gpus", [8, 512, 4096])
def test_plans_for_all_sizes(gpus: int) -> None:
    """What is proposed fits, and all its numbers are there."""
    for name in SIZES:
        words = [f"model={name}", *FULL, H100, f"launch.nodes={gpus // 8}", f"trainer.batch_size={gpus * 2}"]
        words.append("data.max_length=4096")
        try:
            found, own = plan(*words), config(*words)
        except ConfigError as error:
            changes = proposed(str(error))
            keys = {change.partition("=")[0] for change in changes}
            words = [*(word for word in words if word.partition("=")[0] not in keys), *changes]
            found, own = plan(*words), config(*words)
        assert fits(found.memory, own, found.hardware)
        work, moved = workload(own, found.world_size), flows(own, found.facts, found.world_size, 8)
        time = step_time(own, found.facts, work, found.memory, moved, found.world_size, found.hardware)
        assert time.compute > 0 and time.communication > 0 and work.tokens == gpus * 2 * 4096


def test_a_large_plan_needs_no_torch() -> None:
    code = """
import sys
from twinkle_research.config.cli import main
words = ["dry_run=true", "model=qwen3_235b_a22b", "backend=megatron", "launch.nodes=512", "launch.gpu=h200_141gb"]
words += ["backend.tensor_parallel=4", "backend.expert_parallel=32", "backend.distributed_optimizer=true", "adapter=none"]
assert main([*words, "trainer.batch_size=4096", "trainer.micro_batch_size=1", "data.sample_prompts=[]"]) == 0
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "job plan, 4,096 GPUs (H200)" in done.stdout


def test_more_machines_split_more() -> None:
    """What data parallelism splits becomes less, what it does not stays; no number depends on where processes lie."""
    words = [*FULL, "model=qwen3_8b", "launch.gpu=h200_141gb", "trainer.micro_batch_size=1", "data.max_length=2048"]
    few, many = (plan(*words, f"launch.nodes={n}", f"trainer.batch_size={8 * n}").memory for n in (2, 16))
    assert few.weights == many.weights and few.activations == many.activations and few.optimizer > 7 * many.optimizer
    facts, own = (
        plan(*words, "launch.nodes=2", "trainer.batch_size=16").facts,
        config(*words, "launch.nodes=2", "trainer.batch_size=16"),
    )
    assert estimate(own, facts, 16, hardware_of(own.launch), on_cpu=False) == few


@pytest.fixture(scope="module")
def job_plans(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("job_plans", root / "benchmarks" / "job_plans.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_plans_are_current(job_plans: Any) -> None:
    """Some rows; all of them in the test below."""
    written = job_plans.OUT.read_text()
    for model, gpus in (("qwen3_0_6b", 8), ("qwen3_8b", 4096), ("qwen3_235b_a22b", 512)):
        assert job_plans.row(job_plans.plan(model, gpus)) in written, "run python benchmarks/job_plans.py"


@pytest.mark.long
def test_all_committed_plans_are_current(job_plans: Any) -> None:
    assert job_plans.document() == job_plans.OUT.read_text(), "run python benchmarks/job_plans.py"


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_0_6b", "llama3_1_70b", "qwen3_30b_a3b"])
@pytest.mark.parametrize("together", [1, 4])
def test_a_tokens_cache_is_what_vllm_reckons(name: str, together: int) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    facts, block = read_facts(architecture(name)), 16
    heads = max(1, facts.num_kv_heads // together)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=facts.head_dim, dtype=torch.bfloat16)
    assert facts.num_layers * spec.page_size_bytes == block * bytes_per_token(facts, 2, together)
