"""An adapter in any layout is PEFT's: its tensors, its arithmetic, its gradients, its refusals."""

import json

import lora_worker as worker
import pytest
import torch
from hf_folders import BASE, MODELS, of_family
from lora_worker import BOUNDS, LAYOUTS, SPOILT, TOGETHER, lora
from megatron.core.packed_seq_params import PackedSeqParams
from peft import LoraConfig
from ranks import launch

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.lora_config import config_json
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.build import build_chunks
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.lora import Adapters
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.shim import device_shim
from twinkle_research.model.transformers import TransformersModel

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def references(once):
    def make(out):
        (out / "folders").mkdir()
        (out / "expected").mkdir()
        worker.references(out / "folders", out / "expected")

    return once("megatron-lora", make)


@pytest.fixture(scope="module")
def measured(once, references):
    """From the world size to the folder with the distances that each rank measured in each layout."""

    def measure(out, size):
        folders = references / "folders", references / "expected", out
        if size == 1:
            worker.main(Runtime(), *folders)
        else:
            launch("lora_worker", *folders, processes=size)

    return lambda size: once(f"megatron-lora-{size}", lambda out: measure(out, size))


def of(measured, size, layout):
    return [json.loads((measured(size) / f"{layout}-{rank}.json").read_text()) for rank in range(size)]


def cases(layouts):
    """Those of several processes take too long for a person who waits."""
    for size, names in layouts.items():
        yield from (pytest.param(size, name, marks=[pytest.mark.long] if size > 1 else []) for name in names)


@pytest.mark.parametrize(("size", "layout"), cases(LAYOUTS))
def test_every_layout_trains_what_peft_trains(measured, size, layout):
    """From the same initial values, with the same masks; loaded, exported and merged bit for bit."""
    for found in of(measured, size, layout):
        for adapter in LAYOUTS[size][layout].adapters:
            assert all(value <= BOUNDS[name] for name, value in found[adapter].items()), (adapter, found[adapter])
            assert len(found[adapter]) >= len(BOUNDS) - 1


@pytest.mark.parametrize(("size", "layout"), cases(TOGETHER))
def test_adapters_on_one_model_know_nothing_of_each_other(measured, size, layout):
    for found in of(measured, size, layout):
        together = found["together"]
        assert together["base"] <= 5e-6 and together["others"] == 0.0 and together["different"] > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("layout", SPOILT)
def test_without_its_guards_it_is_wrong(measured, layout):
    """The tag of what sees a part of the sequence, the mark of what every rank has, the gradient of the frozen embedding."""
    assert all(value > 0.1 for found in of(measured, 2, layout) for value in found["spoilt"].values())


@pytest.mark.long
def test_heads_that_processes_would_share_are_refused(measured):
    messages = {(measured(2) / f"refused-{rank}").read_text() for rank in range(2)}
    assert messages == {"backend.tensor_parallel=2 must divide the 1 key-value heads of a model with a LoRA"}


# --- one process --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def families(once):
    """A folder of each family, with weights that can be computed with."""

    def make(out):
        for name, (family, options, dtype) in MODELS.items():
            torch.manual_seed(0)
            of_family(family, BASE | options).to(dtype).save_pretrained(out / name)

    return once("megatron-lora-families", make)


@pytest.fixture
def opened():
    """Adapters on a model without weights."""
    meshes = []

    def open_folder(folder, dtype=torch.float32):
        meshes.append(Mesh.open(Runtime(), MegatronBackendConfig()))
        architecture = Architecture.read(folder)
        chunks = build_chunks(architecture, meshes[0], dtype)
        return Adapters(chunks, meshes[0], architecture, worker.SEED), chunks

    yield open_folder
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tensors_as_on_transformers(families, opened, name):
    """Of each family: names, initial values, adapter_config.json. Of a mixture of experts only the attention, or (Qwen2-MoE) what
    every token sees."""
    adapters, _ = opened(families / name)
    adapter = adapters.add("default", LoraConfig(r=3, target_modules="all-linear"))
    other = TransformersModel(families / name, seed=worker.SEED)
    other.add_adapter_to_model("default", LoraConfig(r=3, target_modules="all-linear"))
    wanted = other.training_state().parameters
    assert list(adapter.directory.shapes) == list(wanted)
    assert all(torch.equal(parameter, wanted[n]) for n, parameter in adapter.parameters.items())
    assert config_json(adapter.config) == config_json(other.module.peft_config["default"])
    kinds = {"qwen3_moe": 4, "mixtral": 4, "deepseek_v2": 4 + (name == "deepseek_queries")}
    linear = kinds.get(other.module.config.model_type, 7) * 4 if name != "qwen2_moe" else 4 * 4 + 3 + 3 * 4
    assert len(wanted) == 2 * linear


WRONG = [
    LoraAdapterConfig(target_modules=["q_proj", "v_porj"]), LoraAdapterConfig(target_modules=["mlp"]),
    LoraAdapterConfig(target_modules=["embed_tokens"]), LoraAdapterConfig(target_modules=[]), LoraAdapterConfig(dropout=1.0),
    LoraAdapterConfig(r=0), LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
    LoraConfig(target_modules=["q_proj"], bias="all"), LoraConfig(target_modules=["q_proj"], exclude_modules=["k_proj"]),
    LoraConfig(target_modules=["q_proj"], layers_to_transform=[1, 9]),
    LoraConfig(target_modules=["q_proj"], rank_pattern={"q_porj": 2}),
    LoraConfig(target_modules=["q_proj"], alpha_pattern={"v_proj": 2}), LoraConfig(target_modules=["q_proj"], use_qalora=True),
    LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"), {"r": 4}, "no such folder",
]  # fmt: skip
OF_EXPERTS = [LoraConfig(target_modules=names) for names in (["experts"], ["gate"], ["q_proj", "down_proj"], r".*experts.*")]


