"""One vLLM engine in this process: built, stepped, put to sleep and closed without leaving marks on the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_research.distributed.gpus import GIB
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import UserError
from twinkle_research.model.facts import read_facts, read_json
from twinkle_research.sampler.choice import vllm_obstacle
from twinkle_research.sampler.draws import Uniforms
from twinkle_research.sampler.isolation import contained_construction, isolated_generators, shut_down
from twinkle_research.sampler.keyed import Draws, KeyedDraw
from twinkle_research.sampler.kv_cache import CPU_BLOCK, cpu_cache_bytes
from twinkle_research.sampler.vllm_env import TESTED_VERSION, engine_environment

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's kernels

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.3
    kv_cache_gib: float | None = None
    expected_tokens: int = 256  # of a completion; sizes the KV cache of a CPU engine
    enforce_eager: bool = False
    sleep_level: int = 0  # on a GPU: 0 keeps everything, 1 moves the weights to the host, 2 drops them
    load_weights: bool = False  # from the folder; else they are pushed before the first use
    max_lora_rank: int | None = None
    trust_remote_code: bool = False


@dataclass
class Request:
    """One completion for the engine. ``on_token`` sees each token as it comes and says whether to stop after it."""

    prompt: list[int]
    params: SamplingParams
    draws: Draws | None = None
    on_token: Callable[[int], bool] | None = None
    lora: Any = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]]] | None = None
    stopped: bool = False
    ended: bool = False


class Engine:
    """``model``, ``runner`` and ``core`` are vLLM's, for those who push weights into them."""

    def __init__(self, folder: str | Path, runtime: Runtime, options: EngineOptions) -> None:
        self.device = runtime.device
        # A scheduler may show each process its own GPU only, so the device's number counts.
        place = runtime.local_rank if self.device.index is None else self.device.index
        ranks = {"RANK": runtime.rank, "LOCAL_RANK": place, "WORLD_SIZE": runtime.world_size}
        obstacle = vllm_obstacle(read_facts(folder), self.device.type == "cpu")
        if obstacle:
            raise UserError(f"vLLM cannot sample the model in {folder}: {obstacle}; write sampler=transformers")
        several = {name: str(n) for name, n in ranks.items()} if runtime.world_size > 1 else {}
        try:
            with engine_environment(self.device.type, several), contained_construction(self.device):
                self._llm = _build(_arguments(folder, runtime, options), self.device)
        except (ValueError, RuntimeError, NotImplementedError) as error:  # how vLLM refuses a model, or a machine too small
            raise UserError(f"vLLM cannot run the model in {folder} here: {error}; write sampler=transformers") from error
        self._engine = self._llm.llm_engine
        self.core = self._engine.engine_core
        self.runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.keyed = KeyedDraw(self.runner)
        self.runner.sampler.topk_topp_sampler = self.keyed
        self._packed = self.device.type != "cpu"  # there weights are multiplied as they lie
        self.config = self._engine.model_config
        self.max_model_len: int = self.config.max_model_len
        self.vocab_size: int = self.config.get_vocab_size()
        self.end_ids = _end_ids(self.config)
        self._next = 0  # requests so far

    @property
    def model(self) -> nn.Module:
        return self.runner.get_model()

    def run(self, requests: list[Request]) -> None:
        """Completes all requests. When it is interrupted nothing of them stays in the engine."""
        for _ in self.steps(requests):
            pass

    def steps(self, requests: list[Request]) -> Iterator[None]:
        """The same, with a pause after each step of the engine. One call at a time."""
        if self._engine.has_unfinished_requests():
            raise UserError("the engine is busy: another call, or a stream that was not read to its end, is still under way")
        if not self._packed:
            _pack(self.model)
            self._packed = True
        names: dict[str, tuple[str, Request]] = {}
        try:
            with isolated_generators(self.device):
                for request in requests:
                    self._next += 1
                    names[str(self._next)] = self._add(str(self._next), request), request
            while self._engine.has_unfinished_requests():
                with isolated_generators(self.device):
                    outputs = self._engine.step()
                    stopped = [names[out.request_id][0] for out in outputs if _take(out, names[out.request_id][1])]
                    if stopped:
                        self._engine.abort_request(stopped, internal=True)
                yield
        finally:
            if unfinished := [name for name, request in names.values() if not request.ended]:
                self._engine.abort_request(unfinished, internal=True)
            for name, _ in names.values():
                del self.keyed.draws[name]

    def _add(self, name: str, request: Request) -> str:
        """The engine's own name for it."""
        from vllm.inputs import tokens_input

        internal = self._engine.add_request(name, tokens_input(request.prompt), request.params, lora_request=request.lora)
        self.keyed.draws[internal] = request.draws or Draws(Uniforms(0))
        return internal

    def reset_prefix_cache(self) -> bool:
        """False where a request still holds a part of it."""
        core = self.core.engine_core
        while core.batch_queue:  # on a GPU a step may be under way that was begun before the last one's end was known
            self._engine.step()
        return self._engine.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        self._engine.sleep(level=level)

    def wake_up(self, part: str) -> None:
        """``part``: weights, and then kv_cache."""
        self._engine.wake_up(tags=[part])

    @staticmethod
    def broadcast(value: int) -> int:
        """That of the first of the ranks that share the engine."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().broadcast_object(value, src=0)

    @contextmanager
    def model_in_place(self) -> Iterator[nn.Module]:
        """The engine's model, to be written to."""
        self._packed = self.device.type != "cpu"
        with torch.no_grad(), isolated_generators(self.device):
            yield self.model

    def close(self) -> None:
        core, self._llm, self._engine = self.core, None, None
        shut_down(core)


