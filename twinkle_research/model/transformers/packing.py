"""Whether a model keeps packed documents apart: tried out on the model at hand, since no list of architectures is complete."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import ConfigError
from twinkle_research.processor.base import InputProcessor
from twinkle_research.randomness import derive_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from twinkle_research.model.passes import Trained
    from twinkle_research.model.transformers.compute import Compute

LENGTHS = (14, 11, 9)  # in the order in which they are packed
# All are relative distances of log-probabilities. A document packed and the same alone differ by rounding: on a CPU at most
# 2e-7 in float32 (which some models use inside whatever their dtype) over 86 architectures and 0 in bfloat16 over 12, with
# room for kernels that depend on the shape. Leaking ones differ by 2e-1, or 1e-5 where their weights are small and random.
ALONE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2}
# That rounding would hide a small leak in bfloat16. So a document is also packed behind two different ones of one length.
# Shapes are the same and so is the rounding, but for mixtures of experts, where the document before both shows how large
# it is: a causal model cannot leak into that.
CHANGED, NOISES = 2e-6, 30
# Kinds of layers (config.layer_types) that see one token, or others through attention only.
HARMLESS = {"full_attention", "sliding_attention", "attention", "mlp", "moe", "dense", "sparse"}


def check_packing(compute: Compute, trained: Trained, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Scores a few documents packed, packed with other ones, and each by itself.

    Raises ConfigError where the results differ. Collective: where the model is sharded all ranks do the same.
    """
    text = config.get_text_config()
    name = config.model_type
    if text._attn_implementation == "eager":
        name += " with model.attention=eager"
    if getattr(text, "attention_chunk_size", None):
        raise ConfigError(f"model {name} attends in chunks of the whole row, so it cannot be packed; set data.packing=false")
    vocabulary = min(compute.scorer.vocabulary, compute.scorer.module.get_output_embeddings().weight.shape[0])
    first, second, third = (_document(i, length, vocabulary) for i, length in enumerate(LENGTHS))
    other = _document(len(LENGTHS), LENGTHS[1], vocabulary)
    packing = InputProcessor(micro_batch_tokens=sum(LENGTHS), packing=True)
    try:
        packed = _score(compute, trained, packing, (first, second, third))
        changed = _score(compute, trained, packing, (first, other, third))
    except (TypeError, AttributeError) as error:  # what comes of using the mask for anything but handing it on
        raise ConfigError(f"model {name} builds attention masks of its own ({error}); set data.packing=false") from error
    alone = _score(compute, trained, InputProcessor(), (first, second, third))
    noise, gap = (_distance(changed[i], packed[i]) for i in (0, 2))
    leaks = not gap <= max(CHANGED, NOISES * noise)
    if not leaks:
        gap = _distance(np.concatenate(packed), np.concatenate(alone))
    if leaks or not gap <= ALONE[dtype]:
        kinds = sorted(set(getattr(text, "layer_types", None) or ()) - HARMLESS)
        why = f" (layers of the kind {', '.join(kinds)})" if kinds else ""
        raise ConfigError(
            f"model {name} lets packed documents see each other{why}: the log-probabilities of a document change by {gap:.1e} "
            f"when {'another one stands' if leaks else 'others stand'} beside it; set data.packing=false"
        )


@torch.no_grad()
def _score(
    compute: Compute, trained: Trained, processor: InputProcessor, documents: tuple[InputFeature, ...]
) -> list[NDArray[np.float64]]:
    module, kept = compute.scorer.module, (trained.processor, compute.scorer.module.training)
    trained.processor = processor
    module.eval()
    try:
        return [np.array(values) for values in compute.plain_scores(trained, documents, nullcontext())["logps"]]
    finally:
        trained.processor = kept[0]
        module.train(kept[1])


def _distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def _document(number: int, length: int, vocabulary: int) -> InputFeature:
    draws = np.random.PCG64(derive_seed(0, "packing", number)).random_raw(length)
    ids = [int(i) for i in draws % vocabulary]
    return {"input_ids": ids, "labels": [*ids[1:], ids[0]], "sample_index": number, "row": f"document {number}"}