def refusal(add, config):
    with pytest.raises((ConfigError, CheckpointError, ValueError)) as error:
        add("default", config)
    return str(error.value)


def test_refuses_what_the_transformers_backend_refuses_in_the_same_words(families, opened):
    adapters, chunks = opened(families / "qwen3_tied")
    before = [name for name, _ in chunks[0].named_parameters()]
    for config in WRONG:
        other = TransformersModel(families / "qwen3_tied")
        assert refusal(adapters.add, config) == refusal(other.add_adapter_to_model, config)
    assert not list(adapters) and before == [name for name, _ in chunks[0].named_parameters()]


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "mixtral"])
def test_experts_are_refused_by_name(families, opened, name):
    adapters, _ = opened(families / name)
    other = TransformersModel(families / name)
    for config in OF_EXPERTS:
        message = refusal(adapters.add, config)
        assert "target_modules" in message and message == refusal(other.add_adapter_to_model, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraAdapterConfig(dora=True), "adapter.dora=true reads whole weights, which backend=megatron cuts; write backend=tr"),
        (LoraAdapterConfig(modules_to_save=["norm"]), "adapter.modules_to_save copies whole weights, which backend=megatron"),
        (LoraAdapterConfig(target_modules=["q_proj", "lm_head"]), "names lm_head, which backend=megatron cuts along the voc"),
        (LoraAdapterConfig(target_modules=["embed_tokens"]), "names model.embed_tokens, which backend=megatron cuts along"),
    ],
)
def test_refuses_what_only_the_transformers_backend_can(families, opened, config, message):
    adapters, _ = opened(families / "qwen3_untied")
    with pytest.raises(ConfigError, match=message):
        adapters.add("default", config)


def test_bfloat16_rounds_where_peft_does(families, opened):
    """Factors are float32; the sum with the base's output, and the merged weight, are rounded once."""
    adapters, chunks = opened(families / "llama_untied", torch.bfloat16)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"])
    adapter = adapters.add("default", config)
    adapters.activate("default")
    other = TransformersModel(families / "llama_untied", dtype="bfloat16", seed=worker.SEED)
    other.add_adapter_to_model("default", config)
    theirs = other.module.get_base_model().model.layers[2].self_attn.o_proj
    ours = chunks[0].decoder.layers[2].self_attention.linear_proj
    generator = torch.Generator().manual_seed(0)
    weight, b, x = (torch.randn(shape, generator=generator) for shape in ((32, 96), (32, 3), (5, 1, 96)))
    with torch.no_grad():
        for linear in (theirs.base_layer, ours):
            linear.weight.copy_(weight)
        theirs.lora_B["default"].weight.copy_(b)
        adapter.parameters["base_model.model.model.layers.2.self_attn.o_proj.lora_B.weight"].copy_(b)
    assert {parameter.dtype for parameter in adapter.parameters.values()} == {torch.float32}
    with device_shim():
        y = ours(x.bfloat16())[0]
    assert y.dtype == torch.bfloat16 and torch.equal(y, theirs(x.bfloat16()))
    merged = adapter.effective("decoder.layers.2.self_attention.linear_proj.weight", ours.weight)
    expected = dict(other.named_weights())["model.layers.2.self_attn.o_proj.weight"]
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, expected) and not torch.equal(merged, ours.weight)
    norm = chunks[0].decoder.layers[2].input_layernorm.weight
    assert adapter.effective("decoder.layers.2.input_layernorm.weight", norm) is norm


def test_dropout_without_a_key_is_an_error(families, opened):
    adapters, chunks = opened(families / "llama_tied")
    adapters.add("default", lora("all"))
    adapters.activate("default")
    ends = torch.tensor([0, 4], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, ends, ends, 4, 4)
    with device_shim(), pytest.raises(UserError, match=r"q_proj.lora_dropout ran in training mode outside forward_backward"):
        chunks[0](torch.ones(1, 4, dtype=torch.long), None, None, packed_seq_params=packed)


def test_which_parameters_require_a_gradient(families, opened):
    """Only the active adapter's: mcore reduces and updates whatever does. Without adapters nothing is left behind."""
    adapters, chunks = opened(families / "qwen3_moe_tied")

    def trained():
        return {name for name, parameter in chunks[0].named_parameters() if parameter.requires_grad}

    linear = chunks[0].decoder.layers[0].self_attention.linear_qkv
    before = {name for name, _ in chunks[0].named_parameters()}
    for name in ("one", "two"):
        adapters.add(name, lora("parts"))
    assert not trained() and adapters.active is None and list(adapters) == ["one", "two"]
    for name in ("two", "one"):
        adapters.activate(name)
        assert trained() == {f"adapters.{name}.{on_disk}" for on_disk in adapters[name].parameters} and adapters.active == name
    adapters.remove("one")
    assert not trained() and adapters.active is None and linear._forward_hooks
    adapters.remove("two")
    assert not linear._forward_hooks and before == {name for name, _ in chunks[0].named_parameters()}
    adapters.add("one", lora("all"))
    assert linear._forward_hooks
