"""Tasks and rewards in the config: what is refused, what is filled in, what is stored."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from twinkle_research.config import compose, config_dir, to_object, validate
from twinkle_research.config.resume import diff, resumable_changes
from twinkle_research.config.rewardchecks import MANY_QUESTIONS
from twinkle_research.config.storage import load_config, save_config
from twinkle_research.dataset.config import GSM8K_ID, SumsDataConfig
from twinkle_research.dataset.tasks import sums
from twinkle_research.errors import ConfigError
from twinkle_research.reward import build_reward
from twinkle_research.reward.config import REWARDS, PartName, RewardPart, part_config

TINY = ["model=tiny"]
SAMPLED = [*TINY, "loss=grpo"]
COMBINED = [*SAMPLED, "reward=combined"]


def refused(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(compose(words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data=sums", "data.prompt=what?"], "'data.prompt' must contain {question}, got 'what?'"),
        (["data=countdown", "data.prompt={numbers}"], "'data.prompt' must contain {target}"),
        (["data=countdown", "data.rows=null"], "data=countdown has no end: give data.rows"),
        (["data=countdown", "data.numbers=1"], "'data.numbers' must be in [2, 8], got 1"),
        (["data=sums", "data.min_operand=9", "data.max_operand=3"], "data.min_operand=9 is more than data.max_operand=3"),
        (["data=sums", "data.max_operand=9999"], "there are 100000000 questions with data.max_operand=9999: give data.rows"),
        (["data=sums", "data.max_operand=999999999", "data.operands=8", "data.rows=5"], "more than 2^62 questions"),
        (["data=sums", "data.held_out=0"], "data.eval_rows=512 needs data.held_out > 0"),
        (["data=sums", "data.held_out=1"], "'data.held_out' must be in [0, 1), got 1.0"),
        (["data=reasoning_gym"], "'data.dataset' is not set"),
        (
            ["data=reasoning_gym", "data.dataset=gcd", "+data.options.size=3"],
            "'data.options.size' cannot be set: write data.rows",
        ),
        (["data=prompts", "data.path=/tmp", "data.answer_key=prompt"], "data.prompt_key and data.answer_key are both 'prompt'"),
        (["data=prompts"], "data=prompts needs rows: give data.path=<file or folder> or data.dataset_id=<hub id>"),
        (["data=sums", "data.eval_path=/tmp"], "it is a setting of"),
        (["data=sums", "data.on_error=skip"], "it is a setting of"),
        (["data=gsm8k", "data.rows=5"], "it is a setting of"),
    ],
)
def test_tasks_that_cannot_be(words: list[str], reason: str) -> None:
    assert reason in refused([*TINY, *words])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["reward=countdown"], "reward=countdown needs rows with numbers and target, which data=sums does not have"),
        (["reward=reasoning_gym"], "reward=reasoning_gym judges tasks of reasoning-gym, not data=sums; write data=reasoning_gym"),
        (["reward=format", "reward.tags=[]"], "give one of reward.tags and reward.pattern"),
        (["reward=format", "reward.pattern=x"], "give one of reward.tags and reward.pattern (reward.tags=[] switches tags off)"),
        (["reward=format", "reward.tags=[]", "reward.pattern='('"], "'reward.pattern' is no regular expression"),
        (["reward=format", "reward.tags=[a,a]"], "'reward.tags' names a tag twice"),
        (["reward=format", "reward.tags=['<a>']"], "'<a>' is no name of a tag"),
        (["reward=length", "reward.kind=linear", "reward.cache=3"], "'reward.cache' has no effect with kind=linear"),
        (["reward=length", "reward.max_tokens=9", "reward.cache=10"], "reward.cache=10 is more than reward.max_tokens=9"),
        (["reward=numeric", "reward.tolerance=-1"], "'reward.tolerance' must be >= 0, got -1.0"),
        (["reward=math", "reward.timeout=0"], "'reward.timeout' must be > 0, got 0.0"),
        (["reward=math", "reward.workers=0"], "'reward.workers' must be >= 1, got 0"),
        (["reward=function"], "'reward.path' is not set"),
        (["reward=function", "reward.path=''"], "'reward.path' is empty"),
        (["reward=function", "reward.path=no_such.py:fn"], "reward.path=no_such.py:fn: there is no file no_such.py"),
        (["reward=function", "reward.path=a.b", "reward.per=each"], "must be one of auto, sample, batch"),
        (["reward=exact", "reward.tolerance=1"], "it is a setting of reward=numeric, not of the chosen option"),
        (["reward=exat"], "did you mean 'exact'?"),
    ],
)
def test_rewards_that_cannot_be(words: list[str], reason: str) -> None:
    assert reason in refused([*SAMPLED, *words])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def clos(trajectory):\n    return 1.0\n", "judge.py has no 'close'; did you mean 'clos'?"),
        ("def close(trajectory)\n    return 1.0\n", "expected ':' (judge.py, line 1)"),
        ("import os\nif os.name:\n    def close(t):\n        return 1.0\n", None),
        ("from elsewhere import *\n", None),
        ("from elsewhere import near as close\n", None),
        ("close, other = object(), 1\n", None),
    ],
)
def test_a_file_with_a_reward_is_read_before_the_run(tmp_path, monkeypatch, text: str, reason: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(text)
    cfg = compose([*SAMPLED, "reward=function", "reward.path=judge.py:close"])
    if reason is None:
        validate(cfg)
    else:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            validate(cfg)


def test_what_only_supervised_runs_have_a_use_for() -> None:
    text = refused([*SAMPLED, "data.train_on=all", "data.truncation=right", "data.cache=false"])
    assert "data.train_on=all has no effect with loss=grpo: what was sampled is trained" in text
    assert "data.truncation=right would cut off the end of a prompt, where its answer begins; write left, delete or raise" in text
    assert "'data.cache' has no effect with loss=grpo" in text
    text = refused([*SAMPLED, "data.truncation=split", "data.cache_dir=/tmp/x"])
    assert "data.truncation=split would cut off" in text and "'data.cache_dir' has no effect with loss=grpo" in text


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ("[]", "reward=combined needs reward.parts, for example"),
        ("[{reward: exact, weight: 0}]", "'reward.parts[0].weight' must be a finite number other than 0, got 0.0"),
        ("[{reward: exact, weight: .nan}]", "reward.parts[0].weight"),
        ("[{reward: exat}]", "did you mean 'exact'?"),
        ("[{reward: exact, wait: 1}]", "reward.parts[0].wait"),
        ("[{reward: exact, options: {ignore_cse: true}}]", "unknown key 'reward.parts[0].options.ignore_cse'; did you mean"),
        ("[{reward: exact}, {reward: math, options: {timeout: -1}}]", "'reward.parts[1].options.timeout' must be > 0, got -1.0"),
        ("[{reward: numeric, options: {tolerance: x}}]", "'reward.parts[0].options'"),
        (
            "[{reward: length, options: {kind: linear, cache: 3}}]",
            "'reward.parts[0].options.cache' has no effect with kind=linear",
        ),
        ("[{reward: countdown}]", "reward=countdown needs rows with numbers and target"),
        ("[{reward: function, options: {path: no_such.py:f}}]", "there is no file no_such.py"),
        ("[{weight: 1}]", "reward.parts[0].reward"),
    ],
)
def test_parts_that_cannot_be(parts: str, reason: str) -> None:
    assert reason in refused([*COMBINED, f"reward.parts={parts}"])


def test_a_length_penalty_ends_where_completions_do() -> None:
    config = validate(compose([*SAMPLED, "reward=length", "sampler.max_tokens=40"]))
    assert config.reward.max_tokens == 40
    assert validate(compose([*SAMPLED, "reward=length", "reward.max_tokens=9"])).reward.max_tokens == 9
    parts = "reward.parts=[{reward: exact}, {reward: length}, {reward: length, options: {max_tokens: 9}}]"
    config = validate(compose([*COMBINED, parts, "sampler.max_tokens=40"]))
    assert [part.options.get("max_tokens") for part in config.reward.parts] == [None, 40, 9]
    with build_reward(config.reward) as scorer:
        assert [part.name for part in scorer.parts] == ["exact", "length", "length_2"]


def test_a_path_replaces_the_hub_data_set_of_gsm8k() -> None:
    data = to_object(compose([*TINY, "data=gsm8k", "data.path=a.jsonl"])).data
    assert (data.path, data.dataset_id, data.subset) == ("a.jsonl", None, "default")
    data = to_object(compose([*TINY, "data=gsm8k"])).data
    assert (data.path, data.dataset_id, data.subset) == (None, GSM8K_ID, "main")
    assert "not both" in refused([*TINY, "data=gsm8k", "data.path=/tmp", "data.dataset_id=me/mine"])


def test_stored_and_read_again(tmp_path: Path) -> None:
    parts = "reward.parts=[{reward: exact}, {reward: length, weight: -0.5, options: {cache: 3}}]"
    config = validate(compose([*COMBINED, parts]))
    save_config(config, tmp_path)
    again = load_config(tmp_path)
    assert again == config and isinstance(again.reward.parts[1], RewardPart) and isinstance(again.data, SumsDataConfig)


def test_what_a_continued_run_may_change() -> None:
    old, new = (validate(compose([*SAMPLED, "reward=math", f"reward.workers={n}", f"reward.timeout={n}"])) for n in (1, 2))
    changes = diff(old, new)
    assert set(changes) == {"reward.workers", "reward.timeout"} and resumable_changes(changes) == {"reward.workers"}


def test_a_part_has_the_defaults_of_the_option() -> None:
    for name, node in REWARDS.items():
        stored = OmegaConf.load(config_dir() / "reward" / f"{name}.yaml")
        del stored["defaults"]
        assert OmegaConf.merge(OmegaConf.structured(node), stored) == OmegaConf.structured(node), name


def test_the_bounds_of_checks_and_code_are_the_same() -> None:
    assert MANY_QUESTIONS == sums.ALL_AT_ONCE
    for name, node in REWARDS.items():
        options = {"path": "a.b"} if name == "function" else {}
        assert type(part_config(RewardPart(PartName[name], options=options), "x")) is node
