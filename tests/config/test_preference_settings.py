"""Settings of the losses on pairs, and mistakes in them."""

import json

import pytest

from twinkle_research.config import compose, to_object, validate
from twinkle_research.config.plan import print_plan, run_plan
from twinkle_research.errors import ConfigError
from twinkle_research.loss.config import PREFERENCE_CONFIGS

NAMES = ["dpo", "simpo", "orpo", "cpo", "kto_pair"]


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    return ["model=tiny", "data.path=pairs.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_brings_its_data_optimizer_and_loop(pairs, name, capsys):
    config = validate(compose([f"loss={name}", *pairs]))
    assert isinstance(config.loss, PREFERENCE_CONFIGS) and config.loss == type(config.loss)()  # conf/ has the code's defaults
    assert (config.data.name, config.trainer.name, config.optimizer.lr) == ("preference", "sft", 2e-5)
    assert (
        validate(compose([f"loss={name}", "data=preference", "optimizer=sgd", "optimizer.lr=1", *pairs])).optimizer.name == "sgd"
    )
    print_plan(run_plan(config), config)
    shown = capsys.readouterr().out
    assert f"{name} (sft)" in shown and "4 pairs a step" in shown


def test_a_micro_batch_of_pairs_has_both_answers_in_memory(pairs):
    plans = []
    for words in (["loss=dpo", *pairs], ["data=jsonl", *pairs]):
        plans.append(run_plan(to_object(compose(words))))
    assert plans[0].memory.activations > 1.8 * plans[1].memory.activations


MISTAKES = [
    (["loss=dpo", "data=jsonl"], "loss=dpo compares two answers to each prompt, which data=jsonl does not have; write data=pref"),
    (["data=preference"], "data=preference has two answers a row, which loss=cross_entropy does not compare; write loss=dpo"),
    (["loss=dpo", "loss.beta=0"], "'loss.beta' must be > 0: with 0 the pairs have no part in loss=dpo"),
    (["loss=simpo", "loss.beta=-1"], "'loss.beta' must be >= 0"),
    (["loss=orpo", "loss.lambda_orpo=0"], "'loss.lambda_orpo' must be > 0"),
    (["loss=simpo", "loss.gamma=-1"], "'loss.gamma' must be >= 0"),
    (["loss=cpo", "loss.bc_coef=-1"], "'loss.bc_coef' must be >= 0"),
    (["loss=dpo", "loss.label_smoothing=0.5"], r"'loss.label_smoothing' must be in \[0, 0.5\)"),
    (["loss=dpo", "loss.label_smoothing=0.1", "loss.loss_type=ipo"], "'loss.label_smoothing' has no effect with loss.loss_type"),
    (["loss=dpo", "loss.average_logps=true"], "'loss.average_logps' has no effect with loss.loss_type=sigmoid"),
    (["loss=dpo", "data.train_on=last"], "data.train_on=last has no effect with data=preference"),
    (["loss=dpo", "data.truncation=left"], "data.truncation=left would give the two answers of a pair different prompts"),
    (["loss=dpo", "loss.gamma=1"], "unknown key 'loss.gamma'"),
    (["loss=dpo", "loss.loss_type=kto"], "'loss.loss_type' must be one of sigmoid, hinge, ipo"),
    (["loss=dpo", "data.streaming=true"], "unknown key 'data.streaming'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_mistakes_are_named(pairs, words, message):
    with pytest.raises(ConfigError, match=message):
        validate(compose([*words, *pairs]))
