"""Every layout gives the losses, scores and gradients of transformers, with any loss, however rows are cut.

The measured distances are printed by ``pytest -s``. One launch for each number of processes.
"""

import json

import compute_worker as worker
import pytest
from compute_worker import LAYOUTS
from ranks import launch

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import DataError, UserError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folders(once):
    """Models, and below ``expected`` what transformers makes of them."""

    def make(folder):
        (folder / "expected").mkdir()
        worker.references(folder, folder / "expected")

    return once("megatron-references", make)


@pytest.fixture(scope="module")
def done(once, folders):
    """World size -> folder with the distances of each layout and process."""

    def run(size):
        def make(out):
            arguments = (folders, folders / "expected", out)
            if size == 1:
                worker.main(Runtime(), *map(str, arguments))
            else:
                launch("compute_worker", *arguments, processes=size)

        return once(f"megatron-compute-{size}", make)

    return run


def cases():
    for size, layouts in LAYOUTS.items():
        yield from (pytest.param(size, name, marks=[pytest.mark.long] if size > 1 else []) for name in layouts)


@pytest.mark.parametrize(("size", "layout"), cases())
def test_as_transformers(done, size, layout):
    """Measured over all layouts: log-probabilities 9.5e-7, gradients 9e-7, losses 9.5e-7, values 1.7e-6, metrics 5e-7."""
    for rank in range(size):
        for work, found in json.loads((done(size) / f"{layout}-{rank}.json").read_text()).items():
            print(layout, rank, work, {name: f"{value:.1e}" for name, value in found.items()})
            assert found["gradients"] <= 1e-6 and found["metrics"] <= 2e-6
            assert max(found["logps"], found["loss"], found.get("values", 0.0)) <= 2e-6


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(folders):
    model = worker.Opened(folders / "dense", Runtime(), {})
    yield model
    model.close()


def train(opened, rows, loss="CrossEntropyLoss", **given):
    opened.prepare(worker.Work(loss), "padded")
    training = opened.trained.training
    return opened.compute.run(opened.trained, rows, given, training.open(1.0), normalized=True, backward=True, is_training=True)


def test_positions_that_jump(opened):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100], "position_ids": [0, 1, 3, 4], "row": "rows.jsonl:1"}]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: position_ids\[2\] does not go on .*backend=transformers"):
        train(opened, rows)
    rows[0]["position_ids"] = [7, 8, 9, 10]  # where they begin makes no difference
    shifted = train(opened, rows).result["logps"][0]
    del rows[0]["position_ids"]
    assert shifted == train(opened, rows).result["logps"][0]


def test_tokens_outside_the_vocabulary(opened):
    """Also those of the padding that a projection cut in two would have."""
    with pytest.raises(DataError, match=rf"input_ids\[1\] is {worker.VOCABULARY}, but"):
        train(opened, [{"input_ids": [5, worker.VOCABULARY], "labels": [-100, -100]}])


def test_values_without_a_head(opened):
    with pytest.raises(UserError, match="PPOValueLoss needs values: call add_value_head first"):
        train(opened, worker.rows_of(worker.WORK["cross_entropy"]), "PPOValueLoss")


def test_no_rows(opened):
    found = train(opened, []).result
    assert found == {"loss": 0.0, "num_tokens": 0, "logps": []}
    assert not any(gradient.any() for gradient in opened.trained.training.gradients.tensors().values())


def test_sequences_inside_a_row_are_documents(opened):
    """As many rows of their own."""
    parts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    ids = [token for part in parts for token in part]
    labels = [label for part in parts for label in [*part[1:], -100]]
    positions = [i for part in parts for i in range(len(part))]
    together = train(opened, [{"input_ids": ids, "labels": labels, "position_ids": positions}]).result["logps"][0]
    alone = train(opened, [{"input_ids": part, "labels": [*part[1:], -100]} for part in parts]).result["logps"]
    assert together == pytest.approx([value for part in alone for value in part], abs=1e-6)
