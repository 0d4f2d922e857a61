"""What becomes of the comparison in equality_worker.py when one of the things that it needs is left out, or done wrong.

Each process of a launch (see ranks.py) leaves the distances that it measured, with and without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import equality_worker
import pytest
from equality_cases import Case
from equality_worker import measure, references
from megatron.core.distributed import finalize_model_grads

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.megatron import build, gradients
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.layers import RMSNorm
from twinkle_research.model.megatron.lora import Adapters
from twinkle_research.model.megatron.lora_layers import Site
from twinkle_research.model.megatron.optimizer import MeshOptimizer
from twinkle_research.model.megatron.scoring import Scorer

# --- what is left out -------------------------------------------------------------------------------------------------


def norms_without_mark(patch: pytest.MonkeyPatch) -> None:
    own = RMSNorm.__init__

    def made(self, *args, **options):
        own(self, *args, **options)
        self.weight.sequence_parallel = False

    patch.setattr(RMSNorm, "__init__", made)


def norms_of_heads_not_summed(patch: pytest.MonkeyPatch) -> None:
    def summed(models):
        config = models[0].config
        config.qk_layernorm = False
        finalize_model_grads(models)
        config.qk_layernorm = True

    patch.setattr(gradients, "finalize_model_grads", summed)


def lora_without_mark(patch: pytest.MonkeyPatch) -> None:
    own = Site.make

    def made(*args):
        factors = own(*args)
        factors.a.sequence_parallel = factors.b.sequence_parallel = False
        return factors

    patch.setattr(Site, "make", made)


def input_without_gradient(patch: pytest.MonkeyPatch) -> None:
    own = Adapters._hook

    def hooks(self):
        yield from own(self)
        for chunk in self._chunks:
            chunk.embedding._forward_hooks.clear()

    patch.setattr(Adapters, "_hook", hooks)


def weights_without_marks(patch: pytest.MonkeyPatch) -> None:
    own = Architecture.transformer_config

    def config(*args, **options):
        made = own(*args, **options)
        made.perform_initialization = False
        return made

    patch.setattr(Architecture, "transformer_config", config)


def norms_decay(patch: pytest.MonkeyPatch) -> None:
    own = MeshOptimizer.__init__

    def made(self, *args):
        own(self, *args)
        for group in self._mcore.param_groups:
            group["weight_decay"] = self.spec.options["weight_decay"]

    patch.setattr(MeshOptimizer, "__init__", made)


def padding_in_the_softmax(patch: pytest.MonkeyPatch) -> None:
    own = Scorer.__init__

    def made(self, chunk, mesh, vocabulary_size, *rest):
        own(self, chunk, mesh, len(chunk.output_weight) * mesh.tp.size, *rest)

    patch.setattr(Scorer, "__init__", made)


def padding_token_learns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build, "_without_gradient", lambda token, mesh: lambda module, args, embedded: None)


def ends_not_summed(patch: pytest.MonkeyPatch) -> None:
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    patch.setattr(module, "_allreduce_word_embedding_grads", lambda *args, **options: None)


def experts_without_mark(patch: pytest.MonkeyPatch) -> None:
    own = build._chunk

    def chunk(*args):
        made = own(*args)
        for name, parameter in made.named_parameters():
            if ".experts." in name:
                parameter.allreduce = True
        return made

    patch.setattr(build, "_chunk", chunk)


# --- where it shows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """``shows``: the distance that must exceed its bound. ``steps``: after how many."""

    apply: Callable[[pytest.MonkeyPatch], None]
    case: Case
    shows: str
    steps: int = 4


MUTATIONS = {
    mutation.apply.__name__: mutation
    for mutation in (
        Mutation(norms_without_mark, Case("TP2-SP", "llama", True, "sft", "full", "padded", "none"), "grad_norm"),
        Mutation(norms_of_heads_not_summed, Case("TP2", "qwen3", True, "sft", "full", "padded", "none"), "grad_norm"),
        Mutation(lora_without_mark, Case("TP2-SP", "llama", True, "sft", "lora", "padded", "none"), "grad_norm"),
        Mutation(input_without_gradient, Case("TP2", "llama", True, "sft", "lora", "padded", "full"), "grad_norm"),
        Mutation(weights_without_marks, Case("TP2", "qwen3", True, "sft", "full", "padded", "none"), "grad_norm"),
        Mutation(norms_decay, Case("DP2", "qwen3", True, "sft", "full", "padded", "none"), "weights", steps=20),
        Mutation(padding_in_the_softmax, Case("TP2", "llama", True, "sft", "full", "padded", "none"), "logps"),
        Mutation(padding_token_learns, Case("TP2-SP", "llama", True, "sft", "full", "padded", "none"), "grad_norm"),
        Mutation(experts_without_mark, Case("ETP2", "mixture", True, "sft", "full", "padded", "none"), "grad_norm"),
        Mutation(ends_not_summed, Case("PP2", "llama", True, "sft", "full", "padded", "none"), "grad_norm"),
    )
}


def main(runtime: Runtime, folders: str, expected: str, out: str, others: str) -> None:
    """After the cases in the file ``others``, in the same launch."""
    equality_worker.main(runtime, folders, expected, out, others)
    cases = [mutation.case for mutation in MUTATIONS.values()]
    references(runtime, Path(folders), cases, Path(expected), 0)
    right: dict[tuple[Case, int], dict] = {}
    found = {}
    for name, mutation in MUTATIONS.items():
        case, steps = mutation.case, mutation.steps

        def run(case: Case = case, steps: int = steps) -> dict[str, float]:
            return vars(measure(runtime, Path(folders) / case.model, case, Path(expected), 0, steps))

        if (case, steps) not in right:
            right[case, steps] = run()
        with pytest.MonkeyPatch.context() as patch:
            mutation.apply(patch)
            found[name] = {"right": right[case, steps], "wrong": run()}
    Path(out, f"mutations-{runtime.rank}.json").write_text(json.dumps(found))
