"""Rewards as the config asks for them: one, or several with weights."""

import math

import pytest
from trajectories import sampled

from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.reward import FunctionReward, Scorer, build_reward
from twinkle_research.reward.base import Part
from twinkle_research.reward.config import (
    REWARDS,
    CombinedRewardConfig,
    ExactRewardConfig,
    LengthRewardConfig,
    PartName,
    RewardPart,
    Unscored,
)
from twinkle_research.trainer.config import NoneConfig

ROWS = [sampled("7", num_tokens=60, answer="7"), sampled("8", num_tokens=100, answer="7")]


def test_one_reward() -> None:
    with build_reward(ExactRewardConfig()) as scorer:
        result = scorer.score(ROWS)
    assert result.totals == [1, 0] and result.parts == {"exact": [1, 0]} and result.counts == {"unscored": 0}
    assert scorer.score([]).totals == []


def test_weighted_sum() -> None:
    """1 * exact + 0.5 * length, the length being -(60 - 50) / 50 and -1 for cache 50 of 100."""
    parts = [
        RewardPart(PartName.exact),
        RewardPart(PartName.length, 0.5, {"max_tokens": 100, "cache": 50}),
        RewardPart(PartName.length, -0.25, {"max_tokens": 100, "kind": "linear"}),
    ]
    with build_reward(CombinedRewardConfig(parts=parts)) as scorer:
        result = scorer.score(ROWS)
    assert result.parts == {"exact": [1, 0], "length": [-0.2, -1], "length_2": [-0.6, -1]}
    assert result.totals == pytest.approx([1 - 0.1 + 0.15, -0.5 + 0.25])


def scorer_of(*scores: list[float | None], skip: bool = False) -> Scorer:
    parts = [Part(f"p{i}", 2.0, FunctionReward(lambda completions, given=given: given)) for i, given in enumerate(scores)]
    return Scorer(parts, skip)


def test_what_a_part_cannot_judge_has_no_reward() -> None:
    """Case S05: not scored is not 0."""
    rows = [*ROWS, *ROWS]
    result = scorer_of([1, None, math.nan, None], [1, 1, 1, None]).score(rows)
    assert result.totals == [4, None, None, None] and result.counts["unscored"] == 3
    assert result.parts["p0"] == [1, None, None, None]
    result = scorer_of([1, None, math.nan, None], [1, 1, 1, None], skip=True).score(rows)
    assert result.totals == [4, 2, 2, None] and result.counts["unscored"] == 1


def test_counts_of_the_parts_come_with_their_names() -> None:
    reward = FunctionReward(lambda completions: [0] * len(completions))
    reward.take_counts = lambda: {"timeouts": 2}  # type: ignore[method-assign]
    assert Scorer([Part("mine", 1.0, reward)]).score(ROWS).counts == {"mine/timeouts": 2, "unscored": 0}


def test_a_failing_part_closes_those_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FunctionReward, "close", lambda self: closed.append(self))
    parts = [
        RewardPart(PartName.function, options={"path": "GSM8KFormatReward"}),
        RewardPart(PartName.function, options={"path": "no.such.thing"}),
    ]
    with pytest.raises(ConfigError, match=r"reward.parts\[1\].path='no.such.thing': no module 'no'"):
        build_reward(CombinedRewardConfig(parts=parts))
    assert len(closed) == 1


def test_options_of_parts_are_checked() -> None:
    for part, reason in [
        (
            RewardPart(PartName.length, options={"max_token": 3}),
            r"unknown key 'reward.parts\[0\].options.max_token'; did you mean",
        ),
        (RewardPart(PartName.length, options={"max_tokens": "many"}), r"'reward.parts\[0\].options': .*'many'"),
        (RewardPart(PartName.format, options={"name": "x"}), "unknown key"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            build_reward(CombinedRewardConfig(parts=[part]))
    with pytest.raises(ConfigError, match="reward=length needs max_tokens"):
        build_reward(LengthRewardConfig())
    with pytest.raises(ConfigError, match="reward=none gives no reward"):
        build_reward(NoneConfig())


def test_each_reward_can_be_a_part() -> None:
    assert set(REWARDS) == {name.value for name in PartName}
    assert {skip.name for skip in Unscored} == {"unscored", "skip"}


@pytest.mark.parametrize(
    ("reward", "good", "bad", "reason"),
    [
        ("exact", {"answer": "x"}, {"anser": "x"}, "reward=exact needs a column 'answer'; did you mean 'anser'"),
        ("numeric", {"answer": 7}, {"answer": "seven"}, "reward=numeric needs a number as the answer, got 'seven'"),
        ("gsm8k", {"answer": "So.\n#### 7"}, {"answer": "So."}, "reward=gsm8k needs a number as the answer, got 'So.'"),
        ("countdown", {"numbers": [1, 2], "target": 3}, {"numbers": [1, 2]}, "reward=countdown needs a column 'target'"),
        ("countdown", {"nums": [1, 2], "target": 3}, {"numbers": ["1"], "target": 1}, "a list of whole numbers"),
        ("math", {"answer": r"\frac12"}, {}, "reward=math needs a column 'answer'"),
        ("length", {}, None, ""),
        ("format", {}, None, ""),
    ],
)
def test_rows_are_checked_before_anything_is_sampled(reward: str, good: dict, bad: dict | None, reason: str) -> None:
    options = {"max_tokens": 9} if reward == "length" else {}
    prompt = {"messages": [{"role": "user", "content": "?"}], "row": "rows.jsonl:4"}
    with build_reward(CombinedRewardConfig(parts=[RewardPart(PartName[reward], options=options)])) as scorer:
        scorer.check([{**prompt, "user_data": [[k, v] for k, v in good.items()]}])
        if bad is not None:
            with pytest.raises(DataError, match=f"rows.jsonl:4: .*{reason}"):
                scorer.check([{**prompt, "user_data": [[k, v] for k, v in bad.items()]}])


def test_columns_of_a_function_are_checked_too() -> None:
    prompt = {"messages": [{"role": "user", "content": "?"}], "row": "rows.jsonl:4", "user_data": [["answer", "x"]]}

    def judge(completion: str, answer: str) -> float:
        raise AssertionError("nothing is judged yet")

    Scorer([Part("a", 1.0, FunctionReward(judge))]).check([prompt])
    with pytest.raises(UserError, match="parameter 'anser': rows.jsonl:4 has no such column"):
        Scorer([Part("a", 1.0, FunctionReward(lambda completion, anser: 0))]).check([prompt])
    Scorer([Part("a", 1.0, FunctionReward("ExactReward"))]).check([prompt])
    with pytest.raises(DataError, match="rows.jsonl:4: reward=exact needs"):
        Scorer([Part("a", 1.0, FunctionReward("ExactReward"))]).check([{**prompt, "user_data": []}])
