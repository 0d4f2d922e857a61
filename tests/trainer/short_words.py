"""A reward for runs of tests: it has something to say even of the answers of a random model."""


def short_words(completion: str) -> float | None:
    """The share of spaces and digits; None (not scored) for an answer that begins with a capital."""
    if completion[:1].isupper():
        return None
    return sum(c.isspace() or c.isdigit() for c in completion) / max(1, len(completion))
