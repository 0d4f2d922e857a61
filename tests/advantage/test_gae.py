"""Generalized advantage estimation against hand-worked values and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_research.advantage import GAEAdvantage, Rollouts
from twinkle_research.errors import UserError

PLAIN = GAEAdvantage(gamma=0.5, gae_lambda=0.5, normalize=False)
VALUES = [[0.4, 0.8, 0.2], [1.0]]


def test_by_hand():
    """Reward 1 at the last of three tokens: deltas 0.5 x 0.8 - 0.4 = 0, 0.5 x 0.2 - 0.8 = -0.7, 1 - 0.2 = 0.8; gamma lambda is
    0.25: advantages 0 + 0.25 x -0.5, -0.7 + 0.25 x 0.8 = -0.5, 0.8. The second answer has -1 - 1."""
    result = PLAIN.score(Rollouts([1.0, -1.0], 1, values=VALUES))
    assert result.advantages == [pytest.approx([-0.125, -0.5, 0.8]), pytest.approx([-2.0])]
    assert result.returns == [pytest.approx([0.275, 0.3, 1.0]), pytest.approx([-1.0])]


def test_the_kl_is_taken_off_each_token():
    """0.1 x (old - ref) = 0.05, 0 and -0.1 off the deltas above."""
    logps = {"old_logps": [[-1.0, -1.0, -1.0]], "ref_logps": [[-1.5, -1.0, 0.0]]}
    advantage = GAEAdvantage(gamma=0.5, gae_lambda=0.5, normalize=False, kl_coef=0.1)
    result = advantage.score(Rollouts([1.0], 1, values=VALUES[:1], **logps))
    last = 0.8 + 0.1
    middle = -0.7 + 0.25 * last
    assert result.advantages == [pytest.approx([-0.05 + 0.25 * middle, middle, last])]


def test_a_cut_answer_ends_where_it_was_cut_unless_a_value_is_passed():
    ended = PLAIN.score(Rollouts([0.0], 1, values=[[0.6]]))
    going_on = PLAIN.score(Rollouts([0.0], 1, values=[[0.6]], last_values=[2.0]))
    assert (ended.advantages, ended.returns) == ([[-0.6]], [[0.0]])
    assert (going_on.advantages, going_on.returns) == ([[pytest.approx(0.4)]], [[1.0]])  # 0.5 x 2 - 0.6


def test_an_unscored_answer_teaches_neither_policy_nor_critic():
    result = GAEAdvantage().score(Rollouts([None, 1.0, 0.0], 1, values=[[0.3, 0.7], [0.5], [0.5]]))
    assert result.advantages[0] == [0.0, 0.0] and result.returns[0] == [0.3, 0.7]
    assert result.advantages[1:] == [[pytest.approx(1.0)], [pytest.approx(-1.0)]]  # whitened without the first
    everything = GAEAdvantage().score(Rollouts([None], 1, values=[[0.3]]))
    assert everything.advantages == [[0.0]] and everything.returns == [[0.3]]


def test_answers_without_trained_tokens():
    result = GAEAdvantage().score(Rollouts([1.0, 0.0], 1, values=[[], [0.5, 0.1]]))
    assert result.advantages[0] == [] and result.returns[0] == []
    assert sum(result.advantages[1]) == pytest.approx(0)


def test_equal_advantages_are_exactly_0_when_normalized():
    assert GAEAdvantage().score(Rollouts([0.1] * 3, 1, values=[[0.0]] * 3)).advantages == [[0.0]] * 3


ANSWERS = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=ANSWERS, rewards=st.lists(st.floats(-2, 2), min_size=5, max_size=5), gamma=st.floats(0, 1))
def test_limits(values, rewards, gamma):
    rewards = rewards[: len(values)]
    rollouts = Rollouts(rewards, 1, values=values)
    # lambda 1: the discounted reward less the value. lambda 0: one step ahead.
    whole = GAEAdvantage(gamma=gamma, gae_lambda=1.0, normalize=False).score(rollouts)
    ahead = GAEAdvantage(gamma=gamma, gae_lambda=0.0, normalize=False).score(rollouts)
    for i, own in enumerate(values):
        n = len(own)
        assert whole.advantages[i] == pytest.approx([gamma ** (n - 1 - t) * rewards[i] - own[t] for t in range(n)], abs=1e-9)
        after = [*own[1:], 0.0]
        reward = [0.0] * (n - 1) + [rewards[i]]
        assert ahead.advantages[i] == pytest.approx([reward[t] + gamma * after[t] - own[t] for t in range(n)], abs=1e-9)
    # Returns are advantages plus values, and normalizing leaves them as they are.
    normalized = GAEAdvantage(gamma=gamma, gae_lambda=1.0).score(rollouts)
    assert normalized.returns == whole.returns
    flat = torch.tensor([a for answer in normalized.advantages for a in answer], dtype=torch.float64)
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6)
    spread = float(torch.tensor([a for answer in whole.advantages for a in answer], dtype=torch.float64).std())
    assert spread < 1e-3 or float(flat.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_the_seeds_calls():
    rewards = GAEAdvantage.build_token_rewards(
        [1.0, 2.0], [2, 1], old_logps=[[-1.0, -2.0], [-1.0]], ref_logps=[[-1.5, -2.0], [-1.0]], kl_coef=0.1
    )
    assert rewards == [pytest.approx([-0.05, 1.0]), pytest.approx([2.0])]
    assert GAEAdvantage.build_token_rewards([1.0], [3]) == [[0.0, 0.0, 1.0]]
    advantages, returns = GAEAdvantage()(rewards, [[0.5, 0.25], [1.0]], normalize=False)
    direct = GAEAdvantage(normalize=False, kl_coef=0.1).score(
        Rollouts([1.0, 2.0], 1, old_logps=[[-1.0, -2.0], [-1.0]], ref_logps=[[-1.5, -2.0], [-1.0]], values=[[0.5, 0.25], [1.0]])
    )
    assert advantages.tolist() == [pytest.approx(direct.advantages[0]), [direct.advantages[1][0], 0.0]]
    assert returns.tolist() == [pytest.approx(direct.returns[0]), [direct.returns[1][0], 0.0]]
    whitened, same_returns = GAEAdvantage()(rewards, [[0.5, 0.25], [1.0]])
    assert float(whitened.sum()) == pytest.approx(0, abs=1e-12) and torch.equal(same_returns, returns)


def test_without_values():
    with pytest.raises(UserError, match="GAEAdvantage needs values"):
        GAEAdvantage().score(Rollouts([1.0]))
