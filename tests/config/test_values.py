"""Types and ranges of values; case S26 and the config part of S19."""

from pathlib import Path

import pytest

from twinkle_research.config import compose, load_config, save_config, to_object, validate
from twinkle_research.config.composing import quoted
from twinkle_research.errors import ConfigError


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        validate(compose(["model=tiny", *words]))
    return str(refused.value)


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", '"1e-5"', "'1e-5'"])
def test_a_float_is_a_float_from_command_line_file_and_stored_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\noptimizer:\n  lr: {text}\n")
    for words in ([f"optimizer.lr={text}"], [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]):
        cfg = compose(words)
        assert cfg.optimizer.lr == 1e-5 and type(cfg.optimizer.lr) is float
        save_config(cfg, tmp_path)
        assert load_config(tmp_path).optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer.lr=abc", "'optimizer.lr' must be a number, got 'abc'"),
        ("optimizer.lr=true", "must be a number, got 'True'"),
        ("optimizer.lr=null", "'optimizer.lr' cannot be null"),
        ("optimizer.lr=nan", "must be a finite number"),
        ("optimizer.lr=inf", "must be a finite number"),
        ("optimizer.lr=-1", "'optimizer.lr' must be >= 0, got -1"),
        ("optimizer.betas=[0.9,1.0]", "'optimizer.betas' must be in [0, 1), got 1.0"),
        ("optimizer.betas=[0.9]", "'optimizer.betas' must be two numbers, got 1"),
        ("optimizer.betas=[0.9,x]", "'optimizer.betas[1]' must be a number, got 'x'"),
        ("trainer.max_steps=1.5", "'trainer.max_steps' must be a whole number, or null, got '1.5'"),
        ("trainer.max_steps=1e3", "must be a whole number"),
        ("trainer.max_steps=None", "for no value write null"),
        ("trainer.max_steps=none", "for no value write null"),
        ("trainer.max_steps=0", "'trainer.max_steps' must be >= 1, got 0"),
        ("trainer.batch_size=0", "'trainer.batch_size' must be >= 1, got 0"),
        ("trainer.max_grad_norm=0", "for no clipping write null"),
        ("data.path=None", "for no value write null"),
        ("run_dir=none", "for no value write null"),
        ("backend.sharding=dpp", "one of auto, none, ddp, fsdp2 (did you mean 'ddp'?), got 'dpp'"),
        ("backend.sharding=null", "cannot be null"),
        ("dry_run=yep", "must be true or false, got 'yep'"),
        ("tracking.wandb=3", "is a section of settings"),
        ("run_dir=${out.rot}", "'run_dir' cannot be resolved: Interpolation key 'out.rot' not found"),
        ("run_dir=${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE"),
        ("data.sample_prompts=[a,'${out.rot}']", "'data.sample_prompts' cannot be resolved"),
        ("checkpoint.keep=0", "'checkpoint.keep' must be >= 1"),
        ("seed=-1", "'seed' must be in [0, "),
        ("adapter.r=0", "'adapter.r' must be >= 1, got 0"),
        ("adapter.r=-5", "'adapter.r' must be >= 1, got -5"),
        ("adapter.r=1.5", "'adapter.r' must be a whole number, got '1.5'"),
        ("adapter.dropout=1.0", "'adapter.dropout' must be in [0, 1), got 1.0"),
        ("adapter.alpha=0", "'adapter.alpha' must be > 0"),
        (
            "adapter.target_modules=[q_proj,v_porj]",
            "'adapter.target_modules' names 'v_porj', which model=tiny does not have; did you mean 'v_proj'",
        ),
        ("adapter.modules_to_save=[lm_haed]", "names 'lm_haed'"),
        ("adapter.target_modules=[]", "'adapter.target_modules' is empty"),
        ("adapter.target_modules=[q_proj,q_proj]", "names q_proj twice"),
    ],
)
def test_wrong_values(word: str, expected: str) -> None:
    assert expected in refusal(word)


def test_all_problems_are_told_at_once() -> None:
    text = refusal("adapter.r=0", "trainer.batch_size=-1", "optimizer.eps=-1")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    "value", ["my data.jsonl", "my(data).jsonl", "a=b.jsonl", "it's.jsonl", "{x}.jsonl", "ünï çödé.jsonl", "back\\slash's\\"]
)
def test_any_file_name_can_be_given(value: str) -> None:
    assert compose([f"data.path={value}"]).data.path == value


@pytest.mark.parametrize("value", ["plain", "it's", "a,b", "\\", "\\'", "\\\\'x", "trailing\\\\", "[a]", "${x", " spaces "])
def test_quoting(value: str) -> None:
    if "${" not in value:
        assert compose([f"data.template={quoted(value)}"]).data.template == value


def test_text_with_a_comma_is_a_question() -> None:
    text = refusal("data.default_system=Be brief, please.")
    assert "data.default_system='Be brief, please.'" in text and "add -m" in text
    assert compose(["data.default_system='Be brief, please.'"]).data.default_system == "Be brief, please."


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("adapter.target_modules=all-linear", ["all-linear"]),
        ("adapter.target_modules=[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("adapter.target_modules='q_proj'", ["q_proj"]),
    ],
)
def test_one_word_is_a_list_of_one(word: str, expected: list[str]) -> None:
    assert compose([word]).adapter.target_modules == expected


def test_several_words_for_a_list_are_a_question() -> None:
    assert "for a list write adapter.target_modules=[q_proj,v_proj]" in refusal("adapter.target_modules=q_proj,v_proj")


def test_null_works_for_optional_values() -> None:
    cfg = to_object(compose(["trainer.max_grad_norm=null", "checkpoint.every=null", "run_dir=null", "trainer.eval_every=null"]))
    assert (cfg.trainer.max_grad_norm, cfg.checkpoint.every, cfg.run_dir, cfg.trainer.eval_every) == (None,) * 4


def test_micro_batch_default_is_filled_in() -> None:
    assert compose([]).trainer.micro_batch_size == 4
    assert compose(["trainer.micro_batch_tokens=64"]).trainer.micro_batch_size is None
    assert "not both" in refusal("trainer.micro_batch_tokens=64", "trainer.micro_batch_size=2")


def test_packing_is_cut_by_tokens() -> None:
    trainer = compose(["data.packing=true", "data.max_length=100"]).trainer
    assert (trainer.micro_batch_tokens, trainer.micro_batch_size) == (400, None)
    assert compose(["data.packing=true", "trainer.micro_batch_tokens=64"]).trainer.micro_batch_tokens == 64
    assert "give trainer.micro_batch_tokens instead" in refusal("data.packing=true", "trainer.micro_batch_size=2")


def test_a_path_alone_replaces_the_built_in_rows(tmp_path: Path) -> None:
    cfg = compose([f"data.path={tmp_path}/x.jsonl"])
    assert cfg.data.dataset_id is None
    assert "not both" in refusal(f"data.path={tmp_path}/x.jsonl", "data.dataset_id=some/rows")


def test_hydra_interpolations() -> None:
    cfg = compose(["model=tiny", "run_dir='runs/${hydra:runtime.choices.model}-${seed}'"])
    assert cfg.run_dir == "runs/tiny-0" and to_object(cfg).run_dir == "runs/tiny-0"
