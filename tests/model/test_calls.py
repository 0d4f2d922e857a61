"""What a caller hands to a model: every mistake in it is named, as one family of errors, and nothing is ignored in silence."""

import inspect
import logging

import numpy as np
import pytest
import torch
from tiny_models import make_rows

from twinkle_research.errors import CheckpointError, ConfigError, DataError, UserError
from twinkle_research.loss import LOSSES, resolve_loss
from twinkle_research.loss.base import LossInputs, TokenScores
from twinkle_research.model import MultiLoraTransformersModel, TransformersModel
from twinkle_research.model.base import TwinkleModel
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.processor.base import LOSS_INPUTS
from twinkle_research.trainer.config import AdamConfig


@pytest.fixture(scope="module")
def model(tiny_llama):
    return TransformersModel(tiny_llama)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"input_ids": [1, 2, 3], "label": [1, 2, 3]}, "row 1: unknown key 'label'; did you mean 'labels'"),
        ({"input_ids": [1, 2, 3]}, "row 1: no 'labels'. labels are shifted already"),
        ({"labels": [1, 2], "row": "a.jsonl:7"}, "a.jsonl:7: no 'input_ids'"),
        ([1, 2, 3], "row 1 is of type list, expected a feature: a dict with input_ids and labels"),
        ({"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5]}, "row 1: each label is the token at its own position"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100], "attention_mask": [1, 1, 0]}, "attention_mask is 0 at position 2"),
        ({"input_ids": torch.ones(1, 3), "labels": [1, 1, 1]}, r"input_ids has the shape \(1, 3\); .*one dimension"),
        ({"input_ids": torch.ones(3), "labels": [1, 1, 1]}, r"input_ids\[0\] is 1.0, expected a whole number"),
    ],
)
def test_features_that_are_none(model, feature, message):
    good = make_rows(1)[0]
    for call in (model.forward_backward, model.forward_only, model.forward, model.policy_scores):
        with pytest.raises(DataError, match=message):
            call([good, feature])
    with pytest.raises(DataError, match="expected features, got int"):
        model.forward_backward(3)


@pytest.mark.parametrize(
    ("ids", "labels"),
    [
        ([1, 2, 3], [2, 3, -100]),
        ([5, 5, 5], [5, 5, -100]),  # both readings are the same
        ([1, 2, 3], [-100, -100, 3]),  # 3 again may well come after 3
        ([1, 2, 3], [-100, -100, -100]),
    ],
)
def test_rows_that_are_shifted_are_taken(model, ids, labels):
    assert model.forward_only({"input_ids": ids, "labels": labels}).result["num_tokens"] == sum(label >= 0 for label in labels)


def test_tensors_and_arrays_are_features_like_any_other(tiny_llama, tmp_path):
    rows = make_rows(2)
    results = []
    for kind in (list, torch.tensor, np.array):
        model = TransformersModel(tiny_llama)
        model.set_optimizer("AdamW", lr=1e-2)
        given = [{key: kind(row[key]) for key in ("input_ids", "labels")} for row in rows]
        loss = model.forward_backward(given).result["loss"]
        assert type(loss) is float and type(model.count(given)) is int
        model.save(kind.__name__, output_dir=str(tmp_path), save_optimizer=True)  # inside an open window
        model.clip_grad_and_step()
        results.append((loss, model.forward_only(rows).result))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", [n for n in LOSSES.values() if n != "CrossEntropyLoss"] + ["CrossEntropyLoss"])
def test_a_loss_reads_what_it_names_and_nothing_else(name):
    """Every loss input that changes nothing in what the loss gives is refused; every other one is named in ``reads``."""
    loss = resolve_loss(name, value_coef=0.5) if name == "PPOLoss" else resolve_loss(name)
    shape, g = (2, 5), torch.Generator().manual_seed(0)
    given = {field: torch.rand(shape, generator=g) for field in LOSS_INPUTS.values()}
    # Other log-probabilities than the scores' are near them, as those of the same rows are.
    scores = TokenScores(*[torch.rand(shape, generator=g).requires_grad_() for _ in range(5)])
    place = {"mask": torch.ones(shape), "sequence_ids": torch.tensor([[0] * 5, [1] * 5]), "num_sequences": 2}

    def outcome(inputs):
        out = loss(scores, LossInputs(**place, **inputs), 2.0)
        return [
            float(out.loss.detach()),
            {k: float(s.detach()) for k, (s, _) in out.metrics.items()},
            {k: float(v.detach()) for k, v in out.maxima.items()},
        ]

    for public, field in LOSS_INPUTS.items():
        other = outcome(given | {field: given[field] + 0.5 * torch.rand(shape, generator=g)})
        assert (other != outcome(given)) == (public in loss.reads), public


