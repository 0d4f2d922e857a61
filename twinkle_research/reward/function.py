"""``reward=function``: somebody's own code."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.reward.base import Reward, columns_of, completion_of, row_of
from twinkle_research.symbols import load_symbol

MODES = ("auto", "sample", "batch")
# Parameters that are filled in from the rollout; all others are columns of the row.
_OF_SAMPLE: dict[str, Callable[[Trajectory], Any]] = {
    "trajectory": lambda trajectory: trajectory,
    "completion": completion_of,
    "prompt": lambda trajectory: _prompt(trajectory),
}
_OF_BATCH = {"trajectories": "trajectory", "completions": "completion", "prompts": "prompt"}


class FunctionReward(Reward):
    """Your own function, or an object or class with ``__call__``, sync or async.

    ``path``: ``my.module.fn``, ``file.py:fn``, or the function itself. It is called with one sample or with a batch of them
    (``per``; "auto" goes by the names of its parameters) and returns a number, or a list of as many numbers. Parameters are
    filled in by name: ``completion`` (text), ``prompt`` (messages), ``trajectory`` (all there is), or the name of one of the
    row's columns, such as ``answer``; for a batch ``completions``, ``prompts``, ``trajectories`` and columns, each a list.
    ``**kwargs`` gets the remaining columns. With ``per`` given, a first parameter of another name gets the trajectory or
    trajectories. ``args``: arguments of a class. None and NaN mean: not judged. Async calls of a batch run side by side.

    Raises UserError naming function and row where it fails or gives something else.
    """

    def __init__(self, path: Any, per: str = "auto", args: dict[str, Any] | None = None, key: str = "reward.path"):
        if per not in MODES:
            raise ConfigError(f"per={per!r}: {nearest(per, MODES)}")
        self.name = f"{key}={path}" if isinstance(path, str) else getattr(path, "__name__", repr(path))
        self.function = _made(_load(path, key), args or {}, self.name)
        self.parameters = list(inspect.signature(self.function).parameters.values())
        self.batch = self._is_batch(per)
        self._takes_samples_first = per != "auto"
        self._loop = _Loop()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        samples = list(trajectories)
        if not samples:
            return []
        groups = [samples] if self.batch else [[sample] for sample in samples]
        results = [self._called(group) for group in groups]
        if any(map(inspect.isawaitable, results)):
            results = self._loop.run([self._awaited(result, group) for result, group in zip(results, groups, strict=True)])
        if self.batch:
            results = self._listed(results[0], samples)
        return [self._number(result, sample) for result, sample in zip(results, samples, strict=True)]

    def check(self, trajectory: Trajectory) -> None:
        """Whether the row has the columns that are asked for. (In a batch it is enough that one row has them.)"""
        if isinstance(self.function, Reward):
            self.function.check(trajectory)
        elif not self.batch:
            self._arguments([{**trajectory, "completion": ""}])

    def take_counts(self) -> dict[str, int]:
        return self.function.take_counts() if isinstance(self.function, Reward) else {}

    def close(self) -> None:
        self._loop.close()
        if isinstance(self.function, Reward):
            self.function.close()

    # --- the call -----------------------------------------------------------------------------------------------

    def _is_batch(self, per: str) -> bool:
        names = {parameter.name for parameter in self.parameters}
        sample, batch = names & set(_OF_SAMPLE), names & set(_OF_BATCH)
        if per != "auto":
            return per == "batch"
        if bool(sample) == bool(batch):
            have = f"it has {', '.join(sorted(names)) or 'no parameters'}"
            raise ConfigError(
                f"{self.name}: cannot tell whether it judges one sample or a batch: name a parameter completion (or prompt, "
                f"trajectory), or completions (or prompts, trajectories), or set reward.per=sample or batch; {have}"
            )
        return bool(batch)

    def _called(self, group: list[Trajectory]) -> Any:
        first, named = self._arguments(group)
        try:
            return self.function(*first, **named)
        except Exception as error:  # somebody's own code: whatever it raises is shown with the row that caused it
            raise self._failed(error, group) from error

    async def _awaited(self, result: Any, group: list[Trajectory]) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # as above
            raise self._failed(error, group) from error

    def _arguments(self, group: list[Trajectory]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of a call."""
        columns = {name: None for trajectory in group for name in columns_of(trajectory)}
        first: list[Any] = []
        named: dict[str, Any] = {}
        for number, parameter in enumerate(self.parameters):
            name, kind = parameter.name, parameter.kind
            if kind is parameter.VAR_KEYWORD:
                named |= {column: self._column(column, group) for column in columns if column not in named}
            elif name in (_OF_BATCH if self.batch else _OF_SAMPLE):
                values = [_OF_SAMPLE[_OF_BATCH.get(name, name)](trajectory) for trajectory in group]
                named[name] = values if self.batch else values[0]
            elif name in columns:
                named[name] = self._column(name, group)
            elif number == 0 and self._takes_samples_first and kind is not parameter.KEYWORD_ONLY:
                first.append(group if self.batch else group[0])
            elif parameter.default is parameter.empty and kind is not parameter.VAR_POSITIONAL:
                raise UserError(
                    f"{self.name}: nothing to give for its parameter '{name}': {_rows(group)} has no such column; "
                    f"{nearest(name, [*columns, *(_OF_BATCH if self.batch else _OF_SAMPLE)])}"
                )
        return first, named

    def _column(self, name: str, group: list[Trajectory]) -> Any:
        values = [columns_of(trajectory).get(name) for trajectory in group]
        return values if self.batch else values[0]

    # --- the result ---------------------------------------------------------------------------------------------

    def _listed(self, result: Any, samples: list[Trajectory]) -> list[Any]:
        scores = list(result) if isinstance(result, list | tuple) else np.asarray(result).tolist()
        if not isinstance(scores, list):
            raise UserError(
                f"{self.name} must return a list of {len(samples)} numbers, one for each sample of a batch; it returned "
                f"{_shown(result)} for {_rows(samples)}"
            )
        if len(scores) != len(samples):
            raise UserError(f"{self.name} returned {len(scores)} rewards for {len(samples)} samples ({_rows(samples)})")
        return scores

    def _number(self, result: Any, sample: Trajectory) -> float | None:
        if result is None:
            return None
        value = np.asarray(result)
        if value.shape != () or value.dtype.kind not in "biuf" or np.isinf(value):
            raise UserError(f"{self.name} must return a finite number or None; it returned {_shown(result)} for {row_of(sample)}")
        return None if math.isnan(value) else float(value)

    def _failed(self, error: Exception, group: list[Trajectory]) -> UserError:
        return UserError(f"{self.name} raised {type(error).__name__}: {error} for {_rows(group)}")


