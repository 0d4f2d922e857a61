"""Encoded rows as a person reads them, trained tokens coloured."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset.features import Features

if TYPE_CHECKING:
    from rich.text import Text

    from twinkle_research.dataset.stream import IterableDataset
    from twinkle_research.template.base import Template


def preview(dataset: Features | IterableDataset, template: Template, n: int = 3, marks: bool = False) -> Text:
    """The first ``n`` encoded rows, not shuffled. Trained tokens are bold green; with ``marks`` also between ⟦ and ⟧."""
    from rich.text import Text

    if isinstance(dataset, Features):
        rows = (dataset[int(i)] for i in dataset.epoch_order(0, shuffle=False, seed=0)[:n])
        features = (feature for row in rows for feature in (row if isinstance(row, list) else [row]))
    else:
        features = islice(dataset, n)
    out = Text()
    for feature in features:
        trained = sum(label != IGNORE_INDEX for label in feature["labels"])
        out.append(f"{feature['row']}: {feature['length']} tokens, {trained} trained\n", style="bold cyan")
        for piece, is_trained in template.trained_spans(feature):
            text = f"⟦{piece}⟧" if is_trained and marks else piece
            out.append(text, style="bold green" if is_trained else "dim")
        out.append("\n\n")
    return out
