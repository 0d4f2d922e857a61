"""Updates and checkpoints on Megatron-Core: those of the transformers backend, in every layout."""

import json

import pytest
import training_worker
from hf_folders import save_models
from ranks import launch
from training_cases import KINDS, LAYOUTS, LORA, MODELS, SHAPE, call, everything, reference, same, set_up, stored

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.transformers import TransformersModel

pytestmark = pytest.mark.timeout(300)
CASES = [(name, kind) for layouts in LAYOUTS.values() for name, layout in layouts.items() for kind in layout.kinds]


@pytest.fixture(scope="module")
def folders(once):
    return once("megatron-training-folders", lambda out: save_models(out, MODELS, SHAPE, norms=True))


@pytest.fixture(scope="module")
def done(once, folders):
    def expect(out):
        for name, kind in KINDS.items():
            model = TransformersModel(folders / kind.model, dtype=kind.dtype, seed=3)
            reference(set_up(model, kind, 2), name, out)

    def make(out):
        expected = once("megatron-training-expected", expect)
        for n in (2, 4):
            launch("training_worker", folders, expected, out, processes=n)
        training_worker.main(Runtime(), str(folders), str(expected), str(out))

    return once("megatron-training", make)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_layout(done, layout, kind):
    """Against transformers: gradient norm, weights and moments after three updates with clipping, weight decay and windows of
    two calls. Among themselves, bit for bit: checkpoints, open windows, refused updates."""
    found = json.loads((done / f"{layout}-{kind}.json").read_text())
    bounds = {"norm": 1e-6, "weights": 1e-6, "moments": 1e-5}
    if KINDS[kind].dtype == "bfloat16":  # both round activations, each in its own places
        bounds = {"norm": 3e-3, "weights": 1e-2, "moments": 1e-1}
    assert found and all(value <= bounds[name.split()[-1]] for name, value in found.items()), found


@pytest.mark.long
@pytest.mark.parametrize(("layout", "kind"), [("pp2", "tied"), ("ep2", "mixture"), ("tp2", "lora"), ("pp2", "companions")])
def test_transformers_goes_on(done, folders, layout, kind):
    """It reads what was written in another layout, and has the same bits then."""
    written = done / layout / f"{kind}-closed"
    model = set_up(TransformersModel(folders / KINDS[kind].model, dtype=KINDS[kind].dtype), KINDS[kind], 2)
    model.resume_from_checkpoint(written)
    assert same(everything(model), stored(written))


@pytest.fixture
def opened(folders):
    """Makes models in one process."""
    models = []

    def open_model(**options):
        models.append(MegatronModel(folders / "tied", layout=MegatronBackendConfig(**options)))
        return models[-1]

    yield open_model
    for model in models:
        model.close()


@pytest.mark.parametrize(
    ("name", "options", "layout", "words"),
    [
        ("Muon", {}, {}, "optimizer=muon needs whole matrices"),
        ("SGD", {"momentum": 0.9, "nesterov": True}, {}, "optimizer.nesterov=true is not supported by backend=megatron"),
        ("SGD", {}, {"distributed_optimizer": True}, "distributed_optimizer=true needs optimizer=adamw or adam"),
    ],
)
def test_optimizers_that_mcore_lacks(opened, name, options, layout, words):
    model = opened(**layout)
    with pytest.raises(ConfigError, match=words):
        model.set_optimizer(name, **options)
    model.set_optimizer("default", lr=1e-3)


def test_weights_that_come_late_cannot_serve_an_adapter(opened):
    model = opened(distributed_optimizer=True, overlap_param_gather=True)
    with pytest.raises(ConfigError, match="overlap_param_gather=true needs all weights to be trained"):
        model.add_adapter_to_model("default", LORA)


def test_order_of_calls(opened):
    model = opened()
    call(model, 0)
    with pytest.raises(UserError, match="no optimizer: call set_optimizer first"):
        model.clip_grad_norm(1.0)
    training = model.training_state()
    assert any(gradient.any() for gradient in training.gradients.tensors().values())
    model.set_optimizer("AdamW", lr=1e-2)
    assert model.clip_grad_norm(None) > 0 and training.window.reduced
    with pytest.raises(UserError, match="the gradients were clipped: call step"):
        call(model, 1)
    with pytest.raises(UserError, match="save before clip_grad_norm or after step"):
        everything(model)
    before = {name: parameter.detach().clone() for name, parameter in training.parameters.items()}
    model.step()
    model.zero_grad()
    assert all((parameter != before[name]).any() for name, parameter in training.parameters.items())
