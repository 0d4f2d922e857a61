"""Trains a model: ``python train.py``, ``python train.py --help``.

Everything is configured in ``conf/`` and on the command line; this file only starts.
"""

import sys

from twinkle_research.config.cli import main

if __name__ == "__main__":
    sys.exit(main())
