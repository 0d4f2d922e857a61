"""Keyed randomness: every draw is named by what it is for, so results do not depend on the order of calls,
the number of ranks or a resume. There is no global sequential generator."""

import hashlib


def derive_seed(seed: int, *key: object) -> int:
    """A 63-bit seed for the draw named by ``key``, e.g. ``derive_seed(0, "data_order", epoch)``."""
    text = "\x1f".join([str(seed), *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
