"""Row processors: what turns a data set's own rows into rows that can be trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Preprocessor", "SelfCognitionProcessor"]


class Preprocessor(ABC):
    """Called with one row; returns a row, several rows (a list), or None to leave it out."""

    @abstractmethod
    def preprocess(self, row: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]] | None: ...

    def __call__(self, row: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]] | None:
        return self.preprocess(row)


class SelfCognitionProcessor(Preprocessor):
    """Fills in who the assistant is: ``{{NAME}}`` and ``{{AUTHOR}}`` (upper or lower case) anywhere in a row."""

    def __init__(self, model_name: str = "Tansy", model_author: str = "the Twinkle Research team"):
        self.values = {"{{NAME}}": model_name, "{{name}}": model_name, "{{AUTHOR}}": model_author, "{{author}}": model_author}

    def preprocess(self, row: dict[str, Any]) -> dict[str, Any]:
        return self._fill(row)

    def _fill(self, value: Any) -> Any:
        if isinstance(value, str):
            for placeholder, text in self.values.items():
                value = value.replace(placeholder, text)
            return value
        if isinstance(value, list):
            return [self._fill(v) for v in value]
        if isinstance(value, dict):
            return {k: self._fill(v) for k, v in value.items()}
        return value
