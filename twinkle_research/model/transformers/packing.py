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
    from transformers import PretrainedConfig

    from twinkle_research.model.transformers.compute import Compute, Trained

LENGTHS = (9, 14, 11)
# Of the log-probabilities, relative. Where nothing leaks they differ by rounding alone: at most 5e-8 in float32 (which some
# models use inside whatever their dtype) and 0 in bfloat16 over 12 architectures on a CPU, with room for kernels that
# depend on the shape. A two-layer Qwen3.5, which leaks, differs by 8e-2.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check_packing(compute: Compute, trained: Trained, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Scores a document between two others and by itself. Raises ConfigError where the results differ. Collective."""
    text = config.get_text_config()
    name = config.model_type
    if getattr(text, "attention_chunk_size", None):
        raise ConfigError(f"model {name} attends in chunks of the whole row, so it cannot be packed; set data.packing=false")
    documents = [_document(i, length, compute.scorer.vocabulary) for i, length in enumerate(LENGTHS)]
    kept, results = trained.processor, []
    compute.scorer.module.eval()
    try:
        for processor in (InputProcessor(micro_batch_tokens=sum(LENGTHS), packing=True), InputProcessor()):
            trained.processor = processor
            results.append(np.concatenate(compute.logps(trained, documents, nullcontext())))
    finally:
        trained.processor = kept
    packed, alone = results
    gap = np.linalg.norm(packed - alone) / np.linalg.norm(alone)
    if not gap <= TOLERANCE[dtype]:
        kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
        why = f" (layers of the kind {', '.join(kinds)})" if kinds else ""
        raise ConfigError(
            f"model {name} lets packed documents see each other{why}: the log-probabilities of a document change by {gap:.1e} "
            "when others stand beside it; set data.packing=false"
        )


def _document(number: int, length: int, vocabulary: int) -> InputFeature:
    draws = np.random.PCG64(derive_seed(0, "packing", number)).random_raw(length)
    ids = [int(i) for i in draws % vocabulary]
    return {"input_ids": ids, "labels": [*ids[1:], ids[0]], "sample_index": number, "row": f"document {number}"}
