"""Eigenvalues, traces and densities of networks.

Oracles: closed forms, scipy on the explicit Hessian, PyHessian, one process over the union.
"""

from __future__ import annotations

import warnings

import pytest
import scipy.linalg
import torch
import torch.distributed
from probes import Quadratic, data, explicit_gauss_newton, explicit_hessian, net, seeded, split
from torch import nn

from regimes.base.errors import ConfigError
from regimes.base.seeding import make_generator
from regimes.instruments.hessian import (
    HessianProduct,
    cross_entropy,
    density,
    eigenvalues,
    fisher_trace,
    layer_eigenvalues,
    layer_traces,
    trace,
)


@pytest.fixture(scope="module")
def exact():
    return explicit_hessian(net(), data())


@pytest.fixture
def hessian():
    return HessianProduct(net(), cross_entropy, split(data(), 7, 5))


def quadratic(spectrum):
    n = len(spectrum)
    q = torch.linalg.qr(torch.randn(n, n, generator=make_generator(9), dtype=torch.float64)).Q
    h = q @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ q.mT
    model = Quadratic((h + h.mT) / 2)
    return HessianProduct(model, lambda m, x: m(x).mean(), [torch.zeros(3)])


def close(a, b, rtol):
    return float((a - b).abs().max()) <= rtol * float(b.abs().max())


@pytest.mark.parametrize(
    "spectrum", [[5.0, 2, 1, 0.5], [3.0, 0, -4, -4.5, 1], [-1.0, -2, -3], [2.0, 2, 2]]
)
def test_quadratics(spectrum):
    product = quadratic(spectrum)
    found = eigenvalues(product, largest=2, smallest=2, tolerance=1e-10)
    ordered = torch.tensor(sorted(spectrum), dtype=torch.float64)
    assert torch.allclose(found.largest, ordered.flip(0)[:2], atol=1e-12)
    assert torch.allclose(found.smallest, ordered[:2], atol=1e-12)
    many = trace(product, products=400)
    assert abs(many.value - sum(spectrum)) <= 5 * many.error + 1e-10


def test_logistic_regression_closed_form():
    x = torch.randn(30, 6, generator=make_generator(1), dtype=torch.float64)
    y = torch.randint(0, 2, (30,), generator=make_generator(2)).double()
    model = seeded(lambda: nn.Linear(6, 1, bias=False).double(), "logistic")
    p = torch.sigmoid(model(x)).detach()
    closed = x.mT @ (p * (1 - p) * x) / 30

    def loss(m, batch):
        return nn.functional.binary_cross_entropy_with_logits(m(batch[0]).squeeze(1), batch[1])

    product = HessianProduct(model, loss, split((x, y), 11, 19))
    found = eigenvalues(product, largest=3, smallest=3, tolerance=1e-10)
    values = torch.linalg.eigvalsh(closed)
    assert close(found.largest, values.flip(0)[:3], 1e-12)
    assert close(found.smallest, values[:3], 1e-11)


