"""Config of the data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Dict, List, Optional, Tuple

from omegaconf import MISSING

OnError = Enum("OnError", {n: n for n in ("raise", "skip")})  # `raise` is a Python keyword, hence this form


class TrainOn(Enum):
    assistant = "assistant"  # every assistant turn
    last = "last"  # the last assistant turn only
    all = "all"  # every token


Truncation = Enum("Truncation", {n: n for n in ("raise", "left", "right", "split", "delete")})

OnChange = Enum("OnChange", {n: n for n in ("raise", "restart")})


class MixStop(Enum):
    """Where an epoch of a mixture ends."""

    first_exhausted = "first_exhausted"  # before any source would give a row twice
    all_exhausted = "all_exhausted"  # when every source has given each of its rows


@dataclass
class CommonDataConfig:
    """What every option of the group has."""

    # Whether each row is a preference: two answers to one prompt.
    pairs: ClassVar[bool] = False

    name: str = MISSING
    # Held-out rows: this many (which ones: see the option).
    eval_rows: int = 0
    # Answered greedily at each evaluation, so that one sees what changes.
    sample_prompts: List[str] = field(default_factory=list)
    shuffle: bool = True
    template: str = "Template"
    default_system: Optional[str] = None
    enable_thinking: bool = True
    train_on: TrainOn = TrainOn.assistant
    max_length: int = 1024
    truncation: Truncation = Truncation["raise"]
    # Put several rows side by side instead of padding them; each still sees only itself, so the result is the same.
    packing: bool = False
    # When a run is resumed and its data has changed: refuse, or start the data from its first row again.
    on_change: OnChange = OnChange["raise"]
    # Processes that encode rows.
    num_proc: int = 1
    # Keep encoded rows for later runs, in `cache_dir` ($TWINKLE_CACHE/encoded where it is null).
    cache: bool = True
    cache_dir: Optional[str] = None
    # Print this many encoded rows, trained tokens coloured, before the run.
    preview: int = 0


@dataclass
class ReadDataConfig(CommonDataConfig):
    """What every option has whose rows are read from somewhere."""

    # Held-out rows: a file of their own, or `eval_rows` rows taken out of the training data (keyed by the seed).
    eval_path: Optional[str] = None
    # A row that cannot be read: raise, or skip and count.
    on_error: OnError = OnError["raise"]


@dataclass
class SourceConfig:
    """One source of rows."""

    # A file or folder of JSONL, JSON, CSV or Parquet; or a hub id in dataset_id. Give one of the two.
    path: Optional[str] = None
    dataset_id: Optional[str] = None
    subset: str = "default"
    split: str = "train"
    # Only the first N rows.
    limit: Optional[int] = None
    # Class name of twinkle_research.dataset.preprocessor or dotted path of a function or class.
    processor: Optional[str] = None
    processor_args: Dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig(SourceConfig, ReadDataConfig):
    # Read, convert and tokenise rows while they are trained on, in their order; nothing is encoded before.
    streaming: bool = False


@dataclass
class PreferenceDataConfig(SourceConfig, ReadDataConfig):
    """Rows with a chosen and a rejected answer to one prompt."""

    pairs: ClassVar[bool] = True


@dataclass
class MixSource(SourceConfig):
    """One source of a mixture. What is null is as in the group."""

    # Share of the rows, relative to the weights of the other sources.
    weight: float = 1.0
    default_system: Optional[str] = None
    enable_thinking: Optional[bool] = None
    train_on: Optional[TrainOn] = None


@dataclass
class MixDataConfig(ReadDataConfig):
    sources: List[MixSource] = field(default_factory=list)
    stop: MixStop = MixStop.first_exhausted


GSM8K_ID, GSM8K_SUBSET = "openai/gsm8k", "main"


@dataclass
class Gsm8kDataConfig(SourceConfig, ReadDataConfig):
    """Rows with `question` and `answer`, the result after #### (Cobbe et al. 2021, arXiv:2110.14168)."""

    # What the model is asked; {question} stands for the question.
    prompt: str = MISSING


@dataclass
class MathDataConfig(SourceConfig, ReadDataConfig):
    """Rows with `problem` and `solution`, the result in \\boxed{} (Hendrycks et al. 2021, arXiv:2103.03874)."""

    # What the model is asked; {question} stands for the problem.
    prompt: str = MISSING


@dataclass
class PromptsDataConfig(SourceConfig, ReadDataConfig):
    """Rows with a prompt (text, or messages) and an answer; their other columns go to the reward too."""

    prompt_key: str = "prompt"
    # null: the rows have no answer.
    answer_key: Optional[str] = "answer"


@dataclass
class GeneratedDataConfig(CommonDataConfig):
    """What every option has whose questions are made here."""

    # Training questions. null: all there are that are not held out.
    rows: Optional[int] = None
    # Decides which questions there are and which of them are held out; the run's own seed decides their order only.
    seed: int = 0
    # Share of all questions that is never trained on, whatever `eval_rows` says. `eval_rows` are taken from it.
    held_out: float = 0.1


class Operation(Enum):
    add = "add"
    subtract = "subtract"
    multiply = "multiply"
    mixed = "mixed"  # one of the three


@dataclass
class SumsDataConfig(GeneratedDataConfig):
    # What the model is asked; {question} stands for the sum, such as 12+34.
    prompt: str = "{question}="
    task: Operation = Operation.add
    operands: int = 2
    min_operand: int = 0
    max_operand: int = 99
    # Write 7 as 07 where max_operand has two digits, and results as long as the longest.
    zero_padded: bool = False
    # Write the result from its last digit to its first.
    reversed: bool = False
    # Write 12 + 34 instead of 12+34.
    spaced: bool = False


@dataclass
class CountdownDataConfig(GeneratedDataConfig):
    """Make a target from numbers, each used once, by + - * / (the numbers round of the game show)."""

    # What the model is asked; {numbers} and {target} stand for them.
    prompt: str = MISSING
    # How many numbers.
    numbers: int = 3
    # The numbers are in [1, max_number], the target in [1, max_target].
    max_number: int = 25
    max_target: int = 100


@dataclass
class ReasoningGymDataConfig(GeneratedDataConfig):
    """A data set of the package reasoning-gym, which also judges the answers (reward=reasoning_gym)."""

    # Its name there.
    dataset: str = MISSING
    # Its own settings.
    options: Dict[str, Any] = field(default_factory=dict)
    # What the model is asked; {question} stands for the question.
    prompt: str = "{question}"


TASKS = (Gsm8kDataConfig, MathDataConfig, PromptsDataConfig, GeneratedDataConfig)  # rows that a reinforcement run can use


def sources_of(data: CommonDataConfig) -> List[Tuple[str, SourceConfig]]:
    """(key, source) of each source that the group names: "data", or "data.sources[0]", "data.sources[1]", ...; none where
    the rows are made here."""
    if isinstance(data, MixDataConfig):
        return [(f"data.sources[{number}]", source) for number, source in enumerate(data.sources)]
    return [("data", data)] if isinstance(data, SourceConfig) else []


def eval_path_of(data: CommonDataConfig) -> Optional[str]:
    """``data.eval_path``, which rows that are made here do not have."""
    return data.eval_path if isinstance(data, ReadDataConfig) else None
