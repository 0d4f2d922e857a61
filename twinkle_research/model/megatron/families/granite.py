"""Granite 3 without experts: a Llama with other scales."""

from twinkle_research.model.megatron.families import llama

TABLE = llama.TABLE
