"""S27: A misspelt setting is refused with the right name, wherever it stands: for every leaf of every shipped option."""

import random
import re
from pathlib import Path

import pytest

from twinkle_research.config import compose
from twinkle_research.config.cli import main
from twinkle_research.config.keys import all_keys, hint, options_of, valid_keys
from twinkle_research.errors import ConfigError

KEYS = [key for key in all_keys() if not key.endswith(".name") or key.count(".") > 1]
NEEDED = {"data=reasoning_gym": ["data.dataset=chain_sum"], "reward=function": ["reward.path=math.sqrt"]}
WAYS = ("command line", "plus", "experiment")


def option_words(key: str) -> list[str]:
    """The words that choose an option which has ``key``."""
    owners = all_keys()[key][1]
    if not owners:
        return []
    group = key.partition(".")[0]
    words = [f"{group}={options_of(owners[0])[0]}", *NEEDED.get(f"{group}={options_of(owners[0])[0]}", [])]
    return [*words, "model=tiny"] if key.startswith("model.architecture") else words


def misspelt(key: str, seed: int = 0) -> str:
    """One slip of the finger in the last part of ``key`` (or anywhere, for names of up to two letters)."""
    draw = random.Random(f"{key} {seed}")
    parent, dot, leaf = key.rpartition(".")
    if len(leaf) < 3:
        parent, dot, leaf = "", "", key
    at = draw.randrange(1, len(leaf) - 1)
    while leaf[at] == "." or leaf[at] == leaf[at + 1]:
        at = draw.randrange(1, len(leaf) - 1)
    slips = {
        "drop": leaf[:at] + leaf[at + 1 :],
        "double": leaf[:at] + leaf[at] + leaf[at:],
        "swap": leaf[:at] + leaf[at + 1] + leaf[at] + leaf[at + 2 :],
        "other": leaf[:at] + draw.choice("qxjk".replace(leaf[at], "")) + leaf[at + 1 :],
    }
    return parent + dot + slips[draw.choice(sorted(slips))]


def refusal(key: str, words: list[str], way: str, folder: Path) -> str:
    """The message that ``key=1`` meets when it is given in this way."""
    if way == "experiment":
        (folder / "experiment").mkdir(exist_ok=True)
        lines = ["# @package _global_", "defaults:", *(f"  - override /{w.replace('=', ': ')}" for w in words), "  - _self_"]
        for depth, part in enumerate(key.split(".")):
            lines.append("  " * depth + f"{part}:")
        lines[-1] += " 1"
        (folder / "experiment" / "typo.yaml").write_text("\n".join(lines) + "\n")
        words, setting = [f"hydra.searchpath=[file://{folder}]"], "experiment=typo"
    else:
        setting = f"+{key}=1" if way == "plus" else f"{key}=1"
    with pytest.raises(ConfigError) as refused:
        compose([*words, setting])
    return str(refused.value)


@pytest.mark.parametrize("way", WAYS)
def test_every_leaf_misspelt_is_refused_with_the_right_name(way: str, tmp_path: Path) -> None:
    # A part of the leaves in each of the ways; test_all_ways has the product.
    keys = KEYS[::7] if way == "command line" else KEYS[2 + 3 * (way == "plus") :: 14]
    right = []
    for key in keys:
        wrong = misspelt(key)
        message = refusal(wrong, option_words(key), way, tmp_path)
        assert wrong.split(".")[0] in message
        right.append(f"'{key}'" in message)
    assert sum(right) >= 0.95 * len(keys), [key for key, ok in zip(keys, right) if not ok]


def test_suggestions_for_many_slips() -> None:
    composed = {}
    wrong = []
    count = 0
    for key in KEYS:
        words = tuple(option_words(key))
        if words not in composed:
            composed[words] = compose([*words])
        for seed in range(3):
            slip = misspelt(key, seed)
            if slip in valid_keys(composed[words]):
                continue
            count += 1
            if f"'{key}'" not in hint(slip, composed[words]):
                wrong.append((slip, hint(slip, composed[words])))
    assert count > 250
    assert len(wrong) <= 0.05 * count, wrong


