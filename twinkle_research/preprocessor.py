"""The seed's import root of the row processors."""

from twinkle_research.dataset.preprocessor import Preprocessor, SelfCognitionProcessor

__all__ = ["Preprocessor", "SelfCognitionProcessor"]
