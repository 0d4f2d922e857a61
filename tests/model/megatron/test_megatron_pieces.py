"""Each tensor of a Hugging Face folder lies where Megatron-Core wants it, and comes back with the same bits."""

import dataclasses
import json

import pieces_worker as worker
import pytest
import torch
from hf_folders import MODELS, bits, make_folders
from pieces_memory_worker import BUCKET
from pieces_worker import LAYOUTS, Opened
from ranks import launch
from safetensors.torch import save_file

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.families.rules import QKV, Gated, Vocabulary
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.pieces import Piece

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folders(once):
    return once("megatron-folders", make_folders)


@pytest.fixture(scope="module")
def done(once, folders):
    """World size -> folder in which each layout that passed has left its name."""
    return {n: once(f"megatron-pieces-{n}", lambda out, n=n: launch("pieces_worker", folders, out, processes=n)) for n in (2, 4)}


@pytest.fixture
def mesh():
    opened = Mesh.open(Runtime(), MegatronBackendConfig())
    yield opened
    opened.close()


@pytest.fixture
def model(mesh, folders):
    return Opened(folders / "qwen3_tied", mesh, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(("size", "layout"), [(size, name) for size in (2, 4) for name in LAYOUTS[size]])
def test_folder_to_layout_to_folder(done, size, layout):
    """The ranks have compared themselves: bits in memory, and bits, order and names of the stream."""
    assert (done[size] / f"{size}-{layout}").exists()


@pytest.mark.parametrize("name", MODELS)
def test_one_process(mesh, folders, name, tmp_path):
    opened = Opened(folders / name, mesh, MODELS[name][2])
    worker.check_everything(opened)
    worker.check_slots(opened, tmp_path)


def test_every_layout_has_every_kind_of_model():
    for size, names in {1: ("1",), 2: ("tp2", "etp2"), 4: ("tp2-pp2",)}.items():
        covered = {model for name in names for model in LAYOUTS[size][name].models}
        assert covered == set(MODELS)


# --- views --------------------------------------------------------------------------------------------------------------


def test_views_are_of_the_parameter_itself(mesh, folders):
    """Writing ones through every piece reaches every element but the padding; so it does for any tensor of that shape."""
    for name in ("llama_untied", "qwen2_untied", "qwen3_moe_mixed"):
        opened = Opened(folders / name, mesh, MODELS[name][2])
        pieces = families.pieces(opened.architecture, mesh, opened.parameters)
        for memory, parameter in opened.parameters.items():
            other = torch.zeros_like(parameter)
            for piece in pieces[memory]:
                with torch.no_grad():
                    piece.view(parameter).fill_(1.0)
                piece.write(other, torch.ones(piece.size))
                assert piece.read(other).shape == piece.size
            assert bool((parameter == 1).all()) and torch.equal(other, parameter)


# --- what does not fit --------------------------------------------------------------------------------------------------


def rewritten(model: Opened, out, change) -> TensorFolder:
    tensors = {name: model.files[name].clone() for name in model.files}
    change(tensors)
    out.mkdir(exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    return TensorFolder(out, "model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "tensor model.layers.3.mlp.up_proj.weight is missing"),
        (
            lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(2)}),
            "tensor model.layers.4.mlp.up_proj.weight is not part of this model; did you mean",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"tensor model.norm.weight has shape \(31,\) in .*, \(32,\) in the model",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(256, 32)}),
            r"model.embed_tokens.weight has shape \(256, 32\) in .*, \(250, 32\) in the model",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_loaded(model, tmp_path, change, words):
    folder = rewritten(model, tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        model.directory.load(
            folder, model.parameters.__getitem__, is_ignored=lambda name: families.is_ignored(model.architecture, name)
        )
    assert all(bool((p == 7).all()) for p in model.parameters.values())


def test_what_transformers_ignores_is_ignored(model, mesh, folders, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = torch.zeros(250, 32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    folder = rewritten(model, tmp_path, change)
    model.directory.load(folder, model.parameters.__getitem__, is_ignored=lambda n: families.is_ignored(model.architecture, n))
    embedding = model.parameters["embedding.word_embeddings.weight"].detach()
    assert torch.equal(bits(embedding), bits(model.files["model.embed_tokens.weight"]))
    with pytest.raises(CheckpointError, match="lm_head.weight is not part of this model"):
        model.directory.load(folder, model.parameters.__getitem__)
    untied = Architecture.read(folders / "qwen3_untied")
    assert not families.is_ignored(untied, "lm_head.weight")


def test_a_parameter_without_a_row_is_refused(model, mesh):
    strange = model.parameters | {"decoder.layers.0.self_attention.linear_gate.weight": torch.zeros(4, 4)}
    with pytest.raises(ConfigError, match="decoder.layers.0.self_attention.linear_gate.weight: the table of model type 'qwen3'"):
        families.pieces(model.architecture, mesh, strange)


ROWS = [
    (name, block, pattern)
    for name, family in {
        "llama_biased": "llama", "mistral": "mistral", "qwen2_untied": "qwen2", "qwen3_untied": "qwen3",
        "qwen3_moe_mixed": "qwen3_moe", "mixtral": "mixtral", "gemma2": "gemma2", "gemma3": "gemma3_text",
        "qwen2_moe": "qwen2_moe", "deepseek": "deepseek_v2",
    }.items()
    for block, rows in families.TABLES[family]._asdict().items()
    for pattern, _ in rows
    # Of forms that a model has instead of these: grouped experts, biases, compressed queries.
    if not pattern.endswith("{expert}")
    and (not pattern.endswith("bias") or name in ("llama_biased", "qwen2_untied", "qwen2_moe"))
    and not (name == "deepseek" and ("linear_q_" in pattern or "q_norm" in pattern))
]  # fmt: skip


@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, _, _ in ROWS)))
def test_no_row_can_be_left_out(mesh, folders, name, monkeypatch):
    opened = Opened(folders / name, mesh, MODELS[name][2])
    family, table = opened.architecture.family, families.TABLES[opened.architecture.family]
    for _, block, pattern in [row for row in ROWS if row[0] == name]:
        rows = tuple(row for row in getattr(table, block) if row[0] != pattern)
        monkeypatch.setitem(families.TABLES, family, table._replace(**{block: rows}))
        with pytest.raises(ConfigError, match="does not say which tensor of the folder it is"):
            families.pieces(opened.architecture, mesh, opened.parameters)