class _Loop:
    """An event loop in a thread of its own, so that it works wherever it is used from; it starts when it is needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """All results, in order; after the first error the others are cancelled."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="reward", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(_all(awaitables), self._loop).result()

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None


async def _all(awaitables: list[Awaitable[Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def split_file_path(path: str) -> tuple[str, str] | None:
    """("some/file.py", "fn") of ``some/file.py:fn``; None for a dotted path."""
    file, colon, name = path.rpartition(":")
    return (file, name) if colon and file.endswith(".py") else None


def _load(path: Any, key: str) -> Any:
    parts = split_file_path(path) if isinstance(path, str) else None
    if parts is None:
        return load_symbol(path, "twinkle_research.reward", key)
    file, name = Path(parts[0]).expanduser(), parts[1]
    if not file.is_file():
        raise ConfigError(f"{key}={path}: there is no file {file}")
    module_name = f"reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    if name not in vars(module):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{key}={path}: {file} has no {name!r}; {nearest(name, names)}")
    return getattr(module, name)


def _made(function: Any, args: dict[str, Any], name: str) -> Any:
    if isinstance(function, type):
        try:
            function = function(**args)
        except TypeError as error:
            raise ConfigError(f"{name} does not take these arguments: {error}") from error
    elif args:
        raise ConfigError(f"arguments {', '.join(args)} have no effect: {name} is a function, not a class")
    if not callable(function):
        raise ConfigError(f"{name} is {_shown(function)}, which cannot be called")
    return function


def _prompt(trajectory: Trajectory) -> list[Any]:
    """The messages before the last answer."""
    messages = trajectory["messages"]
    return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages


def _rows(group: list[Trajectory]) -> str:
    if len(group) == 1:
        return row_of(group[0])
    return f"{len(group)} samples, {row_of(group[0])} to {row_of(group[-1])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
