"""The covering arrays that other tests take their cases from."""

import itertools

from pairwise import pairwise

CHOICES = [("a", "b", "c"), (1, 2, 3), (True, False), ("x", "y")]


def pairs(options):
    return set(itertools.combinations(enumerate(options), 2))


def test_all_pairs_meet_in_few_combinations():
    chosen = pairwise(CHOICES)
    wanted = set().union(*map(pairs, itertools.product(*CHOICES)))
    assert set().union(*map(pairs, chosen)) == wanted
    assert 9 <= len(chosen) <= 12 < 36  # 9: of the two groups of three


def test_all_pairs_that_can_meet():
    def is_possible(letter, number, flag, last):
        return not (letter == "a" and number != 1) and not (number == 2 and flag)

    chosen = pairwise(CHOICES, is_possible)
    possible = [options for options in itertools.product(*CHOICES) if is_possible(*options)]
    assert set(chosen) <= set(possible)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, possible))
