"""The chunked output projection against full logits and autograd, in float64."""

import itertools

import pytest
import torch

from twinkle_research.model.head import OUTPUTS, LogitTransform, SampledFrom, score_labels

N, D, V = 11, 6, 17
TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(1.0, 2.0), LogitTransform(3.0, 1.5)]


def tensors(dtype=torch.float64, trained=True, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_(trained)
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_(trained) if bias else None
    return hidden, weight, b, torch.randint(V, (N,), generator=g)


def full_logits(hidden, weight, bias, labels, transform, temperature=None, keep_NV=None):
    """The definition, with all logits at once."""
    z = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    if temperature is not None:
        z = z / temperature[:, None]
    if keep_NV is not None:
        z = z.masked_fill(~keep_NV, -torch.inf)
    logp = z.log_softmax(-1)
    finite = logp.masked_fill(logp == -torch.inf, 0.0)
    return {
        "logprobs": logp.gather(-1, labels[:, None]).squeeze(-1), "entropy": -(logp.exp() * finite).sum(-1),
        "logsumexp": z.logsumexp(-1), "mean_logprobs": logp.mean(-1),
    }  # fmt: skip


def gradients(values, leaves, weights):
    total = sum((values[name] * weights[name]).sum() + values[name].square().sum() for name in values)
    return torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad])


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_every_output_and_gradient(transform, trained, bias):
    hidden, weight, b, labels = tensors(trained=trained, bias=bias)
    g = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(N, generator=g, dtype=torch.float64) for name in OUTPUTS}
    subsets = [c for r in range(4) for c in itertools.combinations(OUTPUTS[1:], r)]
    for needs, chunk in itertools.product(subsets, (1, 4, N, 100)):
        found = score_labels(hidden, weight, labels, bias_V=b, transform=transform, needs=frozenset(needs), chunk=chunk)
        ours = {name: getattr(found, name) for name in ("logprobs", *needs)}
        expected = {name: v for name, v in full_logits(hidden, weight, b, labels, transform).items() if name in ours}
        for name, value in ours.items():
            assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-12), (name, needs, chunk)
        assert all(getattr(found, name) is None for name in OUTPUTS if name not in ours)
        for mine, right in zip(gradients(ours, (hidden, weight, b), weights), gradients(expected, (hidden, weight, b), weights)):
            assert torch.allclose(mine, right, rtol=1e-11, atol=1e-11), (needs, chunk)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("filtered", [False, True])
def test_the_distribution_sampled_from(transform, trained, filtered):
    """Temperatures of each position, and kept sets at two of three positions."""
    hidden, weight, b, labels = tensors(trained=trained)
    g = torch.Generator().manual_seed(2)
    temperature = 0.3 + torch.rand(N, generator=g, dtype=torch.float64)
    keep = torch.rand(N, V, generator=g) < 0.4
    keep[torch.arange(N), labels] = True
    keep[::3] = True
    listed = keep.clone()
    listed[::3] = False
    positions, ids = listed.nonzero().unbind(-1)
    sampled = SampledFrom(temperature, positions, ids) if filtered else SampledFrom(temperature)
    names = OUTPUTS[:3] if filtered else OUTPUTS
    weights = {name: torch.randn(N, generator=g, dtype=torch.float64) for name in OUTPUTS}
    for chunk in (1, 4, 100):
        expected = full_logits(hidden, weight, b, labels, transform, temperature, keep if filtered else None)
        expected = {name: expected[name] for name in names}
        found = score_labels(
            hidden, weight, labels, bias_V=b, transform=transform, needs=frozenset(names), chunk=chunk, sampled_from=sampled
        )
        ours = {name: getattr(found, name) for name in names}
        for name in names:
            assert torch.allclose(ours[name], expected[name], rtol=1e-12, atol=1e-12), (name, chunk)
        for mine, right in zip(gradients(ours, (hidden, weight, b), weights), gradients(expected, (hidden, weight, b), weights)):
            assert torch.allclose(mine, right, rtol=1e-11, atol=1e-11), chunk


def test_no_mean_over_a_filtered_vocabulary():
    hidden, weight, _, labels = tensors(bias=False)
    kept = SampledFrom(None, torch.arange(N), labels)
    with pytest.raises(ValueError, match="infinite where tokens are filtered out"):
        score_labels(hidden, weight, labels, needs=frozenset({"mean_logprobs"}), sampled_from=kept)
    assert score_labels(hidden, weight, labels, sampled_from=kept).logprobs.tolist() == [0.0] * N  # nothing else could come


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, N])
def test_announced_gradient_right_and_wrong(bias, chunk):
    """It saves a pass when right, and changes nothing when wrong or when the loss is scaled."""
    hidden, weight, b, labels = tensors(bias=bias)
    leaves = [t for t in (hidden, weight, b) if t is not None]
    announced = torch.linspace(-1, 1, N, dtype=torch.float64)
    for factor in (1.0, 2.0):
        ours = score_labels(hidden, weight, labels, bias_V=b, chunk=chunk, logprob_gradient_N=announced).logprobs
        right = full_logits(hidden, weight, b, labels, LogitTransform())["logprobs"]
        for mine, expected in zip(*(torch.autograd.grad((x * announced).sum() * factor, leaves) for x in (ours, right))):
            assert torch.allclose(mine, expected, rtol=1e-12, atol=1e-12)


