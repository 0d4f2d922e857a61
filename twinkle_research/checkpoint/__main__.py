"""python -m twinkle_research.checkpoint inspect|verify|convert|merge|to-hf"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.checkpoint.files import sha256_file
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manifest import manifests
from twinkle_research.checkpoint.names import BEST, LATEST, MANIFEST, TRAINER_STATE
from twinkle_research.checkpoint.newest import FOLDER, newest_checkpoint
from twinkle_research.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from rich.console import Console

WHERE = "a checkpoint (step-NNNNNN) or a run folder"


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m twinkle_research.checkpoint", description="Look at and export checkpoints.")
    commands = root.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what is in it")
    inspect.add_argument("path", type=Path, help=WHERE)
    verify = commands.add_parser("verify", help="hash every file; exit 1 and name what is missing or damaged")
    verify.add_argument("path", type=Path, help=f"{WHERE}; of a run folder all checkpoints are verified")
    convert = commands.add_parser("convert", help="make whole tensors of what checkpoint.format=sharded wrote: a checkpoint")
    convert.add_argument("path", type=Path, help=WHERE)
    convert.add_argument("-o", "--out", type=Path, required=True, help="checkpoint to write; must not exist")
    merge = commands.add_parser("merge", help="merge an adapter into its base: a Hugging Face folder")
    merge.add_argument("path", type=Path, help=f"{WHERE}, or a PEFT folder")
    merge.add_argument("--base", help="folder or hub id of the base model (default: what the adapter names)")
    merge.add_argument("--adapter", help="which one, where a checkpoint holds several")
    to_hf = commands.add_parser("to-hf", help="write what was trained as a Hugging Face folder; an adapter is merged")
    to_hf.add_argument("path", type=Path, help=f"{WHERE}, or a PEFT or Hugging Face folder")
    to_hf.add_argument("--base", help="as for merge")
    to_hf.add_argument("--adapter", help="as for merge")
    for command in (merge, to_hf):
        command.add_argument("-o", "--out", type=Path, required=True, help="folder to write; must not exist")
        command.add_argument("--dtype", help="float32, bfloat16, float16 (default: the run's model.dtype, or the base's)")
    return root


def inspect(path: Path, console: Console) -> None:
    """Prints the checkpoints of a run, then the newest (or the given) one in detail."""
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    if not (path / MANIFEST).exists() and root.is_dir():
        if not any(p.is_dir() for p in root.iterdir()):
            raise CheckpointError(f"{root}: there is no checkpoint")
        _print_list(root, console)
        path = newest_checkpoint(path, "size") or path
    reader = CheckpointReader(path)
    manifest = reader.manifest
    console.print(f"\n{path}", markup=False)
    layout = ", ".join(f"{key}={value}" for key, value in manifest.layout.items())
    console.print(f"step {manifest.step}, written by backend {manifest.backend} ({layout or 'no layout recorded'})", markup=False)
    if reader.has(TRAINER_STATE):
        state = reader.json(TRAINER_STATE)
        shown = {k: v for k, v in state.items() if isinstance(v, int | float | str) and k != "step"}
        console.print(", ".join(f"{key}={value}" for key, value in shown.items()), markup=False)
    _print_folders(reader, console)
    for name in reader.unlisted():
        console.print(f"{name} is not in the manifest; nothing reads it", markup=False)


def _print_list(root: Path, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    marks: dict[str, list[str]] = {}
    for pointer in (LATEST, BEST):
        if (root / pointer).is_file():
            marks.setdefault((root / pointer).read_text().strip(), []).append(pointer)
    table = Table("checkpoint", "step", "size", "eval/loss", "state", "", title=escape(str(root)), title_justify="left")
    known = manifests(root)
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        manifest = known.get(folder.name)
        metric = "" if manifest is None or manifest.metric is None else f"{manifest.metric:.4g}"
        step, size = ("", "") if manifest is None else (str(manifest.step), _size(manifest.total_bytes))
        table.add_row(escape(folder.name), step, size, metric, escape(_state(folder)), " ".join(marks.get(folder.name, [])))
    console.print(table)


def _state(folder: Path) -> str:
    try:
        problems = CheckpointReader(folder).problems("size")
    except CheckpointError as error:
        return str(error) if (folder / MANIFEST).exists() else "not finished"
    return "; ".join(problems) or "whole"


def _print_folders(reader: CheckpointReader, console: Console) -> None:
    from rich.table import Table

    table = Table("part", "files", "size", "tensors", "elements", "dtypes")
    parts: dict[str, list[str]] = {}
    for name in reader.manifest.files:
        parts.setdefault(name.rpartition("/")[0], []).append(name)
    for part, names in sorted(parts.items()):
        size = _size(sum(reader.manifest.files[name]["size"] for name in names))
        row = [part or ".", str(len(names)), size, "", "", ""]
        if any(name.endswith(".safetensors") for name in names):
            tensors = reader.tensors(part)
            specs = [tensors.spec(name) for name in tensors]
            elements = sum(math.prod(spec.shape) for spec in specs)
            row[3:] = [str(len(specs)), f"{elements:,}", " ".join(sorted({spec.dtype for spec in specs}))]
        table.add_row(*row)
    console.print(table)


def verify(path: Path, console: Console) -> None:
    """Hashes every file; raises CheckpointError naming all that is wrong."""
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    single = (path / MANIFEST).exists() or not root.is_dir()
    folders = [path] if single else sorted(p for p in root.iterdir() if p.is_dir())
    if not folders:
        raise CheckpointError(f"{root}: there is no checkpoint")
    wrong = []
    for folder in folders:
        try:
            reader = CheckpointReader(folder)
            problems = reader.problems("full")
        except CheckpointError as error:
            problems = [str(error)]
        if problems:
            wrong += [f"{folder.name}: {problem}" for problem in problems]
        else:
            digest = sha256_file(folder / MANIFEST)[:12]
            size = _size(reader.manifest.total_bytes)
            console.print(f"{folder.name}: whole, {len(reader.manifest.files)} files, {size} (manifest {digest})", markup=False)
    if wrong:
        raise CheckpointError(f"{path}: " + "\n  ".join(["damage found", *wrong]))


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000
    return f"{count:.3g} TB"


def main(arguments: list[str] | None = None) -> int:
    from rich.console import Console

    options = parser().parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    try:
        if options.command == "inspect":
            inspect(options.path, console)
        elif options.command == "verify":
            verify(options.path, console)
        elif options.command == "convert":
            from twinkle_research.checkpoint.convert import consolidate

            console.print(f"written: {consolidate(options.path, options.out)}", markup=False)
        else:
            from twinkle_research.checkpoint.merge import export, find_source

            if options.command == "merge" and not find_source(options.path, options.adapter).is_adapter:
                raise CheckpointError(f"{options.path} holds a whole model, nothing to merge; use to-hf")
            out = export(options.path, options.out, base=options.base, dtype=options.dtype, adapter=options.adapter)
            console.print(f"written: {out}", markup=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
