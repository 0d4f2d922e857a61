"""Trajectories as a rollout hands them to rewards."""

from typing import Any

from twinkle_research.data_format import Trajectory


def sampled(completion: str, row: str = "rows.jsonl:1", num_tokens: int = 0, **columns: Any) -> Trajectory:
    """A completion of one prompt, with the row's columns."""
    prompt = {"role": "user", "content": "What is it?"}
    return {
        "messages": [prompt, {"role": "assistant", "content": completion}],
        "user_data": [[name, value] for name, value in columns.items()],
        "row": row,
        "completion": completion,
        "stop_reason": "stop",
        "num_tokens": num_tokens,
    }
