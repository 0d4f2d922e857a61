"""What a task of the preflight finds out about its own node. Each check returns what is wrong, in words."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import torch

TEST_BYTES = 8 << 20
# Of a GPU's memory, used by others before the run has started.
BUSY_SHARE = 0.1


def own_gpus(local_rank: int, local_world_size: int) -> list[int]:
    """The visible GPUs that this task looks after; the first is the one it would train on."""
    count = torch.cuda.device_count()
    return [0] if count == 1 else list(range(count))[local_rank::local_world_size]


def check_gpus(expected: int, local_rank: int, local_world_size: int) -> list[str]:
    """``expected``: GPUs of the job on this node. A scheduler may show each task its own one only."""
    if not expected:
        return []
    visible = torch.cuda.device_count()
    if visible not in (expected, max(1, expected // local_world_size)):
        return [f"PyTorch sees {visible} GPUs, Slurm has given {expected}"]
    problems = []
    for index in own_gpus(local_rank, local_world_size):
        try:
            free, total = torch.cuda.mem_get_info(index)
            if free < (1 - BUSY_SHARE) * total:
                problems.append(f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {index} are in use already")
            ones = torch.ones(512, 512, device=f"cuda:{index}")
            if not bool((ones @ ones == 512).all()):
                problems.append(f"GPU {index} multiplies wrong")
        except RuntimeError as error:  # CUDA's errors: whatever it is, it is told
            problems.append(f"GPU {index}: {str(error).splitlines()[0]}")
    return problems


def sample_file(folder: Path, node: str) -> Path:
    return folder / f".preflight-{node}"


def check_folder(folder: Path, node: str, free_gb: float) -> list[str]:
    """Writes to the run folder's file system and reads it back. The file stays, for rank 0 to see."""
    data = os.urandom(TEST_BYTES)
    path = sample_file(folder, node)
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        same = hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return [f"cannot write to {folder}: {error.strerror}"]
    problems = [] if same else [f"what was written to {folder} reads back otherwise"]
    if free < free_gb:
        problems.append(f"{free:.1f} GB are free for {folder}, {free_gb:g} are wanted")
    return problems
