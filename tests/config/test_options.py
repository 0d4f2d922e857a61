"""The files of conf/: all combinations compose, and each option is what the house rules want it to be."""

import dataclasses
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from headers import write_headers
from omegaconf import OmegaConf
from pairwise import pairwise

from twinkle_research.config import compose, config_dir, to_object, validate
from twinkle_research.config.checks import POSITIVE, RANGES
from twinkle_research.config.helptext import documented
from twinkle_research.config.keys import all_keys, options_of
from twinkle_research.config.schema import BASE, GROUPS, SCHEMAS, options
from twinkle_research.dataset.config import MixSource
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import ArchitectureConfig, DType, ModelSource
from twinkle_research.model.facts import tensor_shapes
from twinkle_research.model.prepare import tiny
from twinkle_research.trainer.config import TrainConfig

ALL = {group: options(group) for group in GROUPS}
EXPERIMENTS = options("experiment")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "my rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    return path


def refused_because(words: list[str]) -> str | None:
    """Which of the named rules refuses this combination of options as it stands."""
    if "data=jsonl" in words:
        return "data=jsonl needs rows"
    if "data=mix" in words:
        return "data=mix needs data.sources"
    if "model=hf" in words:
        return "model=hf has no model of its own"
    return None


def check(words: list[str], rows: Path, model: Path) -> None:
    reason = refused_because(words)
    if reason is None:
        assert isinstance(validate(compose(words)), TrainConfig)
        return
    cfg = compose(words)
    with pytest.raises(ConfigError, match=reason):
        validate(cfg)
    if cfg.data.name == "jsonl":
        cfg.data.path, cfg.data.eval_rows = str(rows), 2
    if cfg.data.name == "mix":
        cfg.data.sources, cfg.data.eval_rows = [MixSource(str(rows), weight=2), MixSource(str(rows))], 2
    if cfg.model.name == "hf":
        cfg.model.path = str(model)
    validate(cfg)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_headers(folder, tiny.model_config(DType.float32), tensor_shapes(tiny.ARCHITECTURE))


# Groups and options that any supervised run on given answers may combine freely.
CHOICES = {
    "model": [name for name in ALL["model"] if name in ("hf", *ModelSource.__members__)],  # those of the hub differ in facts only
    "adapter": ALL["adapter"],
    "optimizer": ALL["optimizer"],
    "scheduler": ALL["scheduler"],
    "data": ["identity", "jsonl", "mix"],
    "experiment": ["null", *(name for name in EXPERIMENTS if "grpo" not in name)],
}
# What an option needs to be told, and the loss in whose runs it is at home.
NEEDS = {
    "data=jsonl": ["data.path={rows}"],
    "data=mix": ["data.sources=[{{path: {rows}, weight: 2}}, {{path: {rows}}}]"],
    "data=preference": ["loss=dpo", "data.path={rows}"],
    "data=math": ["loss=grpo", "data.path={rows}", "reward=math"],
    "data=prompts": ["loss=grpo", "data.path={rows}"],
    "data=gsm8k": ["loss=grpo", "data.path={rows}", "reward=gsm8k"],
    "data=countdown": ["loss=grpo", "data.rows=100", "reward=countdown"],
    "data=reasoning_gym": ["loss=grpo", "data.dataset=chain_sum", "data.rows=100", "reward=reasoning_gym"],
    "model=hf": ["model.path={model}"],
    "reward=countdown": ["loss=grpo", "data=countdown", "data.rows=100"],
    "reward=reasoning_gym": ["loss=grpo", "data=reasoning_gym", "data.dataset=chain_sum", "data.rows=100"],
    "reward=format": ["loss=grpo", "reward.tags=[answer]"],
    "reward=function": ["loss=grpo", "reward.path=math.sqrt"],
    "reward=combined": ["loss=grpo", "reward.parts=[{{reward: exact}}, {{reward: length, weight: 0.1}}]"],
    "advantage=gae": ["loss=ppo"],
    "advantage=reinforce_pp": ["loss=reinforce"],
    "trainer=rl": ["loss=grpo"],
}
REINFORCED = ("advantage", "reward", "rollout", "sampler")


def runs_of(group: str, rows: Path, model: Path) -> Iterator[list[str]]:
    """For each option of a group the words of a run that it is at home in."""
    for name in ALL[group]:
        if group in REINFORCED and name == "none":
            continue  # the default of supervised runs
        word = f"{group}={name}"
        extra = NEEDS.get(word, ["loss=grpo"] if group in REINFORCED else [])
        if group == "loss" and ALL_LOSSES[name] == "preference":
            extra = [*NEEDS["data=preference"][1:]]
        words = [*(w for w in extra if w.startswith("loss=")), word, *(w for w in extra if not w.startswith("loss="))]
        yield [w.format(rows=rows, model=model) for w in words]


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_makes_a_valid_run(group: str, rows: Path, model: Path) -> None:
    for words in runs_of(group, rows, model):
        assert isinstance(validate(compose(words)), TrainConfig), words


@pytest.mark.parametrize("group", ["loss", "data", "adapter", "optimizer", "sampler"])
def test_every_option_makes_a_valid_run_on_megatron(group: str, rows: Path, model: Path) -> None:
    for words in runs_of(group, rows, model):
        cfg = compose(["backend=megatron", "model=tiny", *words])
        if words == ["optimizer=muon"]:
            with pytest.raises(ConfigError, match="write optimizer=adamw, or backend=transformers"):
                validate(cfg)
        else:
            assert isinstance(validate(cfg), TrainConfig), words


def kind_of_loss(name: str) -> str:
    text = (config_dir() / "loss" / f"{name}.yaml").read_text()
    return "rl" if "override /trainer: rl" in text else "preference" if "override /data: preference" in text else "sft"