@pytest.mark.parametrize("key", ["optimizer.lr", "trainer.max_steps", "tracking.wandb.project", "seed"])
def test_a_sweep_over_a_misspelt_key_is_refused_before_any_job(
    key: str, capsys: pytest.CaptureFixture, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "model=tiny", "optimizer.weight_decay=0,0.1", f"{misspelt(key)}=1,2"]) == 2
    captured = capsys.readouterr()
    assert f"did you mean '{key}'?" in captured.err
    assert "run plan" not in captured.out


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways(way: str, tmp_path: Path) -> None:
    right = [f"'{key}'" in refusal(misspelt(key, seed), option_words(key), way, tmp_path) for key in KEYS for seed in range(3)]
    assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimzer.lr=1e-4"], "unknown key 'optimzer.lr'; did you mean 'optimizer.lr'?"),
        (["lr=1e-4"], "did you mean 'optimizer.lr'?"),
        (["batch_size=8"], "did you mean 'trainer.batch_size'?"),
        (["optimizer.warmup_steps=8"], "did you mean 'scheduler.warmup_steps'?"),
        (["path=x"], "did you mean 'model.path' or 'data.path'?"),
        (["+loss.foo=1"], "settings of loss here: loss.normalization, loss.label_smoothing, loss.z_loss"),
        (["adapter=none", "adapter.r=8"], "it is a setting of adapter=lora, not of the chosen option"),
        (["optimizer=sgd", "optimizer.betas=[0.9,0.99]"], "it is a setting of optimizer=adam or optimizer=adamw"),
        (["rollout.num_generations=8"], "it is a setting of rollout=single, not of the chosen option"),
        (["optimizer=adamww"], "unknown option 'optimizer=adamww'; did you mean 'adamw'?"),
        (["optimzer=adamw"], "did you mean 'optimizer'?"),
        (["experiment=own_dta"], "did you mean 'own_data'?"),
        (["optimizer=base_adam"], "is a schema, not an option; choose one of adam, adamw, adamw_preference, adamw_rl, muon, sgd"),
        (["adapter=null"], "choose one of lora, none"),
        (["~optimizer.lr"], "'optimizer.lr' cannot be deleted; give it a value"),
        (["scheduler@x=linear"], "write scheduler=..."),
        (["optimizer=[adamw,sgd]"], "two options of the group 'optimizer' at once"),
        (["optimizer.lr=range(1,3)"], "asks for several runs: add -m"),
        (["model/tiny=3"], "unknown config group 'model/tiny'; did you mean 'model'?"),
        (["adapter.r=a(b"], "special characters"),
        (["nonsense"], "'nonsense' is not of the form key=value"),
        (["foo.bar=1"], "valid: model, backend, adapter, optimizer, scheduler, loss, advantage, trainer, "),
        (["learning_rate=1"], "unknown key 'learning_rate'; write optimizer.lr"),
        (["trainer.gradient_accumulation_steps=4"], "trainer.micro_batch_size"),
        (["experimnt=own_data"], "did you mean 'experiment'?"),
        (["adapter.target_modules={a: 1}"], "'adapter.target_modules' must be a list, for example [a,b]"),
        (["adapter.target_modules=[{a: 1}]"], "'adapter.target_modules' must be a list, for example [a,b], got [{'a': 1}]"),
        (["adapter.target_modules=[null]"], "must be"),
        (["~optimizer"], "no option of 'optimizer' is chosen"),
        (["optimizer"], "'optimizer' needs a value: optimizer=adam|adamw|adamw_preference|adamw_rl|muon|sgd"),
        (["optimizer.lr"], "'optimizer.lr' needs a value"),
        (["+optimizer.lr=1"], "leave out the '+'"),
        (["model.name=tiny"], "to choose an option write model=tiny"),
        (["data.processor_args.modle_name=x"], "did you mean 'data.processor_args.model_name'?"),
        (["hydra.run.dirr=x"], "did you mean 'hydra.run.dir'?"),
        (["model=hf", "model.architecture.num_layers=2"], "null"),
    ],
)
def test_messages(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(words)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer:\n  lr: 1\n", "must begin with the line '# @package _global_'"),
        ("# @package _global_\ndefaults:\n  - override /dta: jsonl\n  - _self_\n", "did you mean 'data'?"),
        ("# @package _global_\ndefaults:\n  - override /data: jsnl\n  - _self_\n", "did you mean 'jsonl'?"),
        ("# @package _global_\ndefaults:\n  - overide /data: jsonl\n  - _self_\n", "write 'override /data: jsonl'"),
        ("# @package _globl_\noptimizer:\n  lr: 1\n", "'# @package _global_'"),
        ("# @package _global_\noptimizer: sgd\n", "put 'override /optimizer: sgd' into the defaults list"),
        ("# @package _global_\ngradient_checkpoint: true\n", "did you mean 'backend.gradient_checkpointing'?"),
        ("# @package _global_\nloss:\n  clip_ratio_c: 3\n", "unknown key 'loss.clip_ratio_c'"),
        ("# @package _global_\ndata: null\n", "'data' cannot be null"),
        ("# @package _global_\noptimizer:\n  lr: 1\n   x: 2\n", "bad.yaml"),
        ("# @package _global_\noptimizer:\n  lr: 1\noptimizer:\n  lr: 2\n", "duplicate key optimizer"),
    ],
)
def test_messages_for_experiments(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=bad"])
    assert expected in str(refused.value)


def test_an_option_without_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("lr: 1.0\n")
    (tmp_path / "optimizer" / "adamw_mine.yaml").write_text("defaults:\n  - adamw\n  - _self_\nlr: 1.0\n")
    (tmp_path / "optimizer" / "other.yaml").write_text("defaults:\n  - base_adm\n  - _self_\n")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    with pytest.raises(ConfigError, match="has no schema"):
        compose([path, "optimizer=mine"])
    with pytest.raises(ConfigError, match="did you mean 'base_adam'"):
        compose([path, "optimizer=other"])
    assert compose([path, "optimizer=adamw_mine"]).optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimzer.lr=1e-4", "did you mean 'optimizer.lr'"),
        ("backend.gradient_checkpoint=true", "did you mean 'backend.gradient_checkpointing'"),
        ("loss.clip_ratio_c=3", "unknown key 'loss.clip_ratio_c'"),
        ("+loss.foo=1", "unknown key 'loss.foo'"),
    ],
)
def test_the_reported_settings_are_refused_s27(word, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose([word])
