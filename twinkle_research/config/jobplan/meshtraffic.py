"""What the processes of a Megatron-Core layout send to each other in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

from twinkle_research.config.jobplan.activations import bytes_each
from twinkle_research.config.jobplan.flow import Flow, Group
from twinkle_research.config.jobplan.shapes import (
    Widths,
    adapted_in_stage,
    fullest_stage,
    has_qk_norm,
    held_by_stages,
    lora_parameters,
    stage_layers,
)
from twinkle_research.config.jobplan.workload import Workload, has_critic
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.facts import COLUMN, ROW, Facts, LatentWidths
from twinkle_research.model.megatron.config import (
    MegatronBackendConfig,
    Recompute,
    expert_processes,
    expert_tensor_parallel,
    model_processes,
)
from twinkle_research.trainer.config import TrainConfig


class MeshTraffic:
    """Of the pipeline stage that holds most. Ranks in Megatron-Core's order: tensor, context, expert, data, pipeline."""

    def __init__(
        self, config: TrainConfig, backend: MegatronBackendConfig, facts: Facts, world_size: int, nproc: int, work: Workload
    ) -> None:
        self.config, self.backend, self.facts, self.work = config, backend, facts, work
        self.size, self.widths = bytes_each(config), Widths.of(facts)
        self.lora = isinstance(config.adapter, LoraAdapterConfig)
        self.stage = fullest_stage(facts, backend)
        numbers = stage_layers(facts, backend.pipeline_parallel, backend.virtual_stages, self.stage)
        own_layers = [facts.layers[number] for number in numbers]
        self.layers, self.mixtures = len(numbers), sum(layer.experts > 0 for layer in own_layers)
        self.whole = sum(layer.whole for layer in own_layers)
        self.sites = adapted_in_stage(config.adapter, facts, backend, self.stage) if self.lora else []
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
        arXiv:2205.05198), the embedding and the vocabulary projection. Latent attention has two first matrices."""
        shared = self.mixtures if self.facts.shared_expert_size else 0
        rows = self.layers + (self.layers - self.mixtures) + shared  # row-parallel matrices, whose parts are summed
        columns = rows + (self.layers if self.facts.latent else 0)  # inputs of column-parallel ones
        layer = self.states
        first, forward = self.backend.pipeline_parallel == 1, self.forward
        head = self.size * self.work.share * self.work.trained / self.backend.context_parallel * self.facts.hidden_size
        # Nothing is asked of frozen embeddings' gradient.
        back = columns - (1 + bool(self.facts.latent)) * (self.lora and first)
        if not self.sequence:
            yield Flow("tensor", "all_reduce", (forward * rows + back) * layer + head, self.tensor)
            yield Flow("tensor", "all_reduce", (1 + self.work.scored) * layer if first else 0.0, self.tensor)  # the embedding
        else:
            # The inputs of trained matrices are gathered once more for the gradients of these.
            gathered = forward * columns + rows + (0 if self.lora else columns) + (1 + self.work.scored)
            scattered = forward * rows + back + 1
            if first:
                gathered += 0 if self.lora else 1
                scattered += 1 + self.work.scored
            yield Flow("tensor", "all_gather", gathered * layer, self.tensor)
            yield Flow("tensor", "reduce_scatter", scattered * layer, self.tensor)
            # What each process has whole has seen a part of the sequence only.
            whole = self._whole_of_lora() if self.lora else self.whole + self.widths.hidden
            yield Flow("tensor", "all_reduce", 4 * whole, self.tensor)
        if has_qk_norm(self.facts) and not self.lora and not self.sequence:
            yield Flow("tensor", "all_reduce", 4 * self.layers * 2 * self.widths.head, self.tensor)
        if self.facts.latent:
            yield from self._tensor_of_latents(self.facts.latent)
        yield from self._tensor_of_lora()
        scores = 4 * 3 * (1 + self.work.scored) * self.work.share * self.work.trained / self.backend.context_parallel
        yield Flow("tensor", "all_reduce", scores, self.tensor)  # the largest logit, two sums

    def _tensor_of_latents(self, latent: LatentWidths) -> Iterator[Flow]:
        """Narrow vectors are gathered whole; what is made of them is cut again."""
        each = self.size * self.tokens * self.layers
        narrow = latent.rank + latent.query_rank
        gathered = self.forward * (narrow + latent.rotated)
        summed = latent.rotated
        if self.sequence:
            gathered += narrow * (self.forward + 1 + (0 if self.lora else 1))
            yield Flow("tensor", "reduce_scatter", each * narrow, self.tensor)
        else:
            summed += narrow
        yield Flow("tensor", "all_gather", each * gathered, self.tensor)
        yield Flow("tensor", "all_reduce", each * summed, self.tensor)

    def _whole_of_lora(self) -> int:
        """Parameters of the factors that are not cut: as wide as what goes into a column-parallel matrix, or comes out of a
        row-parallel one."""
        sides = ((m.outputs if m.kind not in COLUMN else 0) + (m.inputs if m.kind not in ROW else 0) for m in self.sites)
        return sum(sides) * self.config.adapter.r

    def _tensor_of_lora(self) -> Iterator[Flow]:
        """What is between the two factors, in float32."""
        if not self.lora:
            return
        row, column = (sum(matrix.kind in kinds for matrix in self.sites) for kinds in (ROW, COLUMN))
        each = 4 * self.config.adapter.r * self.tokens
        if self.sequence:
            yield Flow("tensor", "all_gather", each * (self.forward * column + row), self.tensor)
            yield Flow("tensor", "reduce_scatter", each * (column + self.forward * row), self.tensor)
        else:
            yield Flow("tensor", "all_reduce", each * (column + self.forward * row), self.tensor)

    def _context(self) -> Iterator[Flow]:
        """Keys and values of all of a sequence, and their gradients."""
        width = (self.widths.key + self.widths.value) / self.backend.tensor_parallel
        keys = self.size * width * self.work.share_tokens * self.layers
        yield Flow("context", "all_gather", self.forward * keys, self.context)
        yield Flow("context", "reduce_scatter", keys, self.context)
        scores = 4 * (1 + self.work.scored) * self.work.share_tokens
        yield Flow("context", "all_reduce", scores, self.context)

    def _experts(self) -> Iterator[Flow]:
        """Each token to its experts and back, in both directions; its weights in float32."""
        along = self.backend.tensor_parallel if self.sequence else 1
        routed = self.tokens / along * self.facts.experts_per_token * self.mixtures
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
        held = held_by_stages(self.facts, self.backend)[self.stage]
        dense, experts = held.dense, held.experts
        if self.lora:
            dense, experts = lora_parameters(self.config.adapter, self.sites, self.backend.tensor_parallel), 0
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