def _end_ids(config: Any) -> set[int]:
    """The end tokens of the model's generation config, else of its config."""
    generation = config.try_get_generation_config()
    configured = generation.get("eos_token_id", None)
    return set(configured) if isinstance(configured, list) else {configured} - {None}


def _take(output: RequestOutput, request: Request) -> bool:
    """Adds what came; True when the engine is to be told to stop."""
    if output.prompt_logprobs is not None:
        request.prompt_logprobs = _entries(output.prompt_logprobs)
    if request.ended:
        return False
    (completion,) = output.outputs
    request.ended = output.finished
    request.stopped = completion.finish_reason == "stop"
    if completion.logprobs is not None:
        request.logprobs += _entries(completion.logprobs)
    if request.on_token is None:
        request.tokens += completion.token_ids
        return False
    for token in completion.token_ids:
        request.tokens.append(token)
        if request.on_token(token):
            was_running, request.ended, request.stopped = not request.ended, True, True
            return was_running
    return False


def _entries(flat: FlatLogprobs) -> list[list[tuple[int, float]]]:
    places = zip(flat.start_indices, flat.end_indices, strict=True)
    return [list(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True)) for a, b in places]


def _build(arguments: dict[str, Any], device: torch.device) -> LLM:
    # The libraries' remarks on what a CPU does not have are no news to anybody.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    import vllm

    if not vllm.__version__.startswith(TESTED_VERSION):
        log.warning("vLLM %s is installed; its weights and draws are reached into as in %s", vllm.__version__, TESTED_VERSION)
    if device.type == "cpu":
        torch.ops._C.init_cpu_memory_env = lambda nodes: None  # would bind the trainer's memory to a node
    _import_model(arguments["model"])
    if device.type != "cpu":
        return vllm.LLM(**arguments)
    with _products(onednn=False):  # it packs weights away, so that none can be pushed in place
        return vllm.LLM(**arguments)


def _pack(model: nn.Module) -> None:
    """Lays weights out as oneDNN multiplies them, which takes three quarters of the time. vLLM does so where it loads them, and
    drops the originals; here those stay, to be written to, and are laid out anew when they were."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    with _products(onednn=True):
        for layer in model.modules():
            if "cpu_linear" in vars(layer):  # set by vLLM on layers that it multiplies by this function
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


@contextmanager
def _products(*, onednn: bool) -> Iterator[None]:
    """What vLLM has to choose from while it decides how a layer is multiplied on a CPU, beside torch's own product."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    before = ops._supports_onednn, utils.check_cpu_sgl_kernel
    ops._supports_onednn = onednn and ops._supports_onednn
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # these kernels change the dtype of biases
    try:
        yield
    finally:
        ops._supports_onednn, utils.check_cpu_sgl_kernel = before


def _import_model(folder: str) -> None:
    """vLLM looks at a model's class in a process of its own, for ten seconds or so, unless it is imported already."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in read_json(Path(folder) / "config.json").get("architectures") or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _arguments(folder: str | Path, runtime: Runtime, options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(folder), "dtype": options.dtype, "max_num_seqs": options.max_num_seqs, "seed": 0,
        "tensor_parallel_size": options.tensor_parallel, "trust_remote_code": options.trust_remote_code,
        "distributed_executor_backend": "external_launcher" if runtime.world_size > 1 else "uni",
        "skip_tokenizer_init": True, "generation_config": "vllm", "load_format": "auto" if options.load_weights else "dummy",
        "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs", "max_logprobs": -1, "use_tqdm_on_load": False,
    }  # fmt: skip
    if options.max_model_len is not None:
        arguments["max_model_len"] = options.max_model_len
    kv_bytes = None if options.kv_cache_gib is None else int(options.kv_cache_gib * GIB)
    if runtime.device.type == "cpu":
        kv_bytes = kv_bytes or cpu_cache_bytes(
            read_facts(folder), getattr(torch, options.dtype).itemsize, tensor_parallel=options.tensor_parallel,
            max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs, expected_tokens=options.expected_tokens,
        )  # fmt: skip
        arguments |= {"block_size": CPU_BLOCK, "enforce_eager": True}
    else:
        arguments |= {
            "gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": options.sleep_level > 0,
            "enforce_eager": options.enforce_eager,
        }  # fmt: skip
    if kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_bytes
    if options.max_lora_rank is not None:
        # One slot more than adapters: on CPU rows of the base model get the delta of the last slot.
        rank = next((r for r in _LORA_RANKS if r >= options.max_lora_rank), options.max_lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2}
    return arguments
