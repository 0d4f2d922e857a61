"""Options of the losses on sampled answers: the seed's signatures, what conf/ says, and what is refused."""

import copy
import dataclasses
import inspect
import re
from typing import Any

import pytest

from twinkle_research.advantage import config as advantages
from twinkle_research.config import compose, config_dir, to_object, validate
from twinkle_research.errors import ConfigError
from twinkle_research.loss import LOSSES, build_loss, resolve_loss
from twinkle_research.loss import config as configs
from twinkle_research.loss.config import CISPOClip, CorrectionConfig, CorrectionMode, KLEstimator, LossDropout, PolicyLossConfig
from twinkle_research.loss.policy_loss import PolicyLoss
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.trainer.config import TrainConfig

POLICY = sorted(path.stem for path in (config_dir() / "loss").glob("*.yaml") if "/trainer: rl" in path.read_text())

# The seed's constructors, with the arguments that its examples or its library give them.
SEED = {
    "GRPOLoss": ["epsilon", "epsilon_high", "beta", "entropy_coef"],
    "GSPOLoss": ["epsilon", "epsilon_high", "beta", "entropy_coef"],
    "CISPOLoss": ["epsilon", "epsilon_high", "beta", "entropy_coef"],
    "BNPOLoss": ["epsilon", "epsilon_high", "beta", "entropy_coef"],
    "PPOLoss": ["loss_agg_mode"],
    "SAPOLoss": ["epsilon", "beta", "tau_pos", "tau_neg"],
    "DRGRPOLoss": ["epsilon", "beta", "max_completion_length"],
    "PPOValueLoss": ["epsilon"],
}
VALUES = {"loss_agg_mode": "token-mean", "max_completion_length": 128}


@pytest.fixture(scope="module")
def conf() -> dict[str, TrainConfig]:
    return {name: to_object(compose([f"loss={name}"])) for name in POLICY}