def test_a_convolutional_net_against_scipy(hessian, exact):
    found = eigenvalues(hessian, largest=5, smallest=3, tolerance=1e-7)
    values = torch.from_numpy(scipy.linalg.eigvalsh(exact.numpy()))
    assert found.converged
    assert found.products < 100
    assert torch.all(found.largest / values.flip(0)[:5] - 1 < 1e-10)
    assert torch.all((found.smallest / values[:3] - 1).abs() < 1e-10)
    assert (found.largest > 0).all()
    assert (found.smallest < 0).all()
    left = (
        found.vectors @ exact - torch.cat([found.largest, found.smallest])[:, None] * found.vectors
    )
    assert torch.allclose(left.norm(dim=1), found.residuals, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("mode", ["eval", "batch-statistics"])
def test_pyhessian_agrees_on_the_largest_magnitude(batches, mode):
    parts = split(data(), *([12] if batches == 1 else [7, 5]))
    product = HessianProduct(net(), cross_entropy, parts, mode=mode)
    ours = eigenvalues(product, largest=3, smallest=3, tolerance=1e-6)
    peer = eigenvalues(product, backend="pyhessian", tolerance=1e-5, max_products=200)
    both = torch.cat([ours.largest, ours.smallest])
    assert float(peer.largest[0]) == pytest.approx(float(both[both.abs().argmax()]), rel=1e-3)
    assert peer.products > 1
    assert abs(float(peer.vectors[0] @ ours.vectors[both.abs().argmax()])) > 0.99


@pytest.mark.parametrize(
    ("each", "stopped"), [(70, "converged"), (50, "max_products")], ids=["enough", "too few"]
)
def test_pyhessian_says_whether_all_of_several_values_have_converged(hessian, each, stopped):
    """All together take more than 70 products, none of them does."""
    options = {"largest": 3, "tolerance": 1e-3, "max_products": 3 * each}
    found = eigenvalues(hessian, backend="pyhessian", **options)
    assert found.products > each
    assert found.stopped == stopped


def test_pyhessian_trace(hessian, exact):
    found = trace(hessian, products=100, backend="pyhessian")
    assert abs(found.value - float(exact.trace())) < 5 * found.error + 0.05 * float(exact.trace())


def test_pyhessian_leaves_no_trace(hessian):
    before, stream = list(warnings.filters), torch.random.get_rng_state()
    trace(hessian, products=2, backend="pyhessian")
    assert warnings.filters == before
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert all(p.grad is None for p in hessian.model.parameters())


def test_pyhessian_says_what_it_cannot_do(hessian):
    for options in ({"smallest": 1}, {"max_seconds": 1.0}, {"largest": 10**6}):
        with pytest.raises(ConfigError):
            eigenvalues(hessian, backend="pyhessian", **options)
    with pytest.raises(ConfigError, match="one process"):
        eigenvalues(
            HessianProduct(net(), cross_entropy, [data()], mean=lambda t: t), backend="pyhessian"
        )
    outside = HessianProduct(net(), lambda model, batch: torch.ones(()), [data()])
    for backend in ("lanczos", "pyhessian"):
        with pytest.raises(ConfigError, match="loss"):
            eigenvalues(outside, backend=backend)


def test_layer_eigenvalues_are_those_of_the_blocks(hessian, exact):
    found = layer_eigenvalues(hessian, tolerance=1e-6, max_products=60)
    assert list(found) == hessian.names
    for name, rows in zip(hessian.names, hessian.slices, strict=True):
        top = float(torch.linalg.eigvalsh(exact[rows, rows])[-1])
        assert float(found[name].largest[0]) == pytest.approx(top, rel=1e-8, abs=1e-12)
    with pytest.raises(ConfigError, match="No layer 'conv9'"):
        layer_eigenvalues(hessian, layers=["conv9"])
    first, *_, last = hessian.names
    (together,) = layer_eigenvalues(
        hessian, layers={"ends": [first, last]}, tolerance=1e-6
    ).values()
    both = torch.cat(
        [torch.arange(s.start, s.stop) for s in (hessian.slices[0], hessian.slices[-1])]
    )
    top = float(torch.linalg.eigvalsh(exact[both][:, both])[-1])
    assert float(together.largest[0]) == pytest.approx(top, rel=1e-8)


def test_traces_are_unbiased_within_their_error(hessian, exact):
    found = trace(hessian, products=90)
    assert abs(found.value - float(exact.trace())) < 4 * found.error
    assert found.error < 0.3 * float(exact.trace())


def test_layer_traces_add_up_and_are_unbiased(hessian, exact):
    layers = layer_traces(hessian, probes=60)
    whole = trace(hessian, products=60)
    assert sum(e.value for e in layers.values()) == pytest.approx(whole.value, rel=1e-10)
    for name, rows in zip(hessian.names, hessian.slices, strict=True):
        block = float(exact[rows, rows].trace())
        assert abs(layers[name].value - block) < 5 * layers[name].error + 1e-12


def test_a_parameter_that_a_layer_names_twice_counts_once(hessian):
    once, twice = {"head": ["head.bias"]}, {"head": ["head.bias", "head.bias"]}
    assert layer_traces(hessian, layers=twice, probes=3) == layer_traces(
        hessian, layers=once, probes=3
    )
    values = [layer_eigenvalues(hessian, layers=x)["head"].largest for x in (twice, once)]
    assert torch.equal(*values)


def test_density_is_exact_when_the_space_is_complete(hessian, exact):
    # moments of a complete rule are z'H^j z / z'z: compare with the same probes' Rayleigh values
    hessian(hessian.gradient)  # what was asked before is not the density's
    found = density(hessian, probes=3, steps=25)
    assert found.weights.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert (found.weights >= 0).all()
    assert found.nodes.dtype == torch.float64
    assert found.products == 75
    values = torch.linalg.eigvalsh(exact)
    assert found.nodes.min() >= values[0] - 1e-9
    assert found.nodes.max() == pytest.approx(float(values[-1]), rel=1e-6)
    grid = torch.linspace(-30, 60, 9001, dtype=torch.float64)
    area = torch.trapezoid(found.curve(grid, 0.5), grid)
    assert float(area) == pytest.approx(1.0, abs=1e-3)


def test_density_of_known_quadratics():
    product = quadratic([3.0, 3, -1, 0.5])
    found = density(product, probes=400, steps=10)
    for value, share in ((3.0, 0.5), (-1.0, 0.25), (0.5, 0.25)):
        weight = found.weights[(found.nodes - value).abs() < 1e-6].sum()
        assert float(weight) == pytest.approx(share, abs=0.06)


def test_fisher_traces(hessian):
    model, batches = net(), split(data(), 7, 5)
    x, y = data()
    squares = []
    for i in range(len(y)):
        loss = cross_entropy(model, (x[i : i + 1], y[i : i + 1]))
        squares.append(
            [float(g.square().sum()) for g in torch.autograd.grad(loss, [*model.parameters()])]
        )
    found = fisher_trace(model, batches, kind="empirical")
    expected = torch.tensor(squares, dtype=torch.float64)
    assert found.total.value == pytest.approx(float(expected.sum(1).mean()), rel=1e-12)
    assert found.total.error == pytest.approx(
        float(expected.sum(1).std() / len(y) ** 0.5), rel=1e-9
    )
    assert [e.value for e in found.layers.values()] == pytest.approx(expected.mean(0).tolist())
    training = net().train()  # BatchNorm has no statistics of a single sample
    assert fisher_trace(training, batches, kind="empirical", mode="eval") == found
    assert training.training


def test_the_models_own_fisher_is_the_gauss_newton_trace():
    model, batch = net(), data(6)
    exact = explicit_gauss_newton(model, batch).trace()
    found = fisher_trace(model, [batch], draws=50, seed=4)
    assert found.total.value == pytest.approx(float(exact), rel=0.15)
    first, again = (fisher_trace(model, [batch], seed=4) for _ in range(2))
    assert first == again
    whole, half = (fisher_trace(model, [b], seed=1) for b in (batch, split(batch, 3, 3)[0]))
    rest = fisher_trace(model, [split(batch, 3, 3)[1]], seed=1, first_sample=3)
    assert whole.total.value == pytest.approx((half.total.value + rest.total.value) / 2)


def test_labels_are_drawn_as_the_model_expects_them():
    """A bias alone: the gradient of label y is p - e_y, and over y ~ p the mean of its square is
    1 - p @ p; were every label as likely, 1 + p @ p - 2 / 3."""
    model = torch.nn.Linear(2, 3).double()
    torch.nn.init.zeros_(model.weight.requires_grad_(False))
    p = torch.tensor([0.8, 0.15, 0.05], dtype=torch.float64)
    model.bias.data = p.log()
    batch = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([2, 2, 2, 2])
    found = fisher_trace(model, [batch], draws=500)
    assert found.total.value == pytest.approx(float(1 - p @ p), rel=0.1)
    told = fisher_trace(model, [batch], kind="empirical")
    assert told.total.value == pytest.approx(float(1 + p @ p - 2 * p[2]))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda h: eigenvalues(h, largest=10**6), "dimension"),
        (lambda h: eigenvalues(h, backend="arpack"), "backend = 'arpack'"),
        (lambda h: trace(h, products=1), "at least 2"),
        (lambda h: trace(h, products=0, backend="pyhessian"), "products = 0: expected at least 2"),
        (lambda h: density(h, steps=2).curve(torch.zeros(2), 0.0), "width = 0.0: expected a pos"),
        (lambda h: layer_traces(h, probes=1), "at least 2"),
        (lambda h: density(h, probes=0), "probes = 0: expected at least 1"),
        (lambda h: fisher_trace(h.model, []), "probe set is empty"),
        (lambda h: fisher_trace(h.model, h.batches, mode="train"), "mode = 'train'"),
        (lambda h: fisher_trace(h.model, h.batches, kind="empirical", draws=2), "draws = 2"),
        (lambda h: fisher_trace(h.model, h.batches, mean=lambda flat: flat), "processes = None"),
        (lambda h: fisher_trace(h.model.train(), h.batches), "train mode"),
    ],
)
def test_bad_input_is_one_sentence(hessian, call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call(hessian)
