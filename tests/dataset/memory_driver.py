"""Prints by how much resident memory grows, in MiB, when rows are encoded and all features read: of few rows and of more, and
with all of them in memory. Each is measured in a child; argument: a folder to work in."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "template"), str(TESTS), str(TESTS.parent)]

from chat_styles import make_tokenizer  # noqa: E402
from children import fork, peak_growth_mib, wait  # noqa: E402

from twinkle_research.dataset import Dataset, DatasetMeta, EncodedCache  # noqa: E402
from twinkle_research.template import Template  # noqa: E402

TEXT = "all work and no play makes a dull row of text "


def main(folder: Path) -> None:
    template = Template(tokenizer=make_tokenizer(None))

    def write(count: int) -> Path:
        path = folder / f"{count}.jsonl"
        with path.open("w") as file:
            for i in range(count):
                file.write(json.dumps({"prompt": f"row {i}: {TEXT}", "completion": "yes"}) + "\n")
        return path

    def on_disk(path: Path) -> Dataset:
        return Dataset.encoded_from(DatasetMeta(str(path)), template, cache=EncodedCache(folder / "kept"))

    def in_memory(path: Path) -> Dataset:
        return Dataset(DatasetMeta(str(path))).set_template(template).encode()

    def growth(count: int, encode: Callable[[Path], Dataset]) -> float:
        def encode_and_read() -> None:
            data = encode(folder / f"{count}.jsonl")
            assert len(data) == count and sum(feature["length"] for feature in data) == data.tokens

        return peak_growth_mib(encode_and_read, folder / "peak")

    for count in (300, 4_000, 12_000):
        assert wait(fork(lambda count=count: write(count))) == 0
    on_disk(folder / "300.jsonl")  # what is made once is made here
    measured = {
        "few rows": growth(4_000, on_disk),
        "more rows": growth(12_000, on_disk),
        "more rows in memory": growth(12_000, in_memory),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
