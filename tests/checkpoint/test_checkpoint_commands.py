"""python -m twinkle_research.checkpoint"""

import json
import os
import subprocess
import sys

import pytest
import torch

from twinkle_research.checkpoint.__main__ import main
from twinkle_research.checkpoint.format import CheckpointWriter, TensorSpec, publish_latest


@pytest.fixture
def run(tmp_path):
    tensors = {"w": torch.zeros(300, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    for step in (2, 4):
        with CheckpointWriter(
            tmp_path / "checkpoints",
            f"step-{step:06d}",
            step=step,
            backend="transformers",
            layout={"world_size": 2},
            metric=1 / step,
        ) as writer:
            writer.add_tensors("model", [TensorSpec.of(n, t) for n, t in tensors.items()], tensors.items())
            writer.add_json("trainer_state.json", {"step": step, "epoch": 0, "consumed_train_samples": 77})
        publish_latest(tmp_path / "checkpoints", f"step-{step:06d}")
    return tmp_path


def test_inspect_a_run(run, capsys):
    (run / "checkpoints" / "step-000009.tmp").mkdir()
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    for text in (
        "step-000002",
        "0.25",
        "latest",
        "not finished",
        "world_size=2",
        "consumed_train_samples=77",
        "1,507",
        "bfloat16 float32",
    ):
        assert text in out, text
    assert out.index("step-000002") < out.index("step-000004")


def test_inspect_one_checkpoint_names_unknown_files(run, capsys):
    (run / "checkpoints" / "step-000002" / "notes.txt").write_text("mine")
    assert main(["inspect", str(run / "checkpoints" / "step-000002")]) == 0
    out = capsys.readouterr().out
    assert "step 2," in out and "notes.txt is not in the manifest" in out and "step-000004" not in out


def test_verify(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert main(["verify", str(run / "checkpoints" / "step-000002")]) == 0
    assert capsys.readouterr().out.count("step-000002: whole, 2 files, 6.") == 2


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-000002"])
def test_verify_names_what_is_damaged(run, capsys, where):
    weights = run / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (run / "checkpoints" / "step-000002" / "trainer_state.json").unlink()
    assert main(["verify", str(run / where)]) == 1
    error = capsys.readouterr().err
    assert "step-000002: model/model.safetensors is damaged" in error and "step-000002: trainer_state.json is missing" in error


def test_verify_of_nothing_fails(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["verify", str(tmp_path / "none")]) == 1
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("error: ") == 3


def test_to_hf_and_merge(run, tmp_path, capsys):
    path = run / "checkpoints" / "step-000004"
    assert main(["merge", str(path), "-o", str(tmp_path / "out")]) == 1
    assert "holds a whole model, nothing to merge; use to-hf" in capsys.readouterr().err
    assert main(["to-hf", str(path), "-o", str(tmp_path / "out")]) == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_as_a_command(run, root):
    """The real command line, in a process of its own; a wrong one costs no torch."""
    command = [sys.executable, "-X", "importtime", "-m", "twinkle_research.checkpoint", "verify", str(run)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "step-000004: whole" in result.stdout
    assert "| torch" not in result.stderr
    result = subprocess.run(
        [*command[:5], "verfy"], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and "invalid choice: 'verfy'" in result.stderr


def test_manifest_is_readable_json(run):
    text = (run / "checkpoints" / "step-000002" / "manifest.json").read_text()
    assert json.loads(text)["files"].keys() == {"model/model.safetensors", "trainer_state.json"} and text.count("\n") > 10
