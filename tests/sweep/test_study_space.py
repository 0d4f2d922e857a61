"""What a study chooses from, and that its draws depend on the number of the job alone."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from twinkle_research.errors import ConfigError
from twinkle_research.sweep.study import grid_of, search_space, size_of, words_of


@pytest.mark.parametrize(
    ("word", "distribution"),
    [
        ("optimizer.lr=interval(1e-5,1e-3)", FloatDistribution(1e-5, 1e-3)),
        ("optimizer.lr=tag(log, interval(1e-5, 1))", FloatDistribution(1e-5, 1.0, log=True)),
        ("optimizer.weight_decay=interval(0,1)", FloatDistribution(0.0, 1.0)),  # a float, however its bounds are written
        ("adapter.r=interval(1,64)", IntDistribution(1, 64)),
        ("adapter.r=tag(log, interval(1,64))", IntDistribution(1, 64, log=True)),
        ("adapter.r=range(4,17,4)", IntDistribution(4, 16, step=4)),
        ("adapter.r=range(4,16,4)", IntDistribution(4, 12, step=4)),  # as in Hydra, the end is not in it
        ("seed=range(3)", IntDistribution(0, 2)),
        ("adapter.r=4,8,32", CategoricalDistribution(["4", "8", "32"])),
        ("loss=choice(grpo,rloo)", CategoricalDistribution(["grpo", "rloo"])),
        ("data.sample_prompts=[a],[b,c]", CategoricalDistribution(["[a]", "[b,c]"])),
        ("trainer.eval_every=null,10", CategoricalDistribution(["null", "10"])),
    ],
)
def test_distributions(word: str, distribution: object) -> None:
    space, fixed = search_space(["model=tiny", word])
    assert space == {word.partition("=")[0]: distribution} and fixed == ["model=tiny"]


def test_a_later_word_counts() -> None:
    space, fixed = search_space(["adapter.r=4,8", "seed=1", "adapter.r=16", "seed=interval(0,5)"])
    assert list(space) == ["seed"] and fixed == ["adapter.r=16"]


def test_a_grid_has_every_value() -> None:
    space, _ = search_space(["adapter.r=range(4,17,4)", "optimizer.lr=1e-4,1e-3,1e-2"])
    grid = grid_of(space)
    assert grid == {"adapter.r": [4, 8, 12, 16], "optimizer.lr": ["0.0001", "0.001", "0.01"]} and size_of(grid) == 12
    assert words_of({"adapter.r": 4, "optimizer.lr": "0.01"}, ["model=tiny"]) == [
        "model=tiny",
        "adapter.r=4",
        "optimizer.lr=0.01",
    ]


@pytest.mark.parametrize("word", ["optimizer.lr=interval(1,0.1)", "optimizer.lr=tag(log,interval(0,1))"])
def test_intervals_that_cannot_be(word: str) -> None:
    with pytest.raises(ConfigError, match="an interval goes from"):
        search_space([word])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("adapter.r=interval(1.2,1.8)", r"'adapter.r=interval\(1.2,1.8\)' holds no whole number"),
        ("model=interval(1,2)", "'model' is not a number"),
        ("model.path=interval(1,2)", "'model.path' is not a number"),
    ],
)
def test_intervals_of_what_has_none(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search_space([word])
