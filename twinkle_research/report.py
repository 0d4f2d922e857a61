"""``python -m twinkle_research.report <run_dir>... [-o out.html]``: a page with curves, answers and settings of runs."""

import sys

from twinkle_research.tracking.report import main

if __name__ == "__main__":
    sys.exit(main())
