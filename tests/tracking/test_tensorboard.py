"""TensorBoard's own reader over what a run and its resumes wrote."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tracked_run import loss_at, train

from twinkle_research.tracking.build import Tracker
from twinkle_research.tracking.tensorboard import TensorBoardTracker


def tracker(folder, resume=0) -> Tracker:
    return Tracker(folder, [TensorBoardTracker(folder / "tensorboard", resume)], None)


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    return events.Reload()


def scalars(folder, tag) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_all_numbers_under_their_own_names(tmp_path):
    run = tracker(tmp_path)
    train(run, 0, 6)
    run.finish("finished")
    assert scalars(tmp_path, "loss") == [(s, pytest.approx(loss_at(s), rel=1e-6)) for s in range(7)]
    assert [s for s, _ in scalars(tmp_path, "eval/loss")] == [0, 2, 4, 6]
    tags = read(tmp_path).Tags()
    assert set(tags["scalars"]) == {"loss", "grad_norm", "lr", "tokens", "eval/loss", "step_seconds", "tokens_per_second"}
    text = read(tmp_path).Tensors("samples/0")
    assert [e.step for e in text] == [0, 2, 4, 6] and b"answer of step 6" in text[-1].tensor_proto.string_val[0]


@pytest.mark.parametrize("resume", [0, 3])
def test_a_resume_replaces_what_came_after_the_checkpoint(tmp_path, resume):
    run = tracker(tmp_path)
    train(run, 1, 5)
    run.flush()  # and no finish: killed
    again = tracker(tmp_path, resume)
    train(again, resume + 1, 7, shift=1.0)
    again.finish("finished")
    expected = [(s, pytest.approx(loss_at(s, 1.0 if s > resume else 0.0), rel=1e-6)) for s in range(1, 8)]
    assert scalars(tmp_path, "loss") == expected


def test_no_row_no_file(tmp_path):
    tracker(tmp_path).finish("failed")
    assert not (tmp_path / "tensorboard").exists()
