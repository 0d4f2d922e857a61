"""What tasks and rewards must satisfy beyond types, and what they need from one another and from the loop."""

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinkle_research.dataset.config import (
    TASKS,
    CountdownDataConfig,
    GeneratedDataConfig,
    Gsm8kDataConfig,
    MathDataConfig,
    Operation,
    PromptsDataConfig,
    ReasoningGymDataConfig,
    SumsDataConfig,
    TrainOn,
    Truncation,
)
from twinkle_research.errors import ConfigError, nearest
from twinkle_research.reward.config import (
    CombinedRewardConfig,
    CountdownRewardConfig,
    FormatRewardConfig,
    FunctionRewardConfig,
    LengthKind,
    LengthRewardConfig,
    ReasoningGymRewardConfig,
    rewards_of,
)
from twinkle_research.trainer.config import RlTrainerConfig, TrainConfig

MANY_QUESTIONS = 2**20  # as in dataset/tasks/sums.py
_LARGEST_SPACE = 2**62
_OWN_FILE = re.compile(r"(.+\.py):(\w+)")


def task_problems(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if isinstance(data, (Gsm8kDataConfig, MathDataConfig, SumsDataConfig, ReasoningGymDataConfig)):
        yield from _placeholders(data.prompt, ("question",))
    if isinstance(data, GeneratedDataConfig) and data.eval_rows and not data.held_out:
        yield f"data.eval_rows={data.eval_rows} needs data.held_out > 0, the share of the questions that they are taken from"
    if isinstance(data, SumsDataConfig):
        yield from _sums(data)
    if isinstance(data, CountdownDataConfig):
        yield from _placeholders(data.prompt, ("numbers", "target"))
        yield from _rows_needed(data)
    if isinstance(data, ReasoningGymDataConfig):
        yield from _rows_needed(data)
        yield from (f"'data.options.{key}' cannot be set: write data.{own}" for key, own in _TAKEN.items() if key in data.options)
    if isinstance(data, PromptsDataConfig) and data.prompt_key == data.answer_key:
        yield f"data.prompt_key and data.answer_key are both '{data.prompt_key}'"


_TAKEN = {"seed": "seed", "size": "rows"}


def _placeholders(prompt: str, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if f"{{{name}}}" not in prompt:
            yield f"'data.prompt' must contain {{{name}}}, got {prompt!r}"


def _rows_needed(data: GeneratedDataConfig) -> Iterator[str]:
    if data.rows is None:
        yield f"data={data.name} has no end: give data.rows"


def _sums(data: SumsDataConfig) -> Iterator[str]:
    if data.min_operand > data.max_operand:
        yield f"data.min_operand={data.min_operand} is more than data.max_operand={data.max_operand}"
        return
    kinds = 3 if data.task is Operation.mixed else 1
    space = kinds * (data.max_operand - data.min_operand + 1) ** data.operands
    if space > _LARGEST_SPACE:
        yield f"data.max_operand={data.max_operand}, data.operands={data.operands}: more than 2^62 questions; lower one of them"
    elif data.rows is None and space > MANY_QUESTIONS:
        yield f"there are {space} questions with data.max_operand={data.max_operand}: give data.rows"


def reward_problems(config: TrainConfig) -> Iterator[str]:
    """Of a run that samples; what such a run needs at all, see rlchecks."""
    reward, data = config.reward, config.data
    if not isinstance(config.trainer, RlTrainerConfig):
        return
    if isinstance(data, TASKS):
        yield from _sampled(config)
    if isinstance(reward, CombinedRewardConfig):
        yield from _combined(reward)
    try:
        rewards = rewards_of(reward)
    except ConfigError as error:
        yield str(error)
        return
    for key, one in rewards.items():
        yield from _reward(key if key == "reward" else f"{key}.options", one, data)


def part_numbers(reward: Any) -> Iterator[tuple[str, str, float]]:
    """(where it stands, the key whose bounds it has, value) of each number in the parts of a combined reward."""
    try:
        rewards = rewards_of(reward) if isinstance(reward, CombinedRewardConfig) else {}
    except ConfigError:
        return  # reward_problems says why
    for key, one in rewards.items():
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{key}.options.{field.name}", f"reward.{field.name}", value


def _sampled(config: TrainConfig) -> Iterator[str]:
    """Settings of the data that only supervised runs have a use for."""
    data = config.data
    if data.train_on is not TrainOn.assistant:
        yield f"data.train_on={data.train_on.name} has no effect with loss={config.loss.name}: what was sampled is trained"
    if data.truncation in (Truncation.right, Truncation.split):
        yield (
            f"data.truncation={data.truncation.name} would cut off the end of a prompt, where its answer begins; write left, "
            "delete or raise"
        )
    if not data.cache or data.cache_dir is not None:
        key = "cache_dir" if data.cache else "cache"
        yield f"'data.{key}' has no effect with loss={config.loss.name}: prompts are encoded at each start"


def _combined(reward: CombinedRewardConfig) -> Iterator[str]:
    if not reward.parts:
        yield "reward=combined needs reward.parts, for example 'reward.parts=[{reward: gsm8k}, {reward: format, weight: 0.2}]'"
    for number, part in enumerate(reward.parts):
        if not math.isfinite(part.weight) or part.weight == 0:
            yield f"'reward.parts[{number}].weight' must be a finite number other than 0, got {part.weight}"


def _reward(key: str, reward: Any, data: Any) -> Iterator[str]:
    if isinstance(reward, FormatRewardConfig):
        yield from _format(key, reward)
    if isinstance(reward, LengthRewardConfig):
        yield from _length(key, reward)
    if isinstance(reward, FunctionRewardConfig) and not (_OWN_FILE.fullmatch(reward.path) or reward.path.strip()):
        yield f"'{key}.path' is empty; give my.module.fn or my_file.py:fn"
    if isinstance(reward, CountdownRewardConfig) and not isinstance(data, (CountdownDataConfig, PromptsDataConfig)):
        yield f"reward=countdown needs rows with numbers and target, which data={data.name} does not have; write data=countdown"
    if isinstance(reward, ReasoningGymRewardConfig) and not isinstance(data, ReasoningGymDataConfig):
        yield f"reward=reasoning_gym judges tasks of reasoning-gym, not data={data.name}; write data=reasoning_gym"


def _format(key: str, reward: FormatRewardConfig) -> Iterator[str]:
    if bool(reward.tags) == (reward.pattern is not None):
        yield f"give one of {key}.tags and {key}.pattern ({key}.tags=[] switches tags off)"
    for tag in reward.tags:
        if not re.fullmatch(r"[\w-]+", tag):
            yield f"'{key}.tags': {tag!r} is no name of a tag; write think, for example"
    if len(set(reward.tags)) < len(reward.tags):
        yield f"'{key}.tags' names a tag twice"
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            yield f"'{key}.pattern' is no regular expression: {error}"


def _length(key: str, reward: LengthRewardConfig) -> Iterator[str]:
    if reward.max_tokens is None:
        yield f"'{key}.max_tokens' is not set"
    elif reward.cache is not None and reward.kind is LengthKind.linear:
        yield f"'{key}.cache' has no effect with kind=linear"
    elif reward.cache is not None and reward.cache > reward.max_tokens:
        yield f"{key}.cache={reward.cache} is more than {key}.max_tokens={reward.max_tokens}"


def reward_files(config: TrainConfig) -> Iterator[str]:
    """Stage 2: whether ``reward.path=file.py:fn`` is there. The file is read, not run: it may import anything."""
    for key, reward in rewards_of(config.reward).items():
        found = _OWN_FILE.fullmatch(reward.path) if isinstance(reward, FunctionRewardConfig) else None
        if found is None:
            continue
        file = Path(found[1]).expanduser()
        if not file.is_file():
            yield f"{key}.path={reward.path}: there is no file {found[1]}"
            continue
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError) as error:
            yield f"{key}.path={reward.path}: {error}"
            continue
        names = _top_names(tree)
        if names is not None and found[2] not in names:
            yield f"{key}.path={reward.path}: {found[1]} has no {found[2]!r}; {nearest(found[2], sorted(names))}"


def _top_names(tree: ast.Module) -> set[str] | None:
    """What a module defines, imports or assigns anywhere outside functions and classes; None where that cannot be told."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return None if "*" in names or "__getattr__" in names else names