def test_loss_inputs_without_effect_are_refused(model):
    rows = make_rows(2)
    calls = (model.forward_backward, model.forward_only, model.forward)
    for call in calls:
        with pytest.raises(ConfigError, match="advantages has no effect on CrossEntropyLoss; it reads no loss inputs"):
            call(rows, advantages=[1.0, 2.0])
        with pytest.raises(ConfigError, match="unknown loss input 'advantage'; did you mean 'advantages'"):
            call(rows, advantage=None)
    model.forward(rows)
    with pytest.raises(ConfigError, match="no effect on CrossEntropyLoss"):
        model.calculate_loss(advantages=[1.0, 2.0])
    model.set_loss("PPOLoss")
    reads = "advantages, old_logps, ref_logps, sampler_logps"
    with pytest.raises(ConfigError, match=f"returns has no effect on PPOLoss; those that it reads: {reads}"):
        model.forward_only(rows, advantages=[1.0, 2.0], returns=[1.0, 2.0])
    with pytest.raises(DataError, match="advantages has 1 entries for 2 rows"):
        model.forward_only(rows, advantages=[1.0])
    model.set_loss("CrossEntropyLoss")


def test_rows_without_a_trained_label_are_said(tiny_llama, caplog):
    model = TransformersModel(tiny_llama)
    model.set_optimizer("SGD", lr=0.1)
    with pytest.raises(UserError, match="there is no gradient: call forward_backward first"):
        model.clip_grad_and_step()
    with caplog.at_level(logging.WARNING):
        assert model.forward_backward([{"input_ids": [1, 2], "labels": [-100, -100]}]).result["loss"] == 0
        assert model.forward_only([]).result["loss"] == 0
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        f"no label of these {n} rows is trained (all are -100)" for n in (1, 0)
    ]
    with pytest.raises(ConfigError, match="normalizer must be finite and >= 0, got nan"):
        model.forward_backward(make_rows(1), normalizer=float("nan"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.set_processor("InputProcessor", padding_free=True), "InputProcessor has no option 'padding_free'"),
        (lambda m: m.set_processor(m.trained().processor, packing=True), "packing would have no effect"),
        (lambda m: m.set_processor(None), "a processor is an InputProcessor"),
        (lambda m: m.set_template("Template", max_lenght=3), "did you mean 'max_length'"),
        (lambda m: m.set_template("Templat"), "did you mean 'Template'"),
        (lambda m: m.set_loss("CrosEntropyLoss"), "did you mean 'CrossEntropyLoss'"),
        (lambda m: m.set_loss("CrossEntropyLoss", label_smoth=0.1), "did you mean 'label_smoothing'"),
        (lambda m: m.set_loss(None), "a loss is a Loss, its class or its name"),
        (lambda m: m.set_optimizer("AdamWW"), "did you mean 'adamw'"),
        (lambda m: m.set_optimizer(AdamConfig(name="adamw", lr=1.0), lr=1.0), "lr would have no effect"),
        (lambda m: m.set_optimizer(torch.optim.SGD([torch.ones(1)])), "got an object of type SGD"),
        (lambda m: m.set_lr_scheduler("cosin", total_steps=3), "did you mean 'cosine'"),
        (lambda m: m.set_lr_scheduler(lambda n: 1.0, warmup_steps=3), "warmup_steps would have no effect"),
        (lambda m: m.set_lr_scheduler(3), "got int"),
        (lambda m: m.add_metric("LossMetrik"), "did you mean 'LossMetric'"),
        (lambda m: m.add_metric("LossMetric", unit="x"), "LossMetric has no option 'unit'"),
        (lambda m: type(m)(m.model_id).add_adapter_to_model("", LoraAdapterConfig()), "adapter_name is empty"),
    ],
)
def test_wrong_set_up_is_one_family_of_errors(tiny_llama, model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


def test_where_the_value_head_belongs_is_said(tiny_llama, tmp_path):
    model = TransformersModel(tiny_llama)
    model.add_value_head()
    model.save("critic", output_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"call add_value_head \(before set_optimizer\)"):
        TransformersModel(tiny_llama).load("critic", output_dir=str(tmp_path))


@pytest.mark.parametrize("cls", [TransformersModel, MultiLoraTransformersModel])
def test_help_says_something(cls):
    methods = {name: method for name, method in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    assert methods.keys() > {"forward_backward", "set_reference", "add_value_head", "reference_logps", "clip_grad_and_step"}
    assert not [name for name, method in methods.items() if not method.__doc__]
    assert "labels[t] is" in TwinkleModel.__doc__ and "shifted\n        already" in cls.forward_backward.__doc__
