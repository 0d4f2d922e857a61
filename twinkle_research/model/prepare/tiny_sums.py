"""model=tiny_sums: model=tiny after supervised training on two-digit sums, halfway to solving them.

The weights come with the package; conf/experiment/tiny_sums_sft.yaml has the commands that made them. On held-out sums
(data=sums) it is right about two times in three greedily and every second time at temperature 1: where reinforcement starts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from twinkle_research.model.config import DType
from twinkle_research.model.prepare import tiny

ARCHITECTURE = tiny.ARCHITECTURE
WEIGHTS = Path(__file__).with_name("tiny_sums.safetensors")  # bfloat16


def source_id() -> str:
    """Names the weights by what they are, so that other ones are prepared anew."""
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()


def write(folder: Path, dtype: DType) -> None:
    """Writes the model as a Hugging Face folder."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(WEIGHTS)
    tiny.write_folder(folder, {name: tensor.to(getattr(torch, dtype.value)) for name, tensor in tensors.items()}, dtype)
