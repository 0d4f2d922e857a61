"""slurm/serve.sbatch in a real Slurm: a trained run behind vLLM's server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from cluster import wait_for
from jobs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]

SCRIPT = str(ROOT / "slurm" / "serve.sbatch")
PROMPT = "Who are you?"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A LoRA, two steps old."""
    made = tmp_path_factory.mktemp("served") / "run"
    words = ["model=tiny", "adapter=lora", "trainer.max_steps=2", "data.sample_prompts=[]", "tracking.wandb.mode=disabled"]
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *words, f"run_dir={made}"], cwd=made.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made


def submit(cluster, folder: Path, *words: str) -> int:
    options = ("--cpus-per-task=2", "--time=10", "--output=serve.out")
    return cluster.submit(
        *options, SCRIPT, *words, cwd=folder, TWINKLE_HOME=str(ROOT), PYTHON=sys.executable, VLLM_CPU_KVCACHE_SPACE="1"
    )


def ask(url: str) -> str:
    body = {"model": "run", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def greedy(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=8, do_sample=False, temperature=None, top_p=None, top_k=None)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_run_answers_until_it_is_cancelled(cluster, tmp_path, run_dir):
    job = submit(cluster, tmp_path, str(run_dir), "--max-model-len=64", "--dtype=float32", "--enforce-eager")
    endpoint, output = tmp_path / "serve" / str(job) / "endpoint", tmp_path / "serve.out"
    wait_for(lambda: endpoint.exists() or cluster.state(job) not in ("PENDING", "RUNNING"), "the server", 240)
    assert endpoint.exists(), output.read_text()
    url = endpoint.read_text().strip()
    assert f"model 'run' answers at {url}" in output.read_text()
    assert ask(url) == greedy(tmp_path / "serve" / str(job) / "model")
    cluster.command("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    wait_for(lambda: not endpoint.exists(), "the end of the server")


def test_what_cannot_be_served(cluster, tmp_path, run_dir):
    """Neither a folder of other things, nor one that is not there, nor on a port where something else answers."""
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = str(other.getsockname()[1])
        wrong = {
            "runs": ["runs"],
            "runs/nothing: there is no such folder": ["runs/nothing"],
            f"port {port} of {cluster.nodes[0]} is taken: give another --port": [str(run_dir), "--port", port],
        }
        for number, (words, arguments) in enumerate(wrong.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "runs").mkdir()
            assert cluster.wait(submit(cluster, folder, *arguments)) == "FAILED"
            output = (folder / "serve.out").read_text()
            assert words in output and "Traceback" not in output and "answers at" not in output
    told = subprocess.run(["bash", SCRIPT, "runs"], capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.startswith("usage: sbatch")