ALL_LOSSES = {name: kind_of_loss(name) for name in ALL["loss"]}


def test_a_loss_decides_the_loop() -> None:
    """DESIGN: which losses sample, and which are trained on given answers."""
    sampled = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "importance_sampling", "rloo", "reinforce", "sapo", "bnpo"}
    assert sampled <= {name for name, kind in ALL_LOSSES.items() if kind == "rl"}
    assert {name for name, kind in ALL_LOSSES.items() if kind == "preference"} >= {"dpo", "simpo", "orpo", "kto_pair"}
    assert ALL_LOSSES["cross_entropy"] == "sft"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_as_it_stands(name: str, rows: Path) -> None:
    words = [f"experiment={name}"]
    try:
        validate(compose(words))
    except ConfigError as error:
        assert "data.path" in str(error)  # a preset for one's own rows
        validate(compose([*words, f"data.path={rows}"]))


def check_combination(names: tuple[str, ...], rows: Path, model: Path) -> None:
    words = [f"{group}={name}" for group, name in zip(CHOICES, names)]
    try:
        check(words, rows, model)
    except ConfigError as error:  # the experiment sets a value that the option chosen beside it does not have
        assert "experiment=null" not in words and "it is a setting of" in str(error), words


def test_every_pair_of_options_and_experiments(rows: Path, model: Path) -> None:
    combinations = pairwise(list(CHOICES.values()))
    assert 16 <= len(combinations) < 40
    for names in combinations:
        check_combination(names, rows, model)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_combinations_of_all_options(rows: Path, model: Path) -> None:
    """Each is a run, or is refused with a reason: nothing else may come out."""
    draw = random.Random(0)
    for _ in range(1000):
        words = [f"{group}={draw.choice(ALL[group])}" for group in GROUPS]
        needed = [w.format(rows=rows, model=model) for word in words for w in NEEDS.get(word, []) if "." in w.split("=")[0]]
        try:
            validate(compose([*words, *needed]))
        except ConfigError as error:
            assert str(error).strip()


@pytest.mark.parametrize("group", GROUPS)
def test_every_setting_is_listed_and_explained(group: str) -> None:
    for name in ALL[group]:
        text = (config_dir() / group / f"{name}.yaml").read_text()
        written = documented(config_dir() / group / f"{name}.yaml")
        schema = next(schema for schema in SCHEMAS if schema.group == group and name in options_of(schema))
        leaves = {key.partition(".")[2] for key, (_, owners) in all_keys().items() if schema in owners}
        assert leaves <= set(written) | {key for key in leaves if key.startswith("architecture.")}, (group, name)
        facts = {field.name for field in dataclasses.fields(ArchitectureConfig)}
        silent = [
            key
            for key, (comment, _) in written.items()
            if not comment and key.rpartition(".")[2] not in facts | {"name", "defaults"}
        ]
        assert not silent, f"{group}/{name}.yaml: no comment above {silent}"
        assert re.search(rf"^defaults:\n  - {BASE}\w+(@\w+)?\n(  - override .*\n)*  - _self_$", text, re.MULTILINE), name


def test_defaults_of_the_root_are_listed_and_explained() -> None:
    written = documented(config_dir() / "train.yaml")
    fields = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in GROUPS]
    assert all(written[name][0] for name in fields)
    stored = OmegaConf.load(config_dir() / "train.yaml")
    first = stored.defaults[:2]
    assert list(first) == ["base_train", "_self_"]
    assert [next(iter(entry)) for entry in stored.defaults if not isinstance(entry, str)][-2:] == [
        "experiment",
        "override hydra/job_logging",
    ]


def test_a_loss_sets_values_of_the_loss_only() -> None:
    """A value for another group would beat the option that the user chose for it."""
    for name in ALL["loss"]:
        path = config_dir() / "loss" / f"{name}.yaml"
        assert path.read_text().startswith("# @package _global_\n")
        stored = OmegaConf.load(path)
        assert set(stored) == {"defaults", "loss"}
        # An option that is another recipe of a loss has its schema: reinforce_pp.
        assert f"{name}_".startswith(stored.defaults[0].removeprefix(BASE).removesuffix("@loss") + "_")
        assert stored.defaults[0].endswith("@loss") and stored.defaults[-1] == "_self_"


def test_every_experiment_says_how_to_run_it() -> None:
    for name in EXPERIMENTS:
        text = (config_dir() / "experiment" / f"{name}.yaml").read_text()
        assert text.startswith("# @package _global_\n") and f"python train.py experiment={name}" in text


def test_facts_in_the_options_are_those_of_the_models() -> None:
    assert to_object(compose(["model=tiny"])).model.architecture == tiny.ARCHITECTURE


def test_every_number_has_a_range() -> None:
    """So that no numeric setting is added without a thought about its bounds."""
    numeric = [key for key, (annotation, _) in all_keys().items() if re.search(r"\b(int|float)\b", str(annotation))]
    assert {key for key in numeric if "architecture" not in key} == set(RANGES) | set(POSITIVE)


def test_command_line_beats_experiment_beats_loss_beats_group() -> None:
    assert compose(["experiment=identity_full_tiny"]).optimizer.lr == 3e-3
    assert compose(["experiment=identity_full_tiny", "optimizer.lr=1"]).optimizer.lr == 1
    assert compose(["experiment=identity_full_tiny", "adapter=lora"]).adapter.name == "lora"
    assert compose(["experiment=identity_full_tiny"]).adapter.name == "none"
    assert compose(["experiment=null"]) == compose([]) == compose(["~experiment"])
    assert compose(["+experiment=muon_full"]) == compose(["experiment=muon_full"])
    assert compose(["+optimizer=sgd"]) == compose(["optimizer=sgd"])
