"""The plan's memory and traffic against what processes really hold and send in a step."""

import json

import pytest
from hf_folders import save_models
from plan_cases import CASES, MODELS, SHAPE, words
from ranks import launch

from twinkle_research.config import compose, to_object
from twinkle_research.config.jobplan.memory import estimate
from twinkle_research.config.jobplan.traffic import flows
from twinkle_research.model.facts import read_facts

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
# Bytes in a step of these models of numbers of tokens that experts get, of results, norms and checks, and of messages that say
# how long others are.
SMALL = {"all_gather": 1100, "broadcast": 1100}
# Where ranges of parameters begin with the distributed optimizer: float32 numbers, for each of at most 50 tensors.
PADDING = 64 * 4 * 50


@pytest.fixture(scope="module")
def folders(once):
    return once("plan-folders", lambda out: save_models(out, MODELS, SHAPE))


@pytest.fixture(scope="module")
def measured(once, folders):
    def make(out):
        for processes in (1, 2):
            launch("plan_worker", folders, out, processes=processes)

    out = once("plan-measured", make)
    return {
        name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(case.processes)]
        for name, case in CASES.items()
    }


def planned(folders, name):
    case = CASES[name]
    folder = folders / case.model
    return to_object(compose(["model=hf", f"model.path={folder}", *words(case)])), read_facts(folder), case.processes


@pytest.mark.parametrize("name", CASES)
def test_what_a_process_holds(folders, measured, name):
    """To the byte, of the process that has most; a range of the distributed optimizer begins where there is padding."""
    memory = estimate(*planned(folders, name), None, on_cpu=True)
    held = [found["held"] for found in measured[name]]
    assert max(found["weights"] for found in held) == memory.weights
    assert max(found["gradients"] for found in held) == memory.gradients
    if "distributed_optimizer" in CASES[name].options:
        assert sum(found["optimizer"] for found in held) == len(held) * memory.optimizer
        assert all(abs(found["optimizer"] - memory.optimizer) <= 3 * PADDING for found in held)
    else:
        assert max(found["optimizer"] for found in held) == memory.optimizer


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.processes > 1])
def test_what_a_process_sends(folders, measured, name):
    """To some hundred bytes that no large model has more of. Which tokens an expert gets is up to its router: the sum counts."""
    config, facts, processes = planned(folders, name)
    expected: dict[str, float] = {}
    for flow in flows(config, facts, processes, processes):
        expected[flow.op] = expected.get(flow.op, 0.0) + flow.size
    sent = [found["sent"] for found in measured[name]]
    padding = PADDING if "distributed_optimizer" in CASES[name].options else 0
    for op in {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", *expected, *sent[0]}:
        real = [own.get(op, 0) for own in sent]
        found = sum(real) / len(real) if op == "all_to_all" else max(real)
        assert abs(found - expected.get(op, 0.0)) <= SMALL.get(op, 100) + padding, (op, real, expected)


def test_what_the_sampler_is_sent(folders, measured):
    """All that no process has whole: norms are left out, which each tensor-parallel process has."""
    for name in ("sp-bf16", "pp-untied", "ep", "fsdp2", "fsdp2-bf16", "fsdp2-lora"):
        config, facts, _ = planned(folders, name)
        size = 2 if config.model.dtype.name == "bfloat16" else 4
        whole = (4 if name == "fsdp2-bf16" else size) * facts.parameters
        pushed = sum(measured[name][0]["pushed"].values())
        assert 0.5 * whole < pushed <= whole + 1100, (name, pushed, whole)