def test_a_wrong_row_leaves_a_tensor_over(model, mesh, monkeypatch):
    """Two parameters that claim the same tensor, and one that nobody claims."""
    table = families.TABLES["qwen3"]
    rows = tuple(
        (pattern, dataclasses.replace(rule, up=rule.gate) if isinstance(rule, Gated) else rule) for pattern, rule in table.layer
    )
    monkeypatch.setitem(families.TABLES, "qwen3", table._replace(layer=rows))
    directory = Directory(mesh, families.pieces(model.architecture, mesh, model.parameters))
    with pytest.raises(CheckpointError, match="up_proj.weight is not part of this model"):
        directory.load(model.files, model.parameters.__getitem__)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([slice(0, 2)], "all together hold 4 of its 8 elements"),
        ([slice(0, 3), slice(2, 4)], "overlap"),
        ([slice(0, 5)], "no part of it"),
        ([slice(0, 2), slice(3, 4)], "all together hold 6 of its 8 elements"),
    ],
)
def test_parts_must_make_up_the_tensor(mesh, parts, words):
    pieces = [Piece("w", (4, 2), (rows, slice(0, 2))) for rows in parts]
    with pytest.raises(ConfigError, match=f"tensor w.*{words}"):
        Directory(mesh, {f"p{i}": [piece] for i, piece in enumerate(pieces)})


def test_some_tensors(model):
    """Those of a parameter go together; an unknown one is refused with the nearest name."""
    layer = "model.layers.0.mlp."
    assert model.directory.loaded([f"{layer}gate_proj.weight", f"{layer}up_proj.weight"]) == [
        "decoder.layers.0.mlp.linear_fc1.weight"
    ]
    with pytest.raises(ValueError, match=f"linear_fc1.weight holds {layer}up_proj.weight too"):
        model.directory.loaded([f"{layer}gate_proj.weight"])
    with pytest.raises(ValueError, match="not part of this model; did you mean 'model.norm.weight'"):
        list(model.directory.stream(model.parameters.__getitem__, ["model.norms.weight"]))


