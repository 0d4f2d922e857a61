"""Dropout masks depend on (seed, step, sample, module) and on nothing else."""

import pytest
import torch
from tiny_models import make_rows, relative_distance
from torch import nn

from twinkle_research.errors import UserError
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.dropout import DropoutKey, DropoutState, KeyedDropout, key_dropout, zero_functional_dropout
from twinkle_research.model.transformers import TransformersModel


def mask(step=0, samples=(0, 1), lengths=(3, 5), name="a", width=5, seed=0, side="right", p=0.5):
    rows = tuple(
        (row, slice(0, n) if side == "right" else slice(width - n, width), s) for row, (n, s) in enumerate(zip(lengths, samples))
    )
    layer = KeyedDropout(p, name, DropoutState(seed, DropoutKey(step, (len(lengths), width), rows)))
    out = layer(torch.ones(len(lengths), width, 40))
    return [out[row, where] for row, where, _ in rows]


def test_documents_of_one_packed_row():
    key = DropoutKey(0, (1, 8), ((0, slice(0, 3), 0), (0, slice(3, 8), 1)))
    out = KeyedDropout(0.5, "a", DropoutState(0, key))(torch.ones(1, 8, 40))
    apart = mask()
    assert torch.equal(out[0, :3], apart[0]) and torch.equal(out[0, 3:], apart[1])


def test_what_a_mask_depends_on():
    base = mask()
    assert torch.equal(base[1], mask(samples=(1,), lengths=(5,), width=9)[0])  # other rows and padding
    assert torch.equal(base[0], mask(samples=(7, 0), lengths=(5, 3), side="left")[1])
    for other in (mask(step=1), mask(name="b"), mask(seed=1), mask(samples=(2, 3))):
        assert not torch.equal(base[0], other[0])
    assert not torch.equal(base[0], base[1][:3])


def test_expectation_and_scale():
    kept = mask(samples=range(50), lengths=[20] * 50, width=20, p=0.3)
    values = torch.stack(kept)
    assert values.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float(values.mean()) == pytest.approx(1.0, abs=0.02)


def test_flat_and_refused_layouts():
    layer = KeyedDropout(0.5, "experts", DropoutState(0, DropoutKey(0, (2, 3), ((0, slice(0, 3), 0), (1, slice(0, 3), 1)))))
    x = torch.ones(2, 3, 4)
    assert torch.equal(layer(x).view(6, 4), layer(x.view(6, 4)))
    with pytest.raises(UserError, match="experts cannot be keyed"):
        layer(torch.ones(5, 4))
    layer.state.key = None
    with pytest.raises(UserError, match="experts ran in training mode outside"):
        layer(x)
    assert layer.eval()(x) is x


def test_replaces_modules_and_silences_functions():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.1)
            self.list = nn.ModuleList([nn.Dropout(0.2), nn.Dropout(0.0)])
            self.attention_dropout = 0.3

    block = Block()
    assert key_dropout(block, DropoutState(0)) == ["drop", "list.0"]
    assert isinstance(block.drop, KeyedDropout) and isinstance(block.list[0], KeyedDropout) and block.list[1].p == 0.0
    assert zero_functional_dropout(block) == ["attention_dropout"] and block.attention_dropout == 0.0


def lora_model(folder, micro, dropout=0.5, **options):
    model = TransformersModel(folder, seed=3, **options)
    model.add_adapter_to_model("default", LoraAdapterConfig(r=4, dropout=dropout))
    model.set_processor("InputProcessor", micro_batch_size=micro)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-4)
    return model


def train(model, rows, steps=3):
    for _ in range(steps):
        model.forward_backward(rows, normalizer=model.count(rows))
        model.clip_grad_and_step()
    return {name: p.detach().clone() for name, p in model.training_state().parameters.items()}


def test_training_with_dropout_does_not_depend_on_the_cut(tiny_llama):
    rows = make_rows(6)
    reference = train(lora_model(tiny_llama, micro=6), rows)
    for model in (lora_model(tiny_llama, micro=1), lora_model(tiny_llama, micro=4, gradient_checkpointing=True)):
        assert relative_distance(reference, train(model, rows)) <= 1e-5
    assert relative_distance(reference, train(lora_model(tiny_llama, micro=6, dropout=0.0), rows)) > 1e-2
    # The global generators decide nothing.
    torch.manual_seed(1234)
    again = train(lora_model(tiny_llama, micro=6), rows)
    assert all(torch.equal(again[name], w) for name, w in reference.items())


def test_s17_scoring_runs_without_dropout(tiny_llama):
    rows = make_rows(4)
    model = lora_model(tiny_llama, micro=4)
    train(model, rows)
    old, new = (model.forward_only(rows).result["logps"] for _ in range(2))
    assert old == new
    ratios = torch.tensor([b - a for x, y in zip(old, new) for a, b in zip(x, y)]).exp()
    assert (ratios == 1).all()


def test_dropout_of_the_architecture_is_keyed_too(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    rows = make_rows(5)
    results = []
    for micro in (5, 2):
        model = TransformersModel(tmp_path)
        assert model.module.config.attn_pdrop == 0.0
        assert sum(isinstance(m, KeyedDropout) for m in model.module.modules()) == 1 + 2 * 2
        assert not any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.module.modules())
        model.set_processor("InputProcessor", micro_batch_size=micro)
        model.set_optimizer("SGD", lr=0.1)
        results.append(train(model, rows))
    assert relative_distance(*results) <= 1e-6
