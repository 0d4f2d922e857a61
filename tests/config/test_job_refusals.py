"""Jobs that do not fit their GPUs: what is said, and that what is proposed instead is accepted."""

import pytest
from gpujobs import FULL, H100, SAMPLED, plan, proposed, refusal


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # The optimizer of 8 billion parameters is 92 GiB.
        (["model=qwen3_8b", "backend=megatron", "adapter=none"], ["backend.distributed_optimizer=true"]),
        (["model=qwen3_8b", *FULL, "data.max_length=8192"], ["trainer.micro_batch_size=2"]),
        (
            ["model=qwen3_32b", "adapter=none", "launch.nodes=2"],
            ["trainer.micro_batch_size=1", "backend.sharding=fsdp2"],
        ),
        (["model=qwen3_14b", *SAMPLED, "adapter=lora", "trainer.micro_batch_size=1"], ["sampler.tensor_parallel=2"]),
        (["model=qwen3_235b_a22b", *FULL], ["launch.nodes"]),
        # Answers to sample prompts are drawn from a whole copy of the model.
        (["model=qwen3_32b", "backend=megatron", "launch.nodes=4", "data.sample_prompts=[Hello]"], ["data.sample_prompts=[]"]),
        (["model=qwen3_30b_a3b", *FULL, *SAMPLED, "launch.nodes=8"], ["backend.expert_parallel"]),
    ],
)
def test_what_cannot_fit_is_refused_with_what_can(words: list[str], expected: list[str]) -> None:
    """And that is accepted."""
    words = [*words, H100, "trainer.batch_size=512"]
    text = refusal(*words)
    assert "GPU that has 79 (H100)" in text or "79 GiB (H100) has room for" in text
    changes = proposed(text)
    assert all(any(change.startswith(want) for change in changes) for want in expected), text
    keys = {change.partition("=")[0] for change in changes}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    found = plan(*kept, *changes)
    assert found.memory.total <= found.hardware.memory


def test_a_proposed_backend_names_the_settings_that_it_lacks() -> None:
    """The proposal is accepted in the place of what was asked for, without them."""
    words = ["model=qwen3_32b", "adapter=none", H100, "trainer.batch_size=16"]
    for given in ("backend.sharding=fsdp2", "backend.gradient_checkpointing=true"):
        text = refusal(*words, given)
        assert f"the nearest layout that fits, without {given.partition('=')[0]}: backend=megatron " in text
        found = plan(*words, *proposed(text))
        assert found.memory.total <= found.hardware.memory
    assert "without" not in refusal(*words)


_MIXTURE = [
    "model=qwen3_235b_a22b", "launch.gpu=b200_180gb", "launch.nodes=8", *FULL, "backend.pipeline_parallel=2",
    "backend.expert_parallel=2", "loss=grpo", "sampler.max_tokens=128", "trainer.micro_batch_size=4",
]  # fmt: skip
_MUON = ["model=qwen3_32b", "launch.gpu=a100_80gb", "launch.nodes=3", "adapter=none", "trainer.batch_size=128", "optimizer=muon"]


@pytest.mark.parametrize(
    ("words", "leaves", "given", "expected"),
    [
        # Each process would hold a whole model to sample from.
        (_MIXTURE, ["sampler.max_rows=64"], "sampler=transformers", "sampler=vllm, without sampler.max_rows"),
        # Neither fsdp2 nor Megatron-Core leaves matrices whole.
        (_MUON, ["optimizer.ns_steps=4"], "optimizer=muon", "optimizer=adamw, without optimizer.ns_steps"),
    ],
)
def test_another_sampler_or_optimizer_where_no_layout_fits(
    words: list[str], leaves: list[str], given: str, expected: str
) -> None:
    words = [*words, given] if given not in words else words
    text = refusal(*words, *leaves)
    assert "a process (rows of full length: weights" in text
    option = expected.partition(",")[0]
    assert f"fits with {given}; the nearest layout that fits with {expected}: {option} " in text
    changes = proposed(text)
    keys = {change.partition("=")[0] for change in changes}
    found = plan(*(word for word in words if word.partition("=")[0] not in keys), *changes)
    assert found.memory.total <= found.hardware.memory


def test_an_engine_lies_in_one_machine_or_fills_several() -> None:
    words = ["model=qwen3_8b", H100, *SAMPLED, "trainer.batch_size=64"]
    plan(*words, "launch.nodes=4", "sampler.tensor_parallel=16", "backend.gradient_checkpointing=true", "backend.sharding=fsdp2")
    several = "=16 must divide the 8 processes of a machine, or be those of several whole machines; write 8"
    assert several in refusal(*words, "launch.nodes=3", "sampler.tensor_parallel=16")
    one = "=16 must divide the 8 processes of a machine: each engine lies in one; write 8"
    assert one in refusal(*words, "sampler.tensor_parallel=16")
    text = refusal(*words, "launch.nodes=4", "launch.nproc_per_node=6", "sampler.tensor_parallel=4")
    assert text.endswith("write 2, or give launch.nproc_per_node=4")


def test_a_machine_is_filled_first() -> None:
    text = refusal("model=qwen3_235b_a22b", *FULL, H100, "launch.nproc_per_node=1", "data.sample_prompts=[]")
    assert "launch.nproc_per_node=8 launch.nodes=" in text


def test_a_remedy_is_one() -> None:
    text = refusal("model=tiny", H100, "launch.gpu_memory_gib=0.5")
    assert "on a GPU that has 0.5 (H100): at most about 2.6 GiB a process (rows" in text
    assert text.endswith("no layout on up to 4096 of them fits; the libraries alone take 2.5 GiB")
    lora = ["model=qwen3_235b_a22b", "backend=megatron", H100, "launch.gpu_memory_gib=4", "launch.nodes=256"]
    assert refusal(*lora).endswith("of them fits; lower data.max_length")
    assert refusal(*lora, "adapter=none").endswith("; lower data.max_length, or train a LoRA (adapter=lora)")


def test_what_fits_nowhere() -> None:
    text = refusal("model=qwen3_235b_a22b", "backend=megatron", H100, "launch.gpu_memory_gib=4", "launch.nodes=256")
    assert "no layout on up to 4096 of them fits; lower data.max_length" in text
