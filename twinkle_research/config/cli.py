"""The command line: compose, validate, show the plan, start.

A plain run is composed here; ``-m``, ``--cfg``, ``--info``, completion and Hydra's other flags go through ``hydra.main``.
Both use the same strict loader and end in ``start_run``. What only a run needs is imported when there is one, so that a
wrong word is answered at once.
"""

import contextlib
import difflib
import os
import re
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from twinkle_research import __version__
from twinkle_research.config.checks import validate
from twinkle_research.config.composing import compose_with_hydra, register_launchers, strict_loader, without_hydra
from twinkle_research.config.keys import all_keys, annotation_of, hint
from twinkle_research.config.schema import GROUPS, config_dir, register
from twinkle_research.distributed.env import WorldInfo, detect
from twinkle_research.distributed.failures import leave_word
from twinkle_research.errors import EXIT_INTERRUPTED, ConfigError, UserError, nearest
from twinkle_research.trainer.config import TrainConfig

HEAD_START = 2.0  # seconds


def main(argv: list[str] | None = None, resume: bool = False) -> int:
    """Runs the command line and returns the exit code (twinkle_research.errors). ``resume``: the words of a sweep that is there,
    of which only what has not finished is run."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _main(argv, resume)
    except UserError as error:
        leave_word(error)
        if _rank_speaks():
            kind = "config error" if error.exit_code == 2 else "error"
            print(f"{kind}: {error}", file=sys.stderr)
        else:
            time.sleep(HEAD_START)  # torchrun ends all ranks with the first that leaves, before the message maybe
        return error.exit_code


def _rank_speaks() -> bool:
    """One message, however many ranks torchrun or srun have started."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _main(argv: list[str], resume: bool) -> int:
    if "--help" in argv or "-h" in argv:
        from twinkle_research.config.helptext import help_text

        with _reader_may_leave():
            print(help_text([word for word in argv if not word.startswith("-") and "=" not in word]))
        return 0
    argv, args = _arguments(argv)
    if args.version:
        print(f"twinkle_research {__version__} (Hydra {hydra.__version__})")
        return 0
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir={args.config_dir}: there is no such folder")
    if args.multirun and (args.cfg or args.info):
        raise ConfigError(f"-m and --{'cfg' if args.cfg else 'info'} at once: leave out -m, and give what is swept one value")
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve goes with --cfg: write --cfg job --resolve")
    if args.package and args.package.partition(".")[0] not in (*GROUPS, "hydra"):
        raise ConfigError(f"--package {args.package}: there is no such section; {nearest(args.package, [*GROUPS, 'hydra'])}")
    world = detect()
    if _is_plain(args):
        cfg = compose_with_hydra(args.overrides)
        if cfg.hydra.mode != RunMode.MULTIRUN:
            _refuse_words_of_sweeps(args.overrides)
            experiment = cfg.hydra.runtime.choices.get("experiment")
            try:
                return start_run(without_hydra(cfg), world)
            except ConfigError as error:
                raise ConfigError(f"{error}{_from_experiment(str(error), experiment, args.overrides)}") from error
    return _through_hydra(argv, args, world, resume)


def _arguments(argv: list[str]) -> tuple[list[str], Namespace]:
    """The words in the order that argparse needs, and what they say."""
    parser = get_args_parser()
    for action in parser._actions:
        if "--version" in action.option_strings:
            parser._remove_action(action)
            for name in action.option_strings:
                parser._option_string_actions.pop(name)
    parser.add_argument("--version", action="store_true")
    flags = list(parser._option_string_actions)

    def refuse(self: ArgumentParser, message: str) -> NoReturn:
        flag = next((word for word in argv if word.startswith("-") and word.partition("=")[0] not in flags), None)
        if flag is None:
            raise ConfigError(message)
        bare = flag.lstrip("-").partition("=")[0].replace("-", "_")
        meant = [key for key in (*GROUPS, *all_keys()) if bare in (key, key.rpartition(".")[2]) and not key.endswith(".name")]
        if bare in meant or len(meant) == 1:
            key = bare if bare in meant else meant[0]
            value = "true" if annotation_of(key) is bool else "..."
            raise ConfigError(f"unknown flag '{flag}': settings and groups have no dashes; write {key}={value}")
        close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
        raise ConfigError(
            f"unknown flag '{flag}'; " + (f"did you mean '{close[0]}'?" if close else f"as a setting, {hint(bare)}")
        )

    parser.error = refuse.__get__(parser)  # type: ignore[method-assign]
    argv = _flags_last(argv, parser)
    return argv, parser.parse_args(argv)


def _flags_last(argv: list[str], parser: ArgumentParser) -> list[str]:
    """argparse wants the settings in one piece: ``model=tiny -m seed=0,1`` becomes ``model=tiny seed=0,1 -m``."""
    settings: list[str] = []
    flags: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            settings.append(word)
            continue
        flags.append(word)
        action = parser._option_string_actions.get(word)  # None: unknown, or its value is behind a =
        takes_next = action is not None and (
            action.nargs is None or (action.nargs == "?" and rest[:1] and rest[0] in action.choices)
        )
        if takes_next and rest:
            flags.append(rest.pop(0))
    return settings + flags


def _is_plain(args: Namespace) -> bool:
    special = (
        args.multirun, args.cfg, args.info, args.shell_completion, args.hydra_help, args.config_path, args.config_name,
        args.config_dir, args.package, args.resolve, args.experimental_rerun,
    )  # fmt: skip
    return not any(special)


# --- one run --------------------------------------------------------------------------------------------------------


