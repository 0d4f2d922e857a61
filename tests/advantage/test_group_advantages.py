"""Advantages relative to a group or a batch: S04, S05, and what must be true of any rewards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_research.advantage import (
    GAEAdvantage,
    GRPOAdvantage,
    OPOAdvantage,
    ReinforcePPAdvantage,
    RLOOAdvantage,
    Rollouts,
    build_advantage,
)
from twinkle_research.advantage import config as configs
from twinkle_research.errors import ConfigError, UserError

NONE = None


def rounded(advantages):
    return [round(a, 4) + 0.0 for a in advantages.tolist()]


# --- S04 and S05 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "right", "wrong"),
    [
        (GRPOAdvantage(scale="none"), 0.6250, -0.3750),
        (GRPOAdvantage(), 1.2076, -0.7246),
        (GRPOAdvantage(std="population"), 1.2910, -0.7746),
        (RLOOAdvantage(), 0.7143, -0.4286),
        (GRPOAdvantage(scale="none", baseline="leave_one_out"), 0.7143, -0.4286),
    ],
)
def test_the_table_of_s04(advantage, right, wrong):
    assert rounded(advantage([1, 1, 1, 0, 0, 0, 0, 0], num_generations=8)) == [right] * 3 + [wrong] * 5


EVERY = [
    GRPOAdvantage(),
    GRPOAdvantage(scale="batch", std="population", eps=1e-12),
    GRPOAdvantage(scale="none", baseline="leave_one_out"),
    RLOOAdvantage(),
    RLOOAdvantage(scale="group"),
    OPOAdvantage(),
    ReinforcePPAdvantage(baseline="group"),
    ReinforcePPAdvantage(baseline="group", whiten="sequence"),
]


def score(advantage, rewards, num_generations, lengths=None, **given):
    """One number an answer: of its first token, where they differ."""
    lengths = lengths or [2] * len(rewards)
    found = advantage.score(Rollouts(rewards, num_generations, lengths, **given)).advantages
    return torch.tensor([(a[0] if isinstance(a, list) else a) for a in found], dtype=torch.float64)


@pytest.mark.parametrize("advantage", EVERY)
@pytest.mark.parametrize(
    ("rewards", "num_generations"),
    [([0.7], 1), ([0.5] * 4, 4), ([0.1] * 3, 3), ([NONE] * 4, 4), ([NONE, 0.3, NONE], 3), ([0.1, 0.1, 0.7, 0.7], 2), ([], 4)],
)
def test_nothing_to_compare_is_exactly_0(advantage, rewards, num_generations):
    """Also where the mean of equal rewards is not exactly that reward: 0.1 + 0.1 + 0.1 is not 0.3."""
    assert score(advantage, rewards, num_generations).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("missing", [NONE, math.nan])
def test_an_unscored_answer_is_not_a_bad_one(missing):
    """S05: the baseline is that of the three scored answers."""
    rewards = [1, missing, 0, 1]
    third = 1 / 3
    assert GRPOAdvantage()(rewards, 4, scale="none").tolist() == pytest.approx([third, 0, -2 * third, third])
    assert rounded(GRPOAdvantage()(rewards, num_generations=4)) == [0.5774, 0, -1.1547, 0.5774]
    assert RLOOAdvantage()(rewards, 4).tolist() == pytest.approx([0.5, 0, -1, 0.5])
    assert rounded(GRPOAdvantage()([missing] * 4, 4)) == [0] * 4
    # Over the batch: mean 2/3 of three answers with 2 tokens each, variance 2/9.
    assert score(ReinforcePPAdvantage(), rewards, 4).tolist() == pytest.approx(
        [third / math.sqrt(2 / 9), 0, -2 * third / math.sqrt(2 / 9), third / math.sqrt(2 / 9)]
    )
    assert score(OPOAdvantage(), rewards, 4, [1, 50, 3, 4]).tolist() == pytest.approx([3 / 8, 0, -5 / 8, 3 / 8])


# --- values by hand -------------------------------------------------------------------------------------------------------


def test_batch_scale():
    """Groups [1, 0] and [4, 0]: means 0.5 and 2, sample std of all four rewards sqrt(43 / 12)."""
    std = math.sqrt(((1 - 1.25) ** 2 + 1.25**2 * 2 + 2.75**2) / 3)
    assert GRPOAdvantage(eps=1e-12)([1, 0, 4, 0], 2, scale="batch").tolist() == pytest.approx(
        [0.5 / std, -0.5 / std, 2 / std, -2 / std]
    )


def test_eps_is_added_to_the_std():
    assert GRPOAdvantage(std="population", eps=0.5)([1, 0], 2).tolist() == [0.5, -0.5]
    whitened = ReinforcePPAdvantage(eps=0.5).score(Rollouts([1.0, 0.0], 1, [1, 1]))
    assert whitened.advantages == [[0.5], [-0.5]]


def test_opo_weighs_rewards_by_length():
    """Baseline (3 x 1 + 1 x 0) / 4 = 0.75."""
    assert score(OPOAdvantage(), [1.0, 0.0], 2, [3, 1]).tolist() == [0.25, -0.75]
    assert score(OPOAdvantage(), [1.0, 0.0], 2, [0, 0]).tolist() == [0.0, 0.0]


def test_reinforce_pp_whitens_over_tokens():
    """Rewards 1 of 3 tokens and 0 of 1: mean 3/4, population variance 3/16."""
    std = math.sqrt(3 / 16)
    result = ReinforcePPAdvantage(eps=1e-12).score(Rollouts([1.0, 0.0], 1, [3, 1]))
    assert result.advantages == [pytest.approx([0.25 / std] * 3), pytest.approx([-0.75 / std])]
    result = ReinforcePPAdvantage(eps=1e-12, whiten="sequence").score(Rollouts([1.0, 0.0], 1, [3, 1]))
    assert result.advantages == [pytest.approx([1.0] * 3), pytest.approx([-1.0])]
    result = ReinforcePPAdvantage(whiten="none", gamma=0.5).score(Rollouts([1.0, 0.0], 1, [3, 0]))
    assert result.advantages == [[0.25, 0.5, 1.0], []]
    result = ReinforcePPAdvantage(baseline="group", whiten="none").score(Rollouts([1.0, 0.0, 5.0, 1.0], 2, [1] * 4))
    assert result.advantages == [[0.5], [-0.5], [2.0], [-2.0]]


# Log-ratios to the reference: 0.5 and -0.25 of the first answer, 1 of the second.
LOGPS = {"old_logps": [[-1.0, -1.25], [-1.0]], "ref_logps": [[-1.5, -1.0], [-2.0]]}


def test_the_kl_in_the_reward():
    """k1 takes 0.1 x (0.5 - 0.25) and 0.1 x 1 off the rewards 1 and 0, of the whole answer or token by token."""
    rollouts = Rollouts([1.0, 0.0], 2, [2, 1], **LOGPS)
    assert RLOOAdvantage(kl_coef=0.1).score(rollouts).advantages == pytest.approx([1.075, -1.075])
    by_token = ReinforcePPAdvantage(kl_coef=0.1, whiten="none").score(rollouts).advantages
    assert by_token == [pytest.approx([1 - 0.05 + 0.025, 1 + 0.025]), pytest.approx([-0.1])]
    squared = GRPOAdvantage(scale="none", kl_coef=0.1, kl_estimator="k2").score(rollouts).advantages
    first, second = 1 - 0.1 * (0.25 + 0.0625) / 2, -0.1 / 2
    assert squared == pytest.approx([(first - second) / 2, (second - first) / 2])
    # An unscored answer stays one; a policy above its reference is paid less for the same answer.
    assert RLOOAdvantage(kl_coef=0.1).score(Rollouts([NONE, 0.0], 2, [2, 1], **LOGPS)).advantages == [0.0, 0.0]
    assert RLOOAdvantage(kl_coef=0.1).score(Rollouts([0.5, 0.5], 2, [2, 1], **LOGPS)).advantages[1] < 0


# --- properties -----------------------------------------------------------------------------------------------------------

REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(-5, 5)), min_size=4, max_size=4)
BATCHES = st.lists(REWARDS, min_size=1, max_size=3)
CASES = settings(max_examples=40, deadline=None, derandomize=True)


def flat(groups):
    return [r for group in groups for r in group]


def close(ours, other):
    torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("advantage", EVERY)
@CASES
@given(groups=BATCHES, seed=st.integers(0, 99))
def test_properties(advantage, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = flat(groups)
    lengths = torch.randint(1, 9, (len(rewards),), generator=generator).tolist()
    found = score(advantage, rewards, 4, lengths)
    assert torch.isfinite(found).all()
    assert all(a == 0 for a, r in zip(found.tolist(), rewards, strict=True) if r is None)
    # The order of answers in a group, and of groups, only moves the advantages.
    order = torch.randperm(4, generator=generator).tolist()
    moved = [4 * g + k for g in reversed(range(len(groups))) for k in order]
    close(score(advantage, [rewards[i] for i in moved], 4, [lengths[i] for i in moved]), found[moved])
    # A reward that everybody gets changes nothing. (Multiples of 1/8 keep equal rewards equal.)
    coarse = [None if r is None else round(r * 8) / 8 for r in rewards]
    shifted = [None if r is None else r + 2.0 for r in coarse]
    close(score(advantage, shifted, 4, lengths), score(advantage, coarse, 4, lengths))
    # The better answer of a group never has the smaller advantage.
    for start in range(0, len(rewards), 4):
        known = [(rewards[i], float(found[i])) for i in range(start, start + 4) if rewards[i] is not None]
        ordered = [a for _, a in sorted(known)]
        assert all(low <= high + 1e-9 for low, high in zip(ordered, ordered[1:]))


@CASES
@given(groups=BATCHES)
def test_grpo_and_rloo_sum_to_0_in_each_group_and_unit_std(groups):
    for advantage in (GRPOAdvantage(eps=1e-12), GRPOAdvantage(scale="none"), RLOOAdvantage()):
        found = advantage(flat(groups), 4).view(-1, 4)
        close(found.sum(1), torch.zeros(len(found), dtype=torch.float64))
    scaled = GRPOAdvantage(eps=1e-12)(flat(groups), 4).view(-1, 4)
    for row, group in zip(scaled, groups, strict=True):
        known = row[torch.tensor([r is not None for r in group])]
        rewards = [r for r in group if r is not None]
        if known.any() and max(rewards) - min(rewards) > 1e-3:
            assert float(known.std()) == pytest.approx(1.0, abs=1e-8)


@CASES
@given(groups=BATCHES, extra=REWARDS)
def test_groups_do_not_see_one_another(groups, extra):
    for advantage in (GRPOAdvantage(), RLOOAdvantage(), OPOAdvantage()):
        alone, together = score(advantage, flat(groups), 4), score(advantage, flat([*groups, extra]), 4)
        close(together[: len(alone)], alone)


# --- the seed's call, options, errors -------------------------------------------------------------------------------------


def test_the_seeds_call():
    advantages = GRPOAdvantage()([1.0, 0.0, 1.0, 1.0], num_generations=2, scale="group").tolist()
    assert [round(a, 4) for a in advantages] == [0.7071, -0.7071, 0.0, 0.0]
    table = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # several rewards an answer are summed
    assert GRPOAdvantage()(table, num_generations=2).tolist() == pytest.approx(advantages)
    assert GRPOAdvantage()([[0.5, 0.5], [0.0, 0.0], [1.0, None], [1.0, 1.0]], 2, "none").tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: GRPOAdvantage()([1.0] * 3, num_generations=2),
            ValueError,
            "3 rewards are not whole groups of num_generations=2",
        ),
        (lambda: GRPOAdvantage()([1.0, math.inf], 2), ValueError, "reward 1 is infinite"),
        (lambda: GRPOAdvantage()([1.0, 0.0], 2, scale="groups"), ConfigError, "did you mean 'group'"),
        (lambda: GRPOAdvantage(std="samples"), ConfigError, "advantage.std='samples'; did you mean 'sample'"),
        (lambda: GRPOAdvantage(eps=0.0), ConfigError, "advantage.eps must be finite and > 0"),
        (lambda: RLOOAdvantage(kl_coef=math.nan), ConfigError, "advantage.kl_coef must be in"),
        (lambda: RLOOAdvantage(kl_estimator="k1_plus"), ConfigError, "advantage.kl_estimator='k1_plus'"),
        (lambda: OPOAdvantage().score(Rollouts([1.0, 0.0], 2)), UserError, "OPOAdvantage needs lengths"),
        (lambda: RLOOAdvantage(kl_coef=1).score(Rollouts([1.0], 1)), UserError, "RLOOAdvantage needs old_logps and ref_logps"),
        (lambda: OPOAdvantage().score(Rollouts([1.0, 0.0], 2, [1])), ValueError, "lengths has 1 entries for 2 rewards"),
        (
            lambda: ReinforcePPAdvantage(kl_coef=1).score(Rollouts([1.0, 0.0], 2, [2, 2], **LOGPS)),
            ValueError,
            "an answer of 2 trained tokens has 1 log-probabilities",
        ),
        (
            lambda: RLOOAdvantage(kl_coef=1).score(Rollouts([1.0], 1, [1], [[-1.0]], [[-1.0, -2.0]])),
            ValueError,
            "answer 0 has 1 old_logps, but 2 ref_logps",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_config_and_class_have_the_same_defaults():
    built = {
        GRPOAdvantage: configs.GRPOAdvantageConfig(),
        RLOOAdvantage: configs.RLOOAdvantageConfig(),
        OPOAdvantage: configs.OPOAdvantageConfig(),
        ReinforcePPAdvantage: configs.ReinforcePPAdvantageConfig(),
        GAEAdvantage: configs.GAEAdvantageConfig(),
    }
    for cls, cfg in built.items():
        assert type(build_advantage(cfg)) is cls and vars(build_advantage(cfg)) == vars(cls())
    needs = build_advantage(configs.GAEAdvantageConfig(kl_coef=0.1)).needs
    assert needs == {"values", "old_logps", "ref_logps"}
