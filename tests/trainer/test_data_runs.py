"""Runs on streamed rows, on a mixture, and on rows that code of the user's makes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import fingerprint, killed_after, rows, train_in_child

from twinkle_research.config import compose, validate
from twinkle_research.errors import EXIT_STOPPED, ConfigError

STREAM = ["data=jsonl", "data.streaming=true", "data.shuffle=false", "trainer.epochs=null", "trainer.max_steps=9",
          "data.limit=null", "checkpoint.every=1"]  # fmt: skip


def write(path: Path, count: int, name: str) -> Path:
    made = [{"prompt": f"{name} {i}: what is it? ", "completion": f"It is {2 * i}" + "." * (i % 9)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """13 rows: four batches a pass, the last of one row."""
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", 13, "row")


def test_a_stream_trains_as_encoded_rows_in_their_order_and_resumes_exactly(path, tmp_path) -> None:
    words = [*STREAM, f"data.path={path}"]
    assert train_in_child(tmp_path / "whole", *words) == 0
    encoded = [word for word in words if "streaming" not in word]
    assert train_in_child(tmp_path / "encoded", *encoded) == 0
    assert rows(tmp_path / "whole") == rows(tmp_path / "encoded") and rows(tmp_path / "whole")[-1]["step"] == 9
    for step in (1, 4, 6):  # within a pass, at its end, within the second
        killed = tmp_path / str(step)
        assert train_in_child(killed, *words, before=lambda step=step: killed_after(step)) == -signal.SIGKILL
        assert train_in_child(killed, *words) == 0
        assert fingerprint(killed) == fingerprint(tmp_path / "whole")


def test_a_stream_whose_file_has_changed_is_refused(path, tmp_path, capfd) -> None:
    own = write(tmp_path / "rows.jsonl", 13, "row")
    words = [*STREAM, f"data.path={own}", "trainer.max_steps=2"]
    assert train_in_child(tmp_path / "run", *words) == 0
    write(own, 13, "other")
    assert train_in_child(tmp_path / "run", *words, "trainer.max_steps=4") == 1
    assert "the data has changed since" in capfd.readouterr().err
    assert train_in_child(tmp_path / "run", *words, "trainer.max_steps=4", "data.on_change=restart") == 0


def test_a_resumed_stream_with_nothing_left_goes_on_stops_or_fails(path, tmp_path, capfd, monkeypatch) -> None:
    """Its rows come from code of the user's, which may say something else than in the run that is continued."""
    (tmp_path / "my_stream_rows.py").write_text(
        "import os, signal, time\ncalls = []\n"
        "def pick(row):\n"
        "    calls.append(row)\n"
        "    if os.environ['PICK'] == 'stop' and len(calls) == 1:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(1)  # the signal is counted by another thread\n"
        "    first = row['prompt'].split()[1] in ('0:', '1:')\n"
        "    return row if os.environ['PICK'] == 'all' or first and os.environ['PICK'] != 'none' else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = [*STREAM, f"data.path={path}", "data.processor=my_stream_rows.pick"]

    def run(pick: str, steps: int) -> int:
        return train_in_child(tmp_path / "run", *words, f"trainer.max_steps={steps}", before=lambda: os.environ.update(PICK=pick))

    assert run("all", 2) == 0
    assert run("stop", 4) == EXIT_STOPPED and rows(tmp_path / "run")[-1]["step"] == 2
    assert run("none", 4) == 1 and "no row can be trained on" in capfd.readouterr().err
    assert run("first", 4) == 0 and "nothing that can be trained on is left after row 8" in capfd.readouterr().err
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_mixture_resumes_exactly(tmp_path) -> None:
    a, b = write(tmp_path / "a.jsonl", 11, "a"), write(tmp_path / "b.jsonl", 7, "b")
    sources = f"data.sources=[{{path: {a}, weight: 0.6}}, {{path: {b}, weight: 0.4}}]"
    words = ["data=mix", sources, "trainer.epochs=2", "checkpoint.every=1", "data.eval_rows=3", "adapter.dropout=0.1"]
    assert train_in_child(tmp_path / "whole", *words) == 0
    assert train_in_child(tmp_path / "killed", *words, before=lambda: killed_after(4)) == -signal.SIGKILL
    assert train_in_child(tmp_path / "killed", *words) == 0
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"'data.sources\[1\].weight' was 0.4, is now 0.5"):
        validate(compose(["model=tiny", *words, sources.replace("0.4", "0.5"), f"run_dir={tmp_path / 'whole'}"]))


def test_ranks_share_rows_that_own_code_makes_and_leave_nothing(tmp_path) -> None:
    """What is not kept for later runs is still made once on a machine, and deleted when all ranks have it."""
    write(tmp_path / "a.jsonl", 11, "a")
    (tmp_path / "own_rows.py").write_text(
        "def convert(row):\n    open('calls', 'a').write('x')\n    return {**row, 'prompt': row['prompt'].upper()}\n"
    )
    words = [
        "model=tiny", "data=jsonl", "data.path=a.jsonl", "data.processor=own_rows.convert", "data.cache_dir=kept",
        "trainer.batch_size=4", "tracking.tensorboard=false", "tracking.report=false", "run_dir=two", "launch.nproc_per_node=2",
    ]  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "train.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text() == "x" * 11  # one of them has encoded, the other waited
    assert list((tmp_path / "kept").iterdir()) == []
    assert [row["step"] for row in rows(tmp_path / "two")] == [1, 2, 3]
