"""Preference losses by command: they raise the margin, go on exactly where they were cut, and need not know how many ranks."""

import json
import random
import signal

import pytest
from runs import fingerprint, killed_after, rows, train_in_child

from twinkle_research.trainer.loop import TrainingLoop

REPORTS = {"logps/chosen", "logps/rejected", "rewards/accuracies", "rewards/chosen", "rewards/margins", "rewards/rejected"}
WORDS = "red blue green small large old new soft cold warm".split()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Thirty questions; the better answer says yes, the worse one says no at more length."""
    draw = random.Random(0)
    lines = []
    for i in range(30):
        question = f"Is {draw.choice(WORDS)} {i} {draw.choice(WORDS)}?"
        lines.append(
            {"prompt": question, "chosen": f"Yes, {draw.choice(WORDS)}.", "rejected": f"No, I would not say {draw.choice(WORDS)}"}
        )
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def command(pairs):
    return [f"data.path={pairs}", "data.limit=null", "data.eval_rows=5", "checkpoint.every=null", "optimizer.lr=2e-3"]


@pytest.mark.parametrize(
    "words",
    [
        ["loss=dpo", "data=preference"],
        ["loss=dpo", "loss.loss_type=ipo", "loss.average_logps=true", "adapter=none", "optimizer.lr=2e-4"],
        ["loss=kto_pair", "loss.beta=0.5"],
        ["loss=simpo"],
        ["loss=orpo", "loss.lambda_orpo=1.0"],
        ["loss=cpo", "data.packing=true", "trainer.micro_batch_tokens=200"],
    ],
    ids=lambda words: words[0],
)
def test_each_loss_raises_the_margin_on_held_out_pairs(tmp_path, command, words):
    assert train_in_child(tmp_path, *command, *words, "trainer.max_steps=5") == 0
    first, *steps = rows(tmp_path)
    last = steps[-1]
    assert set(steps[0]) >= {"step", "loss", "grad_norm", "lr", "tokens"} | REPORTS
    assert set(first) == {"step", "eval/loss", "eval/accuracy"} | {f"eval/rewards/{x}" for x in ("chosen", "margins", "rejected")}
    assert last["eval/loss"] < 0.9 * first["eval/loss"]
    assert last["eval/rewards/margins"] > first["eval/rewards/margins"]
    assert last["eval/accuracy"] == 1.0
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["objective"] == last["eval/loss"]
    if "average" in str(words) or words[0] in ("loss=dpo", "loss=kto_pair"):  # the reference is what the run started from
        assert first["eval/rewards/margins"] == pytest.approx(0.0, abs=1e-4)
        assert "time/reference" in rows(tmp_path, "timing.jsonl")[-1]


LORA = ["loss=dpo", "loss.sft_weight=0.1", "adapter.dropout=0.2", "scheduler=cosine"]
FULL = ["loss=kto_pair", "adapter=none", "optimizer.lr=2e-4"]


@pytest.mark.parametrize(("words", "kills"), [(LORA, (1, 3)), (FULL, (2,))], ids=["lora", "full"])
def test_a_killed_run_goes_on_exactly_and_is_evaluated_alike(tmp_path, command, words, kills):
    """Two epochs of three steps, the last of them with five pairs; dropout in the policy. An evaluation of the checkpoint
    alone, of which it loads the weights, compares with what the run started from too."""
    run = [*command, *words, "trainer.batch_size=10", "trainer.epochs=2", "checkpoint.every=1", "trainer.eval_every=4"]
    assert train_in_child(tmp_path / "whole", *run) == 0
    for step in kills:
        assert train_in_child(tmp_path / "cut", *run, before=lambda: killed_after(step)) == -signal.SIGKILL  # noqa: B023
    assert train_in_child(tmp_path / "cut", *run) == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "cut")] == list(range(7))
    assert train_in_child(tmp_path / "cut", *run, "eval_only=true") == 0
    measured, last = json.loads((tmp_path / "cut" / "evaluation.json").read_text()), rows(tmp_path / "cut")[-1]
    assert last["eval/rewards/margins"] > 0.01
    assert {name: measured[name] for name in last if name.startswith("eval/")} == {
        name: value for name, value in last.items() if name.startswith("eval/")
    }


@pytest.mark.parametrize(
    "words",
    [
        [*FULL, "backend.sharding=fsdp2", "trainer.micro_batch_size=5", "optimizer.eps=1e-5"],
        pytest.param([*LORA, "scheduler=constant", "loss.loss_type=hinge"], marks=pytest.mark.slow),
        pytest.param([*FULL, "data.packing=true", "optimizer.eps=1e-5"], marks=pytest.mark.slow),
    ],
    ids=["fsdp2-full", "ddp-lora", "ddp-packed"],
)
def test_two_processes_equal_one(tmp_path, command, words):
    """Nine pairs a step over two ranks, a last batch of seven."""
    alone = [word for word in words if not word.startswith(("backend.", "data.packing"))]
    run = [*command, "trainer.batch_size=9", "trainer.epochs=1"]
    assert train_in_child(tmp_path / "one", *run, *alone) == 0
    assert train_in_child(tmp_path / "two", *run, *words, "launch.nproc_per_node=2") == 0
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            bound = {"rel": 1e-4} if name == "grad_norm" else {"rel": 1e-5, "abs": 1e-5 if "rewards" in name else 0}
            assert two[name] == pytest.approx(one[name], **bound), (name, one["step"])


def test_a_pair_whose_loss_is_not_finite_is_named(tmp_path, pairs, command, capfd):
    def poison():
        inner = TrainingLoop.optimize

        def optimize(self, features, **loss_inputs):
            loss_inputs["ref_logps"][2] = [float("nan")] * features[2]["length"]
            return inner(self, features, **loss_inputs)

        TrainingLoop.optimize = optimize

    run = [*command, "loss=dpo", "data.shuffle=false", "data.eval_rows=0", "trainer.max_steps=2"]
    assert train_in_child(tmp_path / "run", *run, before=poison) == 1
    message = capfd.readouterr().err
    assert f"{pairs}:2" in message and f"{pairs}:1," not in message and f"{pairs}:3" not in message


def test_rows_and_settings_that_do_not_fit_are_refused(tmp_path, command, capfd):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n{"prompt": "q", "chosen": "a"}\n')
    assert train_in_child(tmp_path / "run", "loss=dpo", "data.limit=null", f"data.path={bad}") == 1
    assert f"{bad}:2: no 'rejected' in the row" in capfd.readouterr().err