# --- rules by themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_qkv_is_cut_as_megatron_cuts_it(folders, groups, size, kind):
    """Also where there are more processes than groups: mcore then cuts inside a group, wherever that falls."""
    architecture = dataclasses.replace(Architecture.read(folders / "mistral"), num_heads=8, num_kv_heads=groups, head_dim=8)
    rest = (5,) if kind == "weight" else ()
    start, wholes = 0, {}
    for name, rows in (("q", 64), ("k", groups * 8), ("v", groups * 8)):
        count = torch.Size((rows, *rest)).numel()
        wholes[name] = torch.arange(start, start + count).view(rows, *rest)
        start += count
    joined = torch.cat([wholes[name].unflatten(0, (groups, -1)) for name in "qkv"], dim=1).flatten(0, 1)
    back = {name: torch.full_like(tensor, -1) for name, tensor in wholes.items()}
    for rank, local in enumerate(joined.chunk(size)):
        found = torch.full_like(local, -1)
        for part in QKV("q", "k", "v").parts(tuple(local.shape), rank, size, architecture):
            piece = Piece(*part)
            assert piece.shape == wholes[piece.name].shape
            piece.write(found, wholes[piece.name][piece.index])
            back[piece.name][piece.index] = piece.read(local)
        assert torch.equal(found, local)
    assert all(torch.equal(back[name], wholes[name]) for name in wholes)


def test_a_rank_may_hold_nothing_but_padding(folders, mesh, tmp_path):
    """Of 5 rows on 4 ranks of 2: loading makes padding zero."""
    architecture = dataclasses.replace(Architecture.read(folders / "mistral"), vocab_size=5)
    parts = [list(Vocabulary("e").parts((2, 3), rank, 4, architecture)) for rank in range(4)]
    assert [[part.index[0] for part in own] for own in parts] == [[slice(0, 2)], [slice(2, 4)], [slice(4, 5)], []]
    pieces = {f"p{rank}": [Piece(*part) for part in own] for rank, own in enumerate(parts)}
    directory = Directory(mesh, pieces)
    whole = torch.arange(1.0, 16.0).view(5, 3)
    save_file({"e": whole}, tmp_path / "model.safetensors")
    local = {name: torch.full((2, 3), 9.0) for name in pieces}
    directory.load(TensorFolder(tmp_path), local.__getitem__)
    assert torch.equal(torch.cat(list(local.values())), torch.cat([whole, torch.zeros(3, 3)]))
    ((name, found),) = directory.stream(local.__getitem__)
    assert name == "e" and torch.equal(found, whole)


@pytest.mark.parametrize("name", ["qwen3_moe_tied", "mixtral"])
def test_grouped_experts_are_the_same_tensors(mesh, folders, name):
    """Transformer Engine has all experts of a layer in one module, with a parameter each."""
    opened = Opened(folders / name, mesh, MODELS[name][2])

    def grouped(memory: str) -> str:
        before, found, rest = memory.partition("local_experts.")
        number, _, linear = rest.partition(".")
        return f"{before}{linear}{number}" if found else memory

    own = families.pieces(opened.architecture, mesh, opened.parameters)
    other = families.pieces(opened.architecture, mesh, {grouped(memory): p for memory, p in opened.parameters.items()})
    assert "decoder.layers.3.mlp.experts.linear_fc2.weight3" in other
    for memory in own:
        assert [p.name for p in own[memory]] == [p.name for p in other[grouped(memory)]]


# --- memory -------------------------------------------------------------------------------------------------------------

HIDDEN, WIDTH, LAYERS, VOCABULARY = 256, 704, 20, 4096
LARGEST = VOCABULARY * HIDDEN * 4 / 1e6  # MB, of the embedding, in float32
WHOLE = LARGEST + LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * WIDTH) * 4 / 1e6
SLACK = 1.0


@pytest.fixture(scope="module")
def memory(once, folders):
    def make(out):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))
        model.save_pretrained(out / "large")
        # A fixed threshold: what is freed goes back to the system at once.
        launch("pieces_memory_worker", folders / "llama_tied", out / "large", out, MALLOC_MMAP_THRESHOLD_="65536")

    out = once("megatron-memory", make)
    return [json.loads((out / f"memory-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_no_rank_has_the_whole_model(memory, layout):
    """Beside its own 35 MB. Measured: less than 0.1 MB to load, 4.2 MB (TP2) and 2.3 MB (PP2) to stream, with buckets of
    2.1 MB; 70 MB where all tensors are kept, so that the bound would notice it."""
    for rank in memory:
        found = rank[layout]
        assert found["shard"] < WHOLE / 2 + LARGEST
        assert found["load"] <= LARGEST / 2 + SLACK
        assert found["stream"] <= LARGEST + BUCKET / 2e6 + SLACK < WHOLE / 8
        assert found["whole"] >= WHOLE
