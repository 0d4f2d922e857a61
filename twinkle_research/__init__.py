"""twinkle_research: Hydra-configured post-training of language models.

Importing this package is cheap: nothing here imports torch.
"""

__version__ = "0.1.0"