def start_run(cfg: DictConfig, world: WorldInfo, in_process: bool = True) -> int:
    """Validates, shows the plan and starts; in this process where one is enough and no sweep needs it clean."""
    from twinkle_research.config.plan import print_plan, run_plan
    from twinkle_research.distributed.launcher import start
    from twinkle_research.trainer.rundir import new_run_dir

    config = validate(cfg, files=world.rank == 0)  # another rank would see what rank 0 has just written
    plan = run_plan(config, world)
    if not (config.dry_run or world.joins or config.run_dir):
        config.run_dir = str(new_run_dir(config.loss.name, config.model.name))
    if config.dry_run:
        if world.rank == 0:
            with _reader_may_leave():
                print_plan(plan, config)
                _finish_dry_run(config)
        return 0
    if world.rank == 0:
        print_plan(plan, config)
    return start(config, plan, in_process=in_process)


def _refuse_words_of_sweeps(words: list[str]) -> None:
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if re.match(r"hydra[./](sweep|launcher|sweeper)\b", key):
            raise ConfigError(f"'{key}' has no effect without -m (--multirun)")


def _from_experiment(message: str, name: str | None, words: list[str]) -> str:
    """A line for each setting in ``message`` that the file of the experiment ``name`` gives: nobody has written it."""
    path = config_dir() / "experiment" / f"{name}.yaml"
    if not path.is_file():
        return ""
    stored = OmegaConf.load(path)
    said = {word.lstrip("+").partition("=")[0] for word in words}
    given = [key for key in all_keys() if key in message and key not in said and OmegaConf.select(stored, key) is not None]
    return "".join(f"\n{key}={OmegaConf.select(stored, key)} comes from experiment={name}; give another one" for key in given)


def _finish_dry_run(config: TrainConfig) -> None:
    if config.data.preview:
        from twinkle_research.trainer.preview import preview_only

        preview_only(config)
    print("dry run: nothing was started or written")


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """``python train.py --help | head``: what nobody reads is not an error."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# --- sweeps and Hydra's other commands ------------------------------------------------------------------------------


def _through_hydra(argv: list[str], args: Namespace, world: WorldInfo, resume: bool) -> int:
    from twinkle_research.sweep.launch import SweepRun

    sweeps = args.multirun or _is_plain(args)
    if sweeps and world.joins:
        raise ConfigError(
            f"--multirun under {world.kind} would run the whole sweep once a rank: start it plainly, or one job each"
        )
    if sweeps and any(word.lstrip("+").startswith("run_dir=") for word in args.overrides):
        raise ConfigError("run_dir is one folder, and a sweep makes one a job: give hydra.sweep.dir=<folder> instead")
    register()
    register_launchers()
    sweep = SweepRun(argv, start_run, world, resume)
    parents: set[Path] = set()  # of the folder of the sweep, whose own name has the time in it

    def check(cfg: DictConfig) -> None:
        parents.add(Path(cfg.hydra.sweep.dir).parent)
        validate(without_hydra(cfg))

    def run(cfg: DictConfig) -> None:
        """A run with Hydra's flags; the jobs of a sweep are started by its launcher."""
        _refuse_words_of_sweeps(args.overrides)
        if code := start_run(cfg, world):
            raise SystemExit(code)

    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(run)
    code = 0
    with (
        _hydra_surroundings(argv, sweeps),
        strict_loader(each_job=check if sweeps else None),
        _no_trace_of_refused(parents),
        _completion(args),
        sweep.in_hydra(),
    ):
        try:
            app()
        except SystemExit as left:
            if left.code not in (0, None):
                code = 2 if args.cfg else int(left.code)  # Hydra has said that there is no such --package
        except KeyboardInterrupt:  # between two jobs, which take care of it themselves
            code = EXIT_INTERRUPTED
        return sweep.close(code)


@contextlib.contextmanager
def _no_trace_of_refused(parents: set[Path]) -> Iterator[None]:
    """A sweep writes its plan before the first job is looked at: where none was started it says nothing."""
    started = time.time() - 1  # times of files are coarser
    try:
        yield
    except ConfigError:
        for parent in filter(Path.is_dir, parents):
            for plan in parent.glob("*/multirun.yaml"):
                inside = {path.name: path for path in plan.parent.iterdir()}
                new = all(path.stat().st_mtime >= started for path in inside.values())
                if new and inside.keys() <= {"multirun.yaml", "sweep.json", "sweep.lock", "study.db"}:
                    for path in inside.values():
                        path.unlink()
                    plan.parent.rmdir()
            if parent.name == "sweeps" and not any(parent.iterdir()):
                parent.rmdir()
        raise


@contextlib.contextmanager
def _hydra_surroundings(argv: list[str], sweeps: bool) -> Iterator[None]:
    """Hydra reads sys.argv, and prints errors its own way unless this variable is set."""
    old_argv, old_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with contextlib.ExitStack() as stack:
        words = list(argv)
        # Hydra makes a folder for each job of a sweep; a dry run must leave none.
        if sweeps and any(re.fullmatch(r"\+{0,2}dry_run=(true|yes|on|1)", word, re.IGNORECASE) for word in argv):
            words.insert(0, f"hydra.sweep.dir={stack.enter_context(tempfile.TemporaryDirectory())}")
        sys.argv = [old_argv[0], *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = old_argv
            os.environ.pop("HYDRA_FULL_ERROR")
            if old_flag is not None:
                os.environ["HYDRA_FULL_ERROR"] = old_flag


def _completion(args: Namespace) -> contextlib.AbstractContextManager[None]:
    if not args.shell_completion:
        return contextlib.nullcontext()
    from twinkle_research.config.completion import value_completion

    return value_completion()
