"""``--help``: what there is, from the files of ``conf/`` and their comments."""

import re
import textwrap
from pathlib import Path

from twinkle_research.config.keys import hint
from twinkle_research.config.schema import GROUPS, config_dir, options, root_leaves
from twinkle_research.errors import ConfigError, nearest

_INTRO = """\
train.py: post-trains a language model, on answers that are given or by reinforcement.

  python train.py                      a LoRA on SmolLM2-135M learns who it is (a minute or two on a CPU)
  python train.py <group>=<option> <key>=<value> ...
"""

_OUTRO = """\
Examples
  python train.py model=tiny dry_run=true                               check all settings, print the plan, stop
  python train.py data=jsonl data.path=rows.jsonl run_dir=runs/mine     your own rows; the same line again continues
  python train.py model.path=Qwen/Qwen3-0.6B data=jsonl data.path=rows.jsonl model.dtype=bfloat16
  python train.py experiment=own_data data.path=rows.jsonl trainer.epochs=2
  python train.py run_dir=runs/mine data=jsonl data.path=rows.jsonl eval_only=true data.eval_path=test.jsonl
  python train.py loss=grpo                                             reinforcement: a tiny model learns to add
  python train.py launch.nproc_per_node=2                               two processes, data-parallel
  python train.py -m optimizer.lr=1e-4,3e-4 adapter.r=8,16              four runs, one after another, below sweeps/
  python train.py -m seed=0,1,2,3 hydra/launcher=joblib hydra.launcher.n_jobs=2    two at once (submitit_slurm: jobs)
  python train.py -m hydra/sweeper=optuna optimizer.lr='tag(log,interval(1e-5,1e-3))'  a study that looks for the best

More
  python train.py --help <group>       every setting of a group's options, with its default (e.g. --help optimizer)
  python train.py --help <key>         one setting (e.g. --help trainer.batch_size)
  python train.py <words> --cfg job    the whole configuration these words give; --resolve fills interpolations
  python train.py --info defaults      which files it is made of
  python train.py --hydra-help         Hydra's own flags
  eval "$(python train.py -sc install=bash)"     completion with the Tab key (also zsh; fish: install=fish)

Beside training
  python -m twinkle_research.chat <run_dir>                talk to what a run has trained
  python -m twinkle_research.report <run_dir>...           one page of plots; compares several runs
  python -m twinkle_research.sweep status|best|resume <sweep_dir>      the jobs of a sweep; goes on with it
  python -m twinkle_research.checkpoint --help             inspect, verify, convert, merge, to-hf
  python -m twinkle_research.model prepare model=<name> out=<folder>       a shipped model as a Hugging Face folder

Values: null means none; lists are [a,b]; text with commas is quoted twice: "data.default_system='Be brief, please.'"
Exit codes: 0 done, 1 the run failed, 2 the configuration is wrong, 75 stopped by a signal after saving (run the same
command again to continue), 130 left at once on a second signal.
"""

_WIDTH, _COLUMN = 120, 36

# What most runs set; each is shown with the comment that stands above it in conf/.
_MAIN_KEYS = (
    "model.path", "data.path", "data.max_length", "trainer.max_steps", "trainer.epochs", "trainer.batch_size",
    "optimizer.lr", "adapter.r", "scheduler.warmup_steps", "checkpoint.every", "tracking.wandb.mode", "launch.nproc_per_node",
)  # fmt: skip


def help_text(topics: list[str]) -> str:
    """The overview, or the page of each group or key in ``topics``."""
    if not topics:
        return overview()
    return "\n".join(_topic(topic) for topic in topics)


def overview() -> str:
    lines = [_INTRO, "Groups (the default first)"]
    defaults = _defaults()
    for group in (*GROUPS, "experiment"):
        names = sorted(options(group), key=lambda name: name != defaults.get(group))
        if names != ["none"]:
            text, indent = " | ".join(names), " " * 14
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {group:<11} ", subsequent_indent=indent)
    lines += ["", "Settings of the whole run"]
    lines += [_line(key, config_dir() / "train.yaml", key) for key in root_leaves()]
    lines += ["", "Settings that most runs care about (with the default options)"]
    for key in _MAIN_KEYS:
        group, _, rest = key.partition(".")
        lines.append(_line(key, config_dir() / group / f"{defaults[group]}.yaml", rest))
    return "\n".join([*lines, "", _OUTRO])


def _defaults() -> dict[str, str]:
    text = (config_dir() / "train.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^  - (\w+): (\w+)$", text, re.MULTILINE))


def _line(key: str, path: Path, name: str) -> str:
    comment, value = documented(path)[name]
    head = f"  {key}={value}"
    lines = textwrap.wrap(comment, _WIDTH - _COLUMN)
    first = [head] if len(head) >= _COLUMN else [f"{head:<{_COLUMN}}{lines.pop(0)}"]
    return "\n".join([*first, *(" " * _COLUMN + line for line in lines)])


def _topic(topic: str) -> str:
    group, _, key = topic.partition(".")
    if group in root_leaves() and not key:
        return _line(topic, config_dir() / "train.yaml", topic)
    if group not in (*GROUPS, "experiment"):
        raise ConfigError(f"--help {topic}: {hint(topic)}")
    pages = []
    for name in options(group):
        path = config_dir() / group / f"{name}.yaml"
        if not key:
            pages.append(f"{group}={name}\n{_indented(path)}")
        elif (found := documented(path).get(key)) is not None:
            pages.append(f"{group}={name}: {topic}={found[1]}\n    {found[0]}")
    if not pages:
        valid = {f"{group}.{k}" for name in options(group) for k in documented(config_dir() / group / f"{name}.yaml")}
        raise ConfigError(f"--help {topic}: no option of {group} has it; {nearest(topic, sorted(valid))}")
    return "\n".join(pages)


def _indented(path: Path) -> str:
    """The file without its defaults list where that says nothing to a reader."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "experiment":
        text = re.sub(r"^# @package _global_\n|^defaults:\n(?:  - .*\n)+", "", text, flags=re.MULTILINE)
    return "".join(f"    {line}\n" for line in text.splitlines())


def documented(path: Path) -> dict[str, tuple[str, str]]:
    """Dotted key -> (comment above it, value as written) of a file of conf/."""
    found: dict[str, tuple[str, str]] = {}
    comment: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif match := re.match(r"( *)(\w+):(?: (.*))?$", line):
            indent = len(match[1])
            parents = [parent for parent in parents if parent[0] < indent]
            names = [name for _, name in parents] + [match[2]]
            if path.parent.name == names[0]:
                names = names[1:]  # a @package _global_ option holds its settings below its group's name
            if names:
                found[".".join(names)] = (" ".join(comment), match[3] or "")
            parents.append((indent, match[2]))
            comment = []
        elif not text.startswith("-"):
            comment = []
    return found
