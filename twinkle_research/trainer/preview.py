"""``data.preview``: the first rows as they are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from twinkle_research.dataset.build import build_datasets
from twinkle_research.dataset.preview import preview
from twinkle_research.model.prepare import resolve_model_folder
from twinkle_research.template import build_template

if TYPE_CHECKING:
    from twinkle_research.dataset import Dataset
    from twinkle_research.template import Template
    from twinkle_research.trainer.config import TrainConfig


def print_preview(rows: Dataset, template: Template, n: int) -> None:
    """Trained tokens in colour; between marks where the output is no terminal."""
    console = Console()
    console.print(preview(rows, template, n, marks=not console.is_terminal), soft_wrap=True)


def preview_only(cfg: TrainConfig) -> None:
    """What a dry run shows of the data. Prepares the model's folder, for its tokenizer."""
    template = build_template(cfg.data, resolve_model_folder(cfg.model))
    print_preview(build_datasets(cfg.data, template, cfg.seed)[0], template, cfg.data.preview)