def test_embedding_and_head_may_share_the_weight():
    """Both uses add to one gradient."""
    _, weight, _, labels = tensors(bias=False)
    ids = torch.arange(N) % V

    def loss(logprobs_of):
        hidden = torch.tanh(torch.nn.functional.embedding(ids, weight))
        return torch.autograd.grad(logprobs_of(hidden).sum(), weight)[0]

    ours = loss(lambda h: score_labels(h, weight, labels, chunk=3).logprobs)
    right = loss(lambda h: full_logits(h, weight, None, labels, LogitTransform())["logprobs"])
    assert torch.allclose(ours, right, rtol=1e-12, atol=1e-12)


def test_backward_twice_and_only_some_needs():
    hidden, weight, _, labels = tensors(bias=False)
    scores = score_labels(hidden, weight, labels, needs=frozenset({"entropy"}), chunk=4)
    first = torch.autograd.grad(scores.logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(scores.logprobs.sum(), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    detached = score_labels(hidden.detach(), weight, labels, chunk=4).logprobs  # only the weight needs a gradient
    assert torch.allclose(torch.autograd.grad(detached.sum(), weight)[0], first[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", [True, False])
def test_float32_chunks_differ_by_rounding_only(trained):
    hidden, weight, b, labels = tensors(torch.float32, trained)
    results = []
    for chunk in (1, 3, 100):
        logprobs = score_labels(hidden, weight, labels, bias_V=b, chunk=chunk).logprobs
        results.append([logprobs, *gradients({"logprobs": logprobs}, (hidden, weight, b), {"logprobs": 1.0})])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert (a - b).norm() <= 1e-6 * a.norm()


@pytest.mark.parametrize("trained", [True, False])
def test_bfloat16_is_as_exact_as_its_inputs(trained):
    """Scores are float32 of bfloat16 products; a confident position does not lose its small gradient to cancellation."""
    hidden, weight, _, labels = tensors(torch.bfloat16, trained, bias=False)
    with torch.no_grad():
        hidden[0] = 3 * weight[labels[0]]
    leaves = [t for t in (hidden, weight) if t.requires_grad]
    ours = score_labels(hidden, weight, labels, chunk=4).logprobs
    assert ours.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = full_logits(wide[0], wide[1] if trained else weight.double(), None, labels, LogitTransform())["logprobs"]
    assert (ours - right).abs().max() < 0.1
    for mine, expected in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(right.sum(), wide)):
        assert (mine.double() - expected).norm() < 0.02 * expected.norm()


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    scores = score_labels(hidden, weight, torch.tensor([0, 0]), needs=frozenset(OUTPUTS))
    assert scores.logprobs.tolist() == [0.0, -2e4] and scores.entropy.abs().max() < 1e-6
    grads = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), (hidden, weight))
    assert all(torch.isfinite(g).all() for g in grads)


def test_unknown_output_is_refused():
    hidden, weight, _, labels = tensors()
    with pytest.raises(ValueError, match="'entropyy'"):
        score_labels(hidden, weight, labels, needs=frozenset({"entropyy"}))


@pytest.mark.parametrize(
    ("trained", "chunk", "announced", "projections"),
    [
        (False, 4, None, 2),
        (True, N, None, 3),
        (True, 4, "right", 3),
        (True, 4, "wrong", 6),
        (True, 4, None, 4 - 3 / N),
    ],
)
def test_work_is_what_the_docstring_says(trained, chunk, announced, projections):
    """Counted multiplications: a second pass over the logits only where there is no way around it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class CountProducts(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
                a, b = args[-2:]
                self.products += a.shape[0] * a.shape[1] * b.shape[1]
            return function(*args, **(kwargs or {}))

    hidden, weight, _, labels = tensors(trained=trained, bias=False)
    gradient = torch.linspace(0.1, 1, N, dtype=torch.float64)
    known = {None: None, "right": gradient, "wrong": gradient + 1}[announced]
    with CountProducts() as counter:
        logprobs = score_labels(hidden, weight, labels, chunk=chunk, logprob_gradient_N=known).logprobs
        (logprobs * gradient).sum().backward()
    assert counter.products / (N * D * V) == pytest.approx(projections)
