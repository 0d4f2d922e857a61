"""What the documents say exists: the commands compose, the links lead somewhere, the make targets are there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_research.config.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(p for p in ROOT.rglob("*.md") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts))
ROW = {"messages": [{"role": "user", "content": "What is a quark?"}, {"role": "assistant", "content": "An elementary particle."}]}


def commands(start: str) -> list[str]:
    """Indented lines of README.md that begin with ``start``, without the comment behind them."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [line.strip().split("  #")[0].strip() for line in lines if line.startswith(f"    {start} ")]


NOT_DRY = ("eval_only", "hydra/sweeper=optuna")  # these need a run, and a study has no jobs before it begins


@pytest.mark.parametrize("command", [c for c in commands("python train.py") if not any(word in c for word in NOT_DRY)])
def test_train_commands_compose(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "a", "b", "train", "test", "prompts", "pairs"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(ROW)}\n" * 32)
    (tmp_path / "rewards.py").write_text("def close(completion, answer):\n    return 1.0\n")
    words = shlex.split(command)[2:]
    changes_nothing = {"--help", "--cfg", "dry_run=true"}.intersection(words)
    assert main(words if changes_nothing else [*words, "dry_run=true"]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("module", sorted({c.split()[2] for c in commands("python -m")}))
def test_programs_explain_themselves(module):
    result = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "usage:" in result.stdout, result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    missing = [t for t in targets if not t.startswith(("http:", "https:")) and not (document.parent / t).exists()]
    assert missing == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = "".join(p.read_text(encoding="utf-8") for p in DOCUMENTS)
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", text, flags=re.MULTILINE)) <= targets