def changed(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    config = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = config
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return config


@pytest.mark.parametrize("name", SEED)
def test_the_seeds_signatures(name):
    wanted = SEED[name]
    values = [VALUES.get(option, 2.0 if option == "epsilon_high" else 0.1) for option in wanted]
    by_name, by_place = resolve_loss(name, **dict(zip(wanted, values))), type(resolve_loss(name))(*values)
    assert vars(by_name) == vars(by_place)
    assert list(inspect.signature(type(by_name).__init__).parameters)[1 : len(wanted) + 1] == wanted


def test_ppo_takes_the_options_of_grpo():
    loss = resolve_loss("PPOLoss", epsilon=0.1, epsilon_high=0.3, beta=0.2, entropy_coef=0.4)
    assert (loss.epsilon, loss.epsilon_high, loss.beta, loss.entropy_coef) == (0.1, 0.3, 0.2, 0.4)


def test_every_loss_has_a_long_and_a_short_name():
    for short, name in LOSSES.items():
        assert type(resolve_loss(short)).__name__ == type(resolve_loss(name)).__name__ == name
    with pytest.raises(ConfigError, match="did you mean 'GRPOLoss'"):
        resolve_loss("GRPOLos")
    with pytest.raises(ConfigError, match="GSPOLoss has no option 'epsilom'; did you mean 'epsilon'"):
        resolve_loss("gspo", epsilom=1)
    with pytest.raises(ConfigError, match="ReinforceLoss has no option 'kl_estimater'; did you mean 'kl_estimator'"):
        resolve_loss("ReinforceLoss", kl_estimater="k1")
    with pytest.raises(ConfigError, match="DRGRPOLoss has no option 'normalization'"):
        resolve_loss("dr_grpo", normalization="token")


@pytest.mark.parametrize("name", POLICY)
def test_conf_has_the_defaults_of_dataclass_and_class(conf, name):
    """One recipe, wherever it is asked for. What differs says why."""
    cfg = validate(conf[name], files=False).loss
    differs = {"reinforce_pp": {"epsilon": 0.2}, "dr_grpo": {"max_completion_length": 256}}.get(name, {})
    assert cfg == dataclasses.replace(type(cfg)(), **differs)
    # A critic must be made first, so the class has none unless it is told to.
    differs = {"ppo": {"value_coef": 0.1}}.get(name, differs)
    assert vars(build_loss(cfg)) == vars(resolve_loss(type(build_loss(cfg)).__name__, **differs))


def test_all_policy_losses_are_offered():
    nodes = [node for node in vars(configs).values() if inspect.isclass(node) and issubclass(node, PolicyLossConfig)]
    assert len(nodes) == 12 and len(POLICY) == 12
    assert {type(build_loss(node())) for node in nodes if node is not PolicyLossConfig} == {
        type(resolve_loss(name)) for name in LOSSES if issubclass(type(resolve_loss(name)), PolicyLoss)
    }


def test_the_papers_recipes(conf):
    """Epsilons, normalization and companions that the papers name."""
    recipes = {
        "grpo": ((0.2, 0.2), "sequence", "grpo"),
        "dapo": ((0.2, 0.28), "token", "grpo"),
        "dr_grpo": ((0.2, 0.2), "sequence_sum", "dr_grpo"),
        "bnpo": ((0.2, 0.2), "token", "grpo"),
        "gspo": ((3e-4, 4e-4), "sequence", "grpo"),
        "ppo": ((0.2, 0.2), "token", "gae"),
        "reinforce_pp": ((0.2, 0.2), "token", "reinforce_pp"),
        "rloo": ((None, None), "sequence", "rloo"),
    }
    for name, (epsilons, normalization, advantage) in recipes.items():
        loss = build_loss(conf[name].loss)
        assert ((loss.epsilon, loss.epsilon_high), loss.normalization, conf[name].advantage.name) == (
            epsilons,
            normalization,
            advantage,
        )
    assert (resolve_loss("cispo").lowest, resolve_loss("cispo").highest) == (0.0, 5.0)
    assert (resolve_loss("sapo").tau_pos, resolve_loss("sapo").tau_neg) == (1.0, 1.05)


def test_dr_grpo_divides_by_the_length_limit_of_an_answer():
    cfg = validate(compose(["loss=dr_grpo", "sampler.max_tokens=37"]), files=False)
    assert build_loss(cfg.loss).count([{"labels": [1, -100]}, {"labels": [-100]}, {"labels": [1]}]) == 2 * 37


def test_a_correction_has_its_authors_bounds_unless_told(conf):
    loss = build_loss(changed(conf["dapo"].loss, {"correction.mode": CorrectionMode.icepop, "correction.high": 4.0}))
    assert (loss.correction, loss.correction_low, loss.correction_high) == ("icepop", 0.5, 4.0)
    assert resolve_loss("dapo", correction="tis_token").correction_high == 2.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"epsilon": -0.1}, "loss.epsilon must be finite and >= 0"),
        ("grpo", {"beta": float("nan")}, "loss.beta must be finite and >= 0"),
        ("grpo", {"dual_clip": 1.1}, "loss.dual_clip must be above 1 \\+ epsilon_high = 1.2"),
        ("grpo", {"kl_estimator": "k33"}, "loss.kl_estimator='k33'; did you mean 'k3'"),
        ("grpo", {"normalization": "tokens"}, "did you mean 'token'"),
        ("grpo", {"correction": "tis"}, "loss.correction='tis'"),
        ("grpo", {"correction": "icepop", "correction_low": 6.0}, "must be below loss.correction_high=5.0"),
        ("grpo", {"log_ratio_clamp": 0.0}, "loss.log_ratio_clamp must be finite and > 0"),
        ("cispo", {"clip": "absolute", "epsilon_high": 0.2}, "leaves out 1"),
        ("sapo", {"tau_pos": 0.0}, "loss.tau_pos must be finite and > 0"),
        ("dr_grpo", {"max_completion_length": 0}, "loss.max_completion_length must be >= 1"),
        ("ppo", {"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_loss(name, **options)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"loss.kl_estimator": KLEstimator.k1}, "'loss.kl_estimator' has no effect with loss.beta=0"),
        ("grpo", {"loss.epsilon": -1.0}, "'loss.epsilon' must be >= 0, got -1"),
        ("grpo", {"loss.dual_clip": 1.2}, "'loss.dual_clip' must be above 1 + loss.epsilon_high = 1.2, got 1.2"),
        ("grpo", {"loss.correction.high": 0.0}, "'loss.correction.high' must be > 0, got 0"),
        ("reinforce", {"loss.epsilon_high": 0.3}, "'loss.epsilon_high' has no effect without loss.epsilon"),
        ("rloo", {"loss.epsilon_high": 0.3}, "'loss.epsilon_high' has no effect without loss.epsilon"),
        (
            "cispo",
            {"loss.clip": CISPOClip.absolute, "loss.epsilon_high": 0.2},
            "above by loss.epsilon_high=0.2, which leaves out 1",
        ),
        ("cispo", {"loss.clip": CISPOClip.absolute, "loss.epsilon": 1.2}, "below by loss.epsilon=1.2, which leaves out 1"),
        ("grpo", {"loss.correction.high": 2.0}, "'loss.correction.high' has no effect with loss.correction.mode=none"),
        (
            "grpo",
            {"loss.correction": CorrectionConfig(CorrectionMode.mis_token, 3.0, 2.0)},
            "loss.correction.low=3.0 must be below loss.correction.high=2.0",
        ),
        ("grpo", {"adapter": LoraAdapterConfig(dropout=0.1)}, "write loss.dropout=replay"),
        ("grpo", {"loss.dropout": LossDropout.replay}, "loss.dropout=replay has no effect: nothing is dropped"),
        ("grpo", {"advantage": advantages.GAEAdvantageConfig()}, "advantage=gae needs a critic, which is trained by loss=ppo"),
        ("ppo", {"loss.value_coef": 0.0}, "advantage=gae needs a critic, which is trained by loss.value_coef > 0"),
        (
            "ppo",
            {"advantage": advantages.GRPOAdvantageConfig()},
            "advantage=grpo does not give; write advantage=gae, or loss.value_coef=0",
        ),
        ("ppo", {"loss.value_coef": 0.0, "loss.value_epsilon": 1.0}, "'loss.value_epsilon' has no effect with loss.value_coef=0"),
        (
            "grpo",
            {"advantage.kl_estimator": advantages.RewardKL.k3},
            "'advantage.kl_estimator' has no effect with advantage.kl_coef=0",
        ),
        (
            "grpo",
            {"advantage.scale": advantages.Scale.none, "advantage.eps": 1e-4},
            "'advantage.eps' has no effect with advantage.scale=none",
        ),
        ("dr_grpo", {"advantage.std": advantages.Std.population}, "'advantage.std' has no effect with advantage.scale=none"),
        (
            "reinforce",
            {"advantage.whiten": advantages.Whitening.none, "advantage.eps": 0.1},
            "has no effect with advantage.whiten=none",
        ),
        (
            "ppo",
            {"advantage.normalize": False, "advantage.std": advantages.Std.sample},
            "no effect with advantage.normalize=false",
        ),
        (
            "reinforce",
            {"advantage.baseline": advantages.GlobalBaseline.group, "rollout.num_generations": 1},
            "advantage.baseline=group compares the answers to one prompt",
        ),
        ("grpo", {"rollout.num_generations": 1}, "rollout.num_generations must be >= 2"),
    ],
)
def test_refused_at_the_start(conf, name, settings, message):
    with pytest.raises(ConfigError) as refused:
        validate(changed(conf[name], settings), files=False)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"loss.beta": 0.1, "loss.kl_estimator": KLEstimator.k1_plus}),
        ("grpo", {"loss.epsilon_high": 0.3, "loss.dual_clip": 3.0, "loss.correction.off_policy_threshold": 0.1}),
        ("grpo", {"adapter": LoraAdapterConfig(dropout=0.1), "loss.dropout": LossDropout.replay}),
        ("reinforce", {"loss.epsilon": 0.1, "loss.epsilon_high": 0.3, "rollout.num_generations": 1}),
        ("ppo", {"loss.value_coef": 0.0, "advantage": advantages.GRPOAdvantageConfig()}),
        ("ppo", {"rollout.num_generations": 1, "advantage.kl_coef": 0.05, "advantage.kl_estimator": advantages.RewardKL.k3}),
        ("importance_sampling", {"advantage": advantages.OPOAdvantageConfig()}),
        (
            "cispo",
            {"loss.clip": CISPOClip.absolute, "loss.epsilon_high": 5.0, "loss.correction.mode": CorrectionMode.mis_sequence},
        ),
    ],
)
def test_accepted(conf, name, settings):
    assert build_loss(validate(changed(conf[name], settings), files=False).loss)


def test_words_that_do_not_exist():
    for word, message in {
        "loss.correction.mode=tis_tokens": "did you mean 'tis_token'",
        "advantage.gama=1": "advantage.gama",
        "loss.epsilonhigh=0.3": "did you mean 'loss.epsilon_high'",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            compose(["loss=reinforce", word])
