"""Rewards: what a completion is worth. Names are resolved on first use."""

_HOME = {
    "Reward": "base",
    "RewardResult": "base",
    "Scorer": "base",
    "build_reward": "build",
    "ExactReward": "text",
    "NumericReward": "text",
    "FormatReward": "text",
    "LengthReward": "length",
    "GSM8KAccuracyReward": "gsm8k",
    "GSM8KFormatReward": "gsm8k",
    "MathReward": "math",
    "CountdownReward": "countdown",
    "FunctionReward": "function",
    "ReasoningGymReward": "reasoning_gym",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"twinkle_research.reward.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
