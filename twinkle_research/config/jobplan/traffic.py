"""What the processes of a job send to each other in an optimizer step.

Bytes of each collective are those of the tensor that it is about (of an all-gather its result, of a reduce-scatter its
input), as they are counted in real steps of two processes (tests/model/megatron/test_plan_measured.py). What is small whatever
the model (gradient norms, lengths, results) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from twinkle_research.config.jobplan.activations import bytes_each
from twinkle_research.config.jobplan.flow import Flow, Group
from twinkle_research.config.jobplan.meshtraffic import MeshTraffic
from twinkle_research.config.jobplan.shapes import trainable_parameters
from twinkle_research.config.jobplan.workload import Workload, has_critic, workload
from twinkle_research.model.config import LoraAdapterConfig, Sharding
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.trainer.config import TrainConfig


def flows(config: TrainConfig, facts: Facts, world_size: int, nproc: int) -> list[Flow]:
    """Without those of groups of one."""
    work = workload(config, world_size)
    if isinstance(config.backend, MegatronBackendConfig):
        found = MeshTraffic(config, config.backend, facts, world_size, nproc, work).flows()
    else:
        found = _transformers(config, facts, work, Group(world_size, 1, nproc))
    return [flow for flow in found if flow.group.size > 1 and flow.size]


def _transformers(config: TrainConfig, facts: Facts, work: Workload, everyone: Group) -> Iterator[Flow]:
    size, lora = bytes_each(config), isinstance(config.adapter, LoraAdapterConfig)
    trained = trainable_parameters(config.adapter, facts) + (facts.hidden_size + 1 if has_critic(config) else 0)
    if config.backend.sharding is not Sharding.fsdp2:
        yield Flow("data", "all_reduce", 4 * trained, everyone)
        return
    # What lies outside the layers stays whole from a forward pass to its backward pass; layers are gathered for each.
    outside = facts.embedding_parameters + facts.hidden_size
    inner = facts.parameters - outside
    gathered = outside + 2 * inner + work.scored * facts.parameters
    yield Flow("data", "all_gather", size * gathered * work.micro_batches, everyone, hidden=True)
    if lora:
        yield Flow("data", "all_reduce", 4 * trained, everyone)
    else:
        yield Flow("data", "reduce_scatter", 4 * facts.parameters * work.micro_batches, everyone, hidden=True)
    if work.rollout_steps:
        kept = size if lora else 4
        yield Flow("sampler", "all_gather", kept * facts.parameters / work.rollout_steps, everyone)
