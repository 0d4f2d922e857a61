"""Samplers: prompts to completions with log-probabilities. Names are resolved on first use."""

__all__ = ["Sampler", "TransformersSampler", "VLLMSampler"]


def __getattr__(name: str):
    if name == "Sampler":
        from twinkle_research.sampler.base import Sampler

        return Sampler
    if name == "TransformersSampler":
        from twinkle_research.sampler.transformers import TransformersSampler

        return TransformersSampler
    if name == "VLLMSampler":
        from twinkle_research.sampler.vllm import VLLMSampler

        return VLLMSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
