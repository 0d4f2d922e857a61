"""What the processes of a Megatron-Core layout send to each other in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

from twinkle_research.config.jobplan.activations import bytes_each
from twinkle_research.config.jobplan.flow import Flow, Group
from twinkle_research.config.jobplan.memory import megatron_parameters
from twinkle_research.config.jobplan.shapes import ROW, Widths, adapted, has_qk_norm, lora_parameters, matrix, mixture_layers
from twinkle_research.config.jobplan.workload import Workload, has_critic
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import (
    MegatronBackendConfig,
    Recompute,
    expert_processes,
    expert_tensor_parallel,
    model_processes,
)
from twinkle_research.trainer.config import TrainConfig


class MeshTraffic:
    """Ranks in Megatron-Core's order: tensor, context, expert, data, pipeline."""

    def __init__(
        self, config: TrainConfig, backend: MegatronBackendConfig, facts: Facts, world_size: int, nproc: int, work: Workload
    ) -> None:
        self.config, self.backend, self.facts, self.work = config, backend, facts, work
        self.size, self.widths = bytes_each(config), Widths.of(facts)
        self.lora = isinstance(config.adapter, LoraAdapterConfig)
        self.layers = facts.num_layers // backend.pipeline_parallel
        self.sequence = backend.tensor_parallel > 1 and backend.sequence_parallel is not False
        own = expert_tensor_parallel(backend)
        stage, model, tensor = world_size // backend.pipeline_parallel, model_processes(backend), backend.tensor_parallel
        copies = world_size // model * backend.context_parallel
        self.tensor = Group(tensor, 1, nproc)
        self.context = Group(backend.context_parallel, tensor, nproc)
        self.expert = Group(backend.expert_parallel, own, nproc)
        self.expert_tensor = Group(own, 1, nproc)
        self.data = Group(copies, tensor, nproc)
        self.expert_data = Group(world_size // expert_processes(backend), own * backend.expert_parallel, nproc)
        self.pipeline = Group(backend.pipeline_parallel, stage, nproc)
        self.everyone = Group(world_size, 1, nproc)
        # Of a share's rows, on one of the processes that share each sequence.
        self.tokens = work.share_tokens / backend.context_parallel
        self.states = self.size * self.tokens * facts.hidden_size  # bytes of all hidden states between two layers
        self.again = 1 if backend.recompute is Recompute.full else 0
        self.forward = 1 + self.again + work.scored  # passes

    def flows(self) -> Iterator[Flow]:
        yield from self._tensor()
        yield from self._context()
        if self.facts.num_experts:
            yield from self._experts()
        yield from self._pipeline()
        yield from self._data()
        if self.work.rollout_steps:
            whole = self.size * self.facts.parameters / self.work.rollout_steps
            cut = self.backend.tensor_parallel * self.backend.pipeline_parallel * self.backend.expert_parallel > 1
            yield Flow("sampler", "broadcast", whole if cut else 0.0, self.everyone)

    def _tensor(self) -> Iterator[Flow]:
        """For each matrix pair (Shoeybi et al. 2019, arXiv:1909.08053; with the sequence split: Korthikanti et al. 2022,
        arXiv:2205.05198), the embedding and the vocabulary projection."""
        attention, mlp = self.layers, self.layers - min(self.layers, mixture_layers(self.facts))
        blocks, layer = attention + mlp, self.states
        first, forward = self.backend.pipeline_parallel == 1, self.forward
        head = self.size * self.work.share * self.work.trained / self.backend.context_parallel * self.facts.hidden_size
        back = blocks - (self.lora and first)  # nothing is asked of frozen embeddings' gradient
        if not self.sequence:
            backward = back * layer + head
            yield Flow("tensor", "all_reduce", forward * blocks * layer + backward, self.tensor)
            yield Flow("tensor", "all_reduce", (1 + self.work.scored) * layer if first else 0.0, self.tensor)  # the embedding
        else:
            # The inputs of trained matrices are gathered once more for the gradients of these.
            gathered = forward * blocks + blocks * (1 if self.lora else 2) + (1 + self.work.scored)
            scattered = forward * blocks + back + 1
            if first:
                gathered += 0 if self.lora else 1
                scattered += 1 + self.work.scored
            yield Flow("tensor", "all_gather", gathered * layer, self.tensor)
            yield Flow("tensor", "reduce_scatter", scattered * layer, self.tensor)
            # What each process has whole has seen a part of the sequence only.
            whole = self._whole_of_lora()
            if not self.lora:
                routers = self.facts.num_experts * min(self.layers, mixture_layers(self.facts))
                whole = (2 * self.layers + 1 + routers) * self.widths.hidden
            yield Flow("tensor", "all_reduce", 4 * whole, self.tensor)
        if has_qk_norm(self.facts) and not self.lora:
            yield Flow("tensor", "all_reduce", 4 * self.layers * 2 * self.widths.head, self.tensor)
        yield from self._tensor_of_lora()
        scores = 4 * 3 * (1 + self.work.scored) * self.work.share * self.work.trained / self.backend.context_parallel
        yield Flow("tensor", "all_reduce", scores, self.tensor)  # the largest logit, two sums

    def _sites(self) -> dict[str, float]:
        """Kind of matrix with a LoRA -> their number in a stage."""
        adapter = self.config.adapter
        counts = adapted(adapter, self.facts) if isinstance(adapter, LoraAdapterConfig) else {}
        return {kind: count / self.backend.pipeline_parallel for kind, count in counts.items()}

    def _whole_of_lora(self) -> float:
        """Parameters of the factors that are not cut: as wide as what goes into a column-parallel matrix, or comes out of a
        row-parallel one."""
        sides = {kind: matrix(kind, self.facts)[0 if kind in ROW else 1] for kind in self._sites()}
        return sum(count * sides[kind] * self.config.adapter.r for kind, count in self._sites().items())

    def _tensor_of_lora(self) -> Iterator[Flow]:
        """What is between the two factors, in float32."""
        if not self.lora:
            return
        row = sum(count for kind, count in self._sites().items() if kind in ROW)
        column = sum(self._sites().values()) - row
        each = 4 * self.config.adapter.r * self.tokens
        if self.sequence:
            yield Flow("tensor", "all_gather", each * (self.forward * column + row), self.tensor)
            yield Flow("tensor", "reduce_scatter", each * (column + self.forward * row), self.tensor)
        else:
            yield Flow("tensor", "all_reduce", each * (column + self.forward * row), self.tensor)

    def _context(self) -> Iterator[Flow]:
        """Keys and values of all of a sequence, and their gradients."""
        keys = self.size * 2 * self.widths.key / self.backend.tensor_parallel * self.work.share_tokens * self.layers
        yield Flow("context", "all_gather", self.forward * keys, self.context)
        yield Flow("context", "reduce_scatter", keys, self.context)
        scores = 4 * (1 + self.work.scored) * self.work.share_tokens
        yield Flow("context", "all_reduce", scores, self.context)

    def _experts(self) -> Iterator[Flow]:
        """Each token to its experts and back, in both directions; its weights in float32."""
        mixtures = min(self.layers, mixture_layers(self.facts))
        along = self.backend.tensor_parallel if self.sequence else 1
        routed = self.tokens / along * self.facts.experts_per_token * mixtures
        passes = self.forward + 1
        yield Flow("expert", "all_to_all", passes * routed * (2 * self.size * self.widths.hidden + 4), self.expert)
        # Where an expert's matrices are shared, each of those processes gets the tokens of all, with their weights.
        gathered = routed * self.expert_tensor.size
        states = passes * gathered * self.size * self.widths.hidden
        yield Flow("expert", "all_gather", states + 4 * self.forward * gathered, self.expert_tensor)
        yield Flow("expert", "reduce_scatter", states + 4 * gathered, self.expert_tensor)

    def _pipeline(self) -> Iterator[Flow]:
        """What a middle stage sends: states to the next one, their gradients to the one before."""
        stages, chunks = self.backend.pipeline_parallel, self.backend.virtual_stages
        trained = 2 * chunks if stages > 2 else 2 * chunks - 1
        scored = chunks * self.work.scored
        states = self.states / (self.backend.tensor_parallel if self.sequence else 1)
        yield Flow("pipeline", "send", (trained + scored) * states, self.pipeline)
        if self.facts.tied_embeddings and not self.lora:  # both ends have the matrix
            rows = -(-self.facts.vocab_size // self.backend.tensor_parallel)
            ends = Group(min(2, stages), self.pipeline.stride * max(1, stages - 1), self.pipeline.nproc)
            yield Flow("pipeline", "all_reduce", 4 * rows * self.widths.hidden, ends)

    def _data(self) -> Iterator[Flow]:
        held = megatron_parameters(self.facts, self.backend)
        dense, experts = held.dense, held.experts
        if self.lora:
            tensor = self.backend.tensor_parallel
            dense = lora_parameters(self.config.adapter, self.facts, tensor) // self.backend.pipeline_parallel
            experts = 0
        dense += self.widths.hidden + 1 if has_critic(self.config) else 0
        hidden = self.backend.overlap_grad_reduce
        late = self.backend.overlap_param_gather
        updated = 4 if self.lora else self.size
        for count, group in ((dense, self.data), (experts, self.expert_data)):
            if self.backend.distributed_optimizer:
                yield Flow("data", "reduce_scatter", 4 * count, group, hidden)
                yield Flow("data", "all_gather", updated * count, group, late)
            else:
                yield Flow("data", "all_reduce", 4 * count, group, hidden)
