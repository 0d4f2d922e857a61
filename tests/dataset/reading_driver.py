"""Prints by how much resident memory grows, in MiB, when files are read: a short and a long one piece by piece, and the long one
with all rows kept. Each is measured in a child of a process that has freed nothing yet; arguments: the two files."""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from children import peak_growth_mib  # noqa: E402

from twinkle_research.dataset.reader import read_path  # noqa: E402


def main(short: Path, long: Path) -> None:
    result = long.with_name("peak")
    grown = {
        "short": peak_growth_mib(lambda: sum(1 for _ in read_path(short)), result),
        "long": peak_growth_mib(lambda: sum(1 for _ in read_path(long)), result),
        "long in memory": peak_growth_mib(lambda: list(read_path(long)), result),
    }
    print(json.dumps(grown))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
