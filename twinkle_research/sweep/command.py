"""``python -m twinkle_research.sweep status|best|resume|report <sweep_dir>``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from twinkle_research.distributed.failures import user_text
from twinkle_research.errors import UserError
from twinkle_research.sweep.folder import ARRAY, Sweep
from twinkle_research.trainer.runlock import is_held


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.sweep", description="Looks at a sweep, or goes on with it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("status", "a table of its jobs"),
        ("best", "the best job: folder, settings, objective"),
        ("report", "writes its sweep.json and report.html anew"),
        ("resume", "runs what has not finished (failed, killed, stopped, never started), as it was started, in its folders"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("sweep_dir", type=Path)
        if name in ("status", "best"):
            command.add_argument("--json", action="store_true", help="for programs")
    array = commands.add_parser("array", help="writes what a task of an array runs (called by slurm/sweep.sbatch)")
    array.add_argument("sweep_dir", type=Path)
    array.add_argument("task", type=int)
    options, words = parser.parse_known_args(arguments)
    if words and options.command != "array":
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    try:
        return run(options, words)
    except UserError as error:
        print(user_text(error, error.exit_code), file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace, words: list[str]) -> int:
    if options.command == "array":
        from twinkle_research.sweep.arrays import prepare_task

        prepare_task(options.sweep_dir, options.task, words)
        return 0
    sweep = Sweep.load(options.sweep_dir)
    sweep.refresh()
    if options.command == "resume":
        return resume(sweep)
    if options.command == "report":
        return report(sweep)
    return status(sweep, options.json) if options.command == "status" else best(sweep, options.json)


def status(sweep: Sweep, as_json: bool) -> int:
    if as_json:
        print(json.dumps(sweep.as_dict(), indent=1))
        return 0
    from twinkle_research.sweep.console import status_text

    print(status_text(sweep))
    return 0


def best(sweep: Sweep, as_json: bool) -> int:
    ranked = sweep.ranked()
    if not ranked:
        if sweep.plan.metric is None:
            raise UserError(
                f"{sweep.path}: its jobs have no objective in common, so none is the best. Jobs of one kind have: of supervised "
                "runs the loss, of reinforcement runs eval/accuracy (data.eval_rows=...)"
            )
        raise UserError(f"{sweep.path}: no job has finished with an objective yet; see python -m twinkle_research.sweep status")
    job = ranked[0]
    found = {"job": job.number, "folder": str(sweep.folder(job.number)), "metric": sweep.plan.metric, "objective": job.objective}
    found["direction"] = sweep.plan.direction
    if as_json:
        print(json.dumps(found | {"overrides": job.overrides, "step": job.step}, indent=1))
    else:
        print(f"{found['folder']}\n{found['metric']} {job.objective:.6g} at step {job.step}\n{' '.join(job.overrides)}")
    return 0


def report(sweep: Sweep) -> int:
    from twinkle_research.sweep.pages import write_page

    if is_held(sweep.path / "sweep.lock"):
        raise UserError(f"{sweep.path}: the sweep runs, and writes them itself")
    sweep.save()
    print(write_page(sweep) or f"{sweep.path}: no job has a run yet")
    return 0


def resume(sweep: Sweep) -> int:
    from twinkle_research.config.cli import main as train

    if sweep.is_complete():
        print(f"{sweep.path}: all its {len(sweep.jobs)} jobs have finished")
        return 0
    path = sweep.path.resolve()
    if sweep.plan.launcher == ARRAY:
        tasks = ",".join(str(job.number) for job in sweep.unfinished())
        words = shlex.join([*sweep.plan.command, f"hydra.sweep.dir={path}"])
        raise UserError(
            f"{sweep.path} is an array of Slurm, whose options are yours to give; in {sweep.plan.directory}:\n"
            f"sbatch --array={tasks} slurm/sweep.sbatch {words}"
        )
    if not Path(sweep.plan.directory).is_dir():
        raise UserError(f"{sweep.plan.directory}, the folder that the sweep was started in, is gone: its paths lead nowhere")
    os.chdir(sweep.plan.directory)
    return train([*sweep.plan.command, f"hydra.sweep.dir={path}"], resume=True)
