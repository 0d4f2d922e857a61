"""Shipped models as Hugging Face folders. Importing this brings no torch."""

from twinkle_research.model.prepare.folder import model_facts, prepare, resolve_model_folder

__all__ = ["model_facts", "prepare", "resolve_model_folder"]
