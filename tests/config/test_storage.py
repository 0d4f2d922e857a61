"""config.yaml of a run, and what may change when the run is continued."""

import dataclasses
import functools
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from twinkle_research.config import check_resume, compose, diff, load_config, resumable_changes, save_config, to_object, validate
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import TrainConfig


@functools.cache
def _composed(*words: str) -> DictConfig:
    return compose(["model=tiny", *words])


def config(*words: str) -> TrainConfig:
    return to_object(_composed(*words))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["experiment=identity_full_tiny"],
        ["optimizer=muon", "scheduler=wsd", "adapter=none"],
        ["optimizer=sgd", "scheduler=cosine", "+data.processor_args.extra={a: [1, 2.5, null]}"],
        ["model=hf", "model.path=a/b", "data.truncation=raise", "data.default_system='# not a comment: \"x\"'"],
    ],
)
def test_a_stored_config_is_read_as_it_was(words: list[str], tmp_path: Path) -> None:
    cfg = compose(words)
    path = save_config(cfg, tmp_path)
    assert load_config(tmp_path) == load_config(path) == to_object(cfg)
    assert type(load_config(tmp_path).optimizer) is type(to_object(cfg).optimizer)
    first = path.read_text()
    save_config(load_config(tmp_path), tmp_path)
    assert path.read_text() == first
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_interpolations_are_stored_resolved(tmp_path: Path) -> None:
    save_config(compose(["seed=7", "tracking.wandb.project=p${seed}"]), tmp_path)
    assert load_config(tmp_path).tracking.wandb.project == "p7"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("r: 16", "rr: 16", "'rr'"),
        ("r: 16", "r: sixteen", "sixteen"),
        ("  adapter: base_lora", "  adapter: base_lroa", "'schema.adapter' is 'base_lroa'"),
        ("seed: 0", "sed: 0", "'sed'"),
    ],
)
def test_a_damaged_stored_config_is_named(old: str, new: str, expected: str, tmp_path: Path) -> None:
    path = save_config(config(), tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match="config.yaml") as refused:
        load_config(tmp_path)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"seed: [1\n", b"\xff\xfe\x00", b"- 1\n", b"7\n", b"text\n", b"schema: 3\n", b"a: 1\na: 2\n"]
)
def test_a_stored_config_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="config.yaml: "):
        validate(compose(["model=tiny", f"run_dir={tmp_path}"]))


@pytest.mark.parametrize("section", ["null", "7", "[1, 2]"])
def test_a_stored_section_that_is_none(section: str, tmp_path: Path) -> None:
    path = save_config(config(), tmp_path)
    stored = OmegaConf.load(path)
    stored.launch = yaml.safe_load(section)
    OmegaConf.save(stored, path)
    with pytest.raises(ConfigError, match="config.yaml: .*'launch'"):
        load_config(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        load_config(tmp_path)


def test_a_config_of_an_older_version_gets_new_settings_from_their_defaults(tmp_path: Path) -> None:
    path = save_config(config("backend.logits_chunk=64"), tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "rslora" not in line))
    assert load_config(tmp_path) == config("backend.logits_chunk=64")


# --- continuing -----------------------------------------------------------------------------------------------------


def test_diff() -> None:
    assert diff(config(), config()) == {}
    changes = diff(config(), config("optimizer.lr=1", "tracking.wandb.project=x"))
    assert changes == {"optimizer.lr": (5e-4, 1.0), "tracking.wandb.project": ("twinkle_research", "x")}
    assert set(diff(config("optimizer=sgd"), config("optimizer=muon"))) > {"optimizer.name", "optimizer.ns_steps"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("seed=0", "run_dir=elsewhere"),
        ("seed=0", "resume=never"),
        ("seed=0", "backend.gradient_checkpointing=true"),
        ("seed=0", "launch.nproc_per_node=2"),
        ("seed=0", "tracking.tensorboard=false"),
        ("seed=0", "tracking.wandb.mode=offline"),
        ("seed=0", "trainer.micro_batch_size=1"),
        ("seed=0", "trainer.micro_batch_tokens=99"),
        ("seed=0", "data.on_change=restart"),
        ("seed=0", "checkpoint.every=7"),
        ("seed=0", "checkpoint.keep=5"),
        ("trainer.max_steps=3", "trainer.max_steps=4"),
        ("trainer.epochs=1", "trainer.epochs=2"),
        ("seed=0", "trainer.max_steps=4"),
    ],
)
def test_what_may_change(before: str, after: str) -> None:
    check_resume(config(before), config(after))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("seed=0", "seed=1", "'seed' was 0, is now 1"),
        ("seed=0", "optimizer.lr=1", "'optimizer.lr' was 0.0005, is now 1.0"),
        ("seed=0", "trainer.batch_size=5", "'trainer.batch_size'"),
        ("seed=0", "model.dtype=bfloat16", "'model.dtype' was float32, is now bfloat16"),
        ("seed=0", "data.limit=3", "'data.limit' was null, is now 3"),
        ("trainer.max_steps=4", "trainer.max_steps=3", "'trainer.max_steps' was 4, is now 3 (it may only grow)"),
        ("seed=0", "optimizer=sgd", "'optimizer.name' was adamw, is now sgd"),
    ],
)
def test_what_may_not_change(before: str, after: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="other settings") as refused:
        check_resume(config(before), config(after))
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2  # another option is one change, not one for each of its settings


def test_resumable_changes_are_a_part_of_the_changes() -> None:
    changes = diff(config(), config("seed=1", "launch.threads=2"))
    assert resumable_changes(changes) == {"launch.threads"}


def test_every_field_is_compared() -> None:
    """A setting added later is refused on resume until somebody decides that it is free."""
    for section, name in (("trainer", "max_grad_norm"), ("data", "shuffle"), ("adapter", "dora"), ("checkpoint", "keep_best")):
        old, new = config(), config()
        setattr(getattr(new, section), name, "changed")
        assert set(diff(old, new)) == {f"{section}.{name}"}
    assert all(dataclasses.is_dataclass(getattr(config(), group)) for group in ("model", "loss", "reward"))


def test_run_folder(tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path}/run"
    validate(compose(["model=tiny", run_dir]))
    assert not (tmp_path / "run").exists()
    save_config(compose(["model=tiny", run_dir]), tmp_path / "run")
    validate(compose(["model=tiny", run_dir]))
    validate(compose(["model=tiny", run_dir, "eval_only=true", "data.max_length=7"]))
    for words, expected in (
        ([run_dir, "resume=never"], "holds a run already"),
        ([run_dir, "seed=1"], "'seed' was 0, is now 1"),
        ([run_dir, "eval_only=true", "adapter=none"], "has 'adapter.name' lora, not none"),
        ([f"run_dir={tmp_path}/other", "eval_only=true"], "holds no run"),
        ([f"run_dir={tmp_path}/run/config.yaml"], "is a file, not a folder"),
    ):
        with pytest.raises(ConfigError, match=expected):
            validate(compose(["model=tiny", *words]))
