"""No setting without effect: every leaf of conf/ is read by the code that acts on it.

Tiny runs with the real parts are traced: each read of a setting is recorded with the place that reads it. Checking a
config, and copying a whole one to store, show or compare it, do not count as reading.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from twinkle_research.advantage import build_advantage
from twinkle_research.config import cli, compose, to_object
from twinkle_research.config.jobplan.hardware import hardware_of
from twinkle_research.config.keys import all_keys
from twinkle_research.dataset import build_prompts
from twinkle_research.dataset.config import MixSource
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.loss import build_loss
from twinkle_research.model.prepare import resolve_model_folder
from twinkle_research.reward import build_reward
from twinkle_research.reward.config import RewardPart
from twinkle_research.template import build_template
from twinkle_research.trainer import worker
from twinkle_research.trainer.config import TrainConfig

# Code that looks at settings only to check, copy or show them: (end of the file's name, functions that do act).
LOOKERS = {
    "checks.py": (),  # all that validates, config/rewardchecks.py and others
    "config/inputs.py": (),
    "jobplan/activations.py": (),
    "jobplan/fit.py": (),
    "jobplan/memory.py": (),
    "jobplan/meshtraffic.py": (),
    "jobplan/report.py": (),
    "jobplan/sampling.py": (),
    "jobplan/shapes.py": (),
    "jobplan/step.py": (),
    "jobplan/traffic.py": (),
    "jobplan/workload.py": (),
    "config/resume.py": (),
    "config/storage.py": (),
    "config/plan.py": ("run_plan", "_processes"),
}
COPYING = ("dataclasses.py", "copy.py")
COPIES = ("tracking/build.py", "<dictcomp>")  # the whole config, for W&B

# `name` says which option a section is, and architecture describes a shipped model: neither can be set.
SETTINGS = {k for k in all_keys() if not (k.endswith(".name") and k.count(".") == 1) and not k.startswith("model.architecture.")}

SETTINGS |= {f"data.sources.{field.name}" for field in dataclasses.fields(MixSource)}
SETTINGS |= {f"reward.parts.{field.name}" for field in dataclasses.fields(RewardPart)}

# Read only where there are other ranks to wait for, which one process has not.
BETWEEN_RANKS = {"launch.timeout_minutes": "distributed/runtime.py"}

Reads = dict[str, set[str]]

pytestmark = pytest.mark.timeout(400)  # many runs in one fixture


def acts(file: str, function: str) -> bool:
    looker = next((functions for end, functions in LOOKERS.items() if file.endswith(end)), None)
    copies = file.endswith(COPIES[0]) and function == COPIES[1]
    return not copies and "omegaconf" not in file and (looker is None or function in looker)


def traced(config: TrainConfig, reads: Reads) -> TrainConfig:
    """``config`` itself, its dataclasses made to note in ``reads`` who reads which setting."""

    def watch(node: Any, prefix: str) -> None:
        names = [field.name for field in dataclasses.fields(node)]
        for name in names:
            value = getattr(node, name)
            for inner in value if isinstance(value, list) else [value]:
                if dataclasses.is_dataclass(inner):
                    watch(inner, f"{prefix}{name}.")
        cls = type(node)

        def read(self: Any, name: str) -> Any:
            if name in names:
                frame = sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename.endswith(COPYING):
                    frame = frame.f_back  # who has this section as a dict
                code = frame.f_code
                if acts(code.co_filename, code.co_name):
                    reads.setdefault(prefix + name, set()).add(f"{Path(code.co_filename).name}:{code.co_name}")
            return cls.__getattribute__(self, name)

        node.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})

    watch(config, "")
    return config


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    """What a few runs of ``python train.py`` read, in this process."""
    found: Reads = {}
    folder = tmp_path_factory.mktemp("traced")
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2 =", "completion": " 4"}\n' * 6)

    def run(name: str, *words: str) -> None:
        cfg = compose(["model=tiny", "backend.device=cpu", "trainer.batch_size=2", f"run_dir={folder / name}", *words])
        assert cli.start_run(cfg, WorldInfo("plain")) == 0

    validate, load_config = cli.validate, worker.load_config
    few = ["trainer.sample_max_tokens=2", "data.eval_rows=2", "trainer.eval_every=1", "checkpoint.every=1", "adapter.dropout=0.1"]
    few.append("data.limit=6")
    own = ["data=jsonl", f"data.path={rows}", f"data.eval_path={rows}", "data.preview=1", "adapter=none", "optimizer=muon"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "validate", lambda *args, **kwargs: traced(validate(*args, **kwargs), found))
        patch.setattr(worker, "load_config", lambda path: traced(load_config(path), found))
        run("a", "trainer.max_steps=1", *few)
        run("a", "trainer.max_steps=3", *few)
        run("b", "trainer.max_steps=1", *own, "scheduler=wsd", "scheduler.decay_steps=1")
        run(
            "c",
            "trainer.max_steps=1",
            "optimizer=sgd",
            "scheduler=cosine",
            "tracking.wandb.mode=offline",
            "data.sample_prompts=[]",
            "data.limit=6",
        )
        sources = f"data.sources=[{{path: {rows}, train_on: last}}, {{path: {rows}}}]"
        run("d", "data=mix", sources, "trainer.max_steps=1")
        pairs = folder / "pairs.jsonl"
        pairs.write_text('{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}\n' * 2)
        for loss in ("dpo", "simpo", "orpo", "cpo", "kto_pair"):
            run(loss, f"loss={loss}", f"data.path={pairs}", "trainer.max_steps=1")
        rewards = folder / "rewards.py"
        rewards.write_text("def reward(completion):\n    return float(len(completion) % 2)\n")
        drawn = ["sampler.max_tokens=4", "reward=function", f"reward.path={rewards}:reward", "loss.beta=0.1", "data.eval_rows=2"]
        refreshed = ["trainer.reference=refreshed", "trainer.reference_every=1", "trainer.epochs=1", "data.rows=2"]
        run("transformers", "loss=grpo", "sampler=transformers", *drawn, *refreshed)
        run("vllm", "loss=grpo", "sampler=vllm", *drawn, "trainer.max_steps=1")
        late = ["backend.distributed_optimizer=true", "backend.overlap_grad_reduce=true", "backend.overlap_param_gather=true"]
        alone = ["adapter=none", "data.limit=6", "data.sample_prompts=[]", "trainer.max_steps=1"]
        run("megatron", "backend=megatron", "backend.recompute=full", *late, *alone)
    read_by_tasks_and_rewards(folder, found)
    read_by_losses_and_advantages(found)
    hardware_of(traced(to_object(compose(["model=tiny", "launch.gpu=h100_80gb"])), found).launch)  # what is planned for
    return found


def read_by_tasks_and_rewards(folder: Path, reads: Reads) -> None:
    """What prompts and rewards of each option read; they are built as a run builds them."""
    gsm8k, prompts, math = (folder / f"{name}.jsonl" for name in ("gsm8k", "prompts", "math"))
    gsm8k.write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    prompts.write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    math.write_text('{"problem": "2 + 2?", "solution": "It is \\\\boxed{4}."}\n')
    parts = "reward.parts=[{reward: exact}, {reward: length}]"
    for words in (
        ["data=sums", "reward=exact", "data.eval_rows=2", "data.rows=4"],
        ["data=countdown", "data.rows=4", "data.eval_rows=2", "reward=countdown"],
        ["data=reasoning_gym", "data.dataset=coin_flip", "data.rows=4", "data.eval_rows=2", "reward=reasoning_gym"],
        ["data=gsm8k", f"data.path={gsm8k}", f"data.eval_path={gsm8k}", "reward=gsm8k"],
        ["data=math", f"data.path={math}", "reward=math"],
        ["data=prompts", f"data.path={prompts}", "reward=numeric"],
        ["reward=format"],
        ["reward=length"],
        ["reward=function", "reward.path=GSM8KFormatReward"],
        ["reward=combined", parts],
    ):
        config = traced(to_object(compose(["model=tiny", "loss=grpo", *words])), reads)
        build_reward(config.reward).close()
        if words[0].startswith("data="):
            build_prompts(config.data, build_template(config.data, resolve_model_folder(config.model)), config.seed)


def read_by_losses_and_advantages(reads: Reads) -> None:
    """What losses on sampled answers and their advantages read; they are built as a run builds them."""
    for loss in ("grpo", "dr_grpo", "cispo", "sapo", "ppo", "reinforce", "importance_sampling", "rloo"):
        config = traced(to_object(compose(["model=tiny", f"loss={loss}"])), reads)
        build_loss(config.loss)
        build_advantage(config.advantage)


def test_every_setting_is_read(reads: Reads, root: Path) -> None:
    assert len(SETTINGS) > 80
    unread = sorted(SETTINGS - set(reads) - set(BETWEEN_RANKS))
    assert not unread, (
        f"no traced run reads {unread}. If they belong to a new option, let one of the runs of the fixture `reads` choose it; "
        "else read them in the code that acts on them"
    )
    for key, file in BETWEEN_RANKS.items():
        assert key in (root / "twinkle_research" / file).read_text()


def test_the_trace_tells_reading_from_looking(reads: Reads) -> None:
    assert "runtime.py:start" in reads["launch.threads"]
    assert not any(
        place.split(":")[0] in ("checks.py", "storage.py", "resume.py") for places in reads.values() for place in places
    )
