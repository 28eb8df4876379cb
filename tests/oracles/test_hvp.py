"""Hessian-vector products. Oracles: explicit Hessians, closed forms; and the model's own bits."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from probes import (
    data,
    explicit_gauss_newton,
    explicit_hessian,
    net,
    normalising_by_batch,
    seeded,
    split,
)
from torch import nn

from regimes.base.errors import ConfigError, TrainingError
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
from regimes.instruments.hessian.probe import preserve_model

MODES = ["eval", "batch-statistics"]


@functools.cache
def explicit(mode, *sizes):
    model, batches = net(), split(data(sum(sizes)), *sizes)
    if mode == "eval":
        return explicit_hessian(model, tuple(map(torch.cat, zip(*batches, strict=True))))
    total = sum(len(y) for _, y in batches)
    with normalising_by_batch(model):
        return sum(explicit_hessian(model, b) * len(b[1]) / total for b in batches)


def matrix_of(product):
    return product(torch.eye(product.dimension, dtype=product.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory", [2**30, 0], ids=["retained", "rebuilt"])
def test_the_matrix_is_the_explicit_hessian(mode, memory):
    model, batches = net(), split(data(), 7, 5)
    product = HessianProduct(model, cross_entropy, batches, mode=mode, memory=memory)
    exact = explicit(mode, 7, 5)
    v = torch.randn(20, product.dimension, generator=make_generator(1), dtype=torch.float64)
    assert torch.allclose(product(v), v @ exact, rtol=0, atol=1e-12 * float(exact.norm()))
    assert torch.allclose(product(v[0]), v[0] @ exact, rtol=0, atol=1e-12 * float(exact.norm()))
    assert product.retained == (2 if memory else 0)
    assert product.products == 21


@pytest.mark.parametrize("mode", MODES)
def test_float32_agrees_with_float64_in_channels_last(mode):
    model, batch = net(), data()
    v = torch.randn(
        HessianProduct(model, cross_entropy, [batch]).dimension, generator=make_generator(0)
    )
    exact = HessianProduct(model, cross_entropy, [batch], mode=mode)(v.double())
    small, x = copy.deepcopy(model).float(), batch[0].float()
    found = HessianProduct(small, cross_entropy, [(x, batch[1])], mode=mode)(v)
    assert (found - exact).norm() < 1e-4 * exact.norm()


class Flat(nn.Module):
    """A convolution whose output is flattened in one of the ways that depend on its layout."""

    def __init__(self, flatten):
        super().__init__()
        self.convolution, self.flatten = nn.Conv2d(2, 3, 3), flatten

    def forward(self, x):
        return self.flatten(self.convolution(x))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda y: y.view(len(y), -1),
        lambda y: y.view_as(torch.empty(len(y), 48)),
        lambda y: y.as_strided((len(y), 48), (48, 1)),
        lambda y: torch.as_strided(y, (len(y), 48), (48, 1)),
    ],
    ids=["view", "view_as", "as_strided", "torch.as_strided"],
)
def test_the_layout_is_the_one_that_the_model_expects(flatten):
    model, batch = seeded(lambda: Flat(flatten), "flat"), data(dtype=torch.float32)
    product, expected = HessianProduct(model, cross_entropy, [batch]), cross_entropy(model, batch)
    assert product.loss_value == pytest.approx(float(expected.detach()), rel=1e-5)


def test_gradient_and_loss_come_free():
    model, batch = net(), data()
    product = HessianProduct(model, cross_entropy, split(batch, 3, 9))
    loss = cross_entropy(model, batch)
    exact = torch.cat([g.view(-1) for g in torch.autograd.grad(loss, product.parameters)])
    assert torch.allclose(product.gradient, exact, rtol=0, atol=1e-13)
    assert product.loss_value == pytest.approx(float(loss.detach()), rel=1e-12)
    assert product.products == 0


@pytest.mark.parametrize("layer", [0, 3, 5, 12])
def test_a_block_is_the_diagonal_block(layer):
    model, batch = net(), data()
    product = HessianProduct(model, cross_entropy, [batch])
    rows = product.slices[layer]
    exact = explicit("eval", 12)[rows, rows]
    eye = torch.eye(len(exact), dtype=torch.float64)
    assert torch.allclose(product.block(layer)(eye), exact, rtol=0, atol=1e-12)


def test_softmax_regression_closed_form_also_for_gauss_newton():
    model = seeded(lambda: nn.Linear(4, 3, bias=False).double(), "softmax")
    x = torch.randn(20, 4, generator=make_generator(1), dtype=torch.float64)
    y = torch.randint(0, 3, (20,), generator=make_generator(2))
    p = model(x).softmax(-1).detach()
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    exact = torch.einsum("nab,ni,nj->aibj", inner, x, x).reshape(12, 12) / 20
    for kind in ("hessian", "gauss-newton"):
        found = matrix_of(HessianProduct(model, cross_entropy, [(x, y)], kind=kind))
        assert torch.allclose(found, exact, rtol=0, atol=1e-14)


def test_gauss_newton_of_a_net_is_j_transposed_h_j():
    model, batch = net(), data(5)
    product = HessianProduct(model, cross_entropy, [batch], kind="gauss-newton")
    exact = explicit_gauss_newton(model, batch)
    v = torch.randn(20, product.dimension, generator=make_generator(1), dtype=torch.float64)
    assert torch.allclose(product(v), v @ exact, rtol=0, atol=1e-11)


def test_memory_decides_how_many_graphs_are_kept():
    batches = split(data(), 4, 4, 4)
    whole = HessianProduct(net(), cross_entropy, batches)
    v = torch.randn(whole.dimension, generator=make_generator(0), dtype=torch.float64)
    expected = whole(v)
    one = HessianProduct(net(), cross_entropy, batches[:1])
    with_one_graph = []
    for megabytes in range(40):
        part = HessianProduct(net(), cross_entropy, batches, memory=megabytes * 50_000)
        assert torch.allclose(part(v), expected, rtol=1e-12)
        with_one_graph.append(part.retained)
        if part.retained == 3:
            break
    one(v)
    assert (whole.retained, one.retained, with_one_graph[-1]) == (3, 1, 3)
    assert with_one_graph == sorted(with_one_graph)
    assert set(with_one_graph) == {0, 1, 2, 3}  # each graph takes its own room


def everything(model, batches):
    """Every instrument of the curvature module, PyHessian included."""
    for mode in MODES:
        hessian = HessianProduct(model, cross_entropy, batches, mode=mode)
        first = eigenvalues(hessian, largest=2, smallest=1, max_products=6)
        eigenvalues(hessian, start=first, max_products=4)
        eigenvalues(hessian, backend="pyhessian", max_products=3)
        trace(hessian, products=3, backend="pyhessian")
        layer_eigenvalues(hessian, layers=hessian.names[:2], max_products=3)
        trace(hessian, products=6)
        layer_traces(hessian, probes=2)
        density(hessian, probes=1, steps=3)
    rebuilt = HessianProduct(model, cross_entropy, batches, mode="eval", memory=0)
    rebuilt(rebuilt.gradient)
    fisher_trace(model, batches, mode="eval")


def test_no_trace_is_left():
    model, batches = net(), split(data(), 6, 6)
    model.train()
    model.block.eval()
    model.stem.weight.requires_grad_(False)
    gradients = [None if i % 2 else torch.ones_like(p) for i, p in enumerate(model.parameters())]
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g if p.requires_grad else None
    torch.manual_seed(3)
    before = copy.deepcopy(model.state_dict())
    kept = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    flags = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    streams = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    everything(model, batches)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for p, (grad, value) in zip(model.parameters(), kept, strict=True):
        assert p.grad is grad
        assert grad is None or torch.equal(grad, value)
    assert flags == [m.training for m in model.modules()]
    assert wanted == [p.requires_grad for p in model.parameters()]
    assert versions == [p._version for p in model.parameters()]
    assert torch.equal(streams[0], torch.get_rng_state())
    assert np.array_equal(streams[1], np.random.get_state()[1])  # noqa: NPY002


def test_untouched_puts_back_what_was_moved_even_after_an_error():
    model = net()
    with torch.no_grad():
        model.norm.running_mean[0] = torch.nan
        model.head.bias[0] = -0.0
    before = copy.deepcopy(model.state_dict())
    buffer, state = model.norm.running_mean, torch.get_rng_state()
    numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002

    def vandalise():
        model.train()
        model(torch.randn(4, 2, 6, 6, dtype=torch.float64)).sum().backward()
        model.head.bias.data.zero_()
        model.head.weight.requires_grad_(False)
        model.norm.running_mean = torch.zeros(4)
        random.random()
        np.random.rand()  # noqa: NPY002
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"), preserve_model(model):
        vandalise()
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    after = model.state_dict()
    assert all(
        np.array_equal(after[k].numpy(), t.numpy(), equal_nan=True) for k, t in before.items()
    )
    assert bool(torch.signbit(model.head.bias[0]))
    assert model.norm.running_mean is buffer
    assert model.head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m.training for m in model.modules())
    assert torch.equal(state, torch.get_rng_state())


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


def frozen(model):
    return model.requires_grad_(False)


class Sometimes(nn.Module):
    """A linear layer, left out of the batches whose first input is negative."""

    def __init__(self):
        super().__init__()
        self.layer = seeded(lambda: nn.Linear(3, 3, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) if x[0, 0] > 0 else x


def squared(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_a_micro_batch_without_parameters_adds_nothing():
    """Gauss-Newton is the Hessian where the model is linear and the loss squared."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.rand(2, 4, 3, generator=draw, dtype=torch.float64)
    batches, options = [(x, y), (-x, y)], {"weight": lambda batch: len(batch[0])}
    newton, hessian = (
        matrix_of(HessianProduct(Sometimes(), squared, batches, kind=kind, **options))
        for kind in ("gauss-newton", "hessian")
    )
    assert torch.allclose(newton, hessian, rtol=1e-12, atol=0)
    assert newton.abs().max() > 0.1


def unused(model):
    model.spare = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return model


BAD = {
    "no parameter with a gradient": (lambda: frozen(net()), {}, "requires a gradient"),
    "a parameter outside the loss": (lambda: unused(net()), {}, "'spare' gets no gradient"),
    "BatchNorm in train mode": (lambda: net().train(), {}, "'norm' is in train mode"),
    "dropout on": (lambda: nn.Sequential(net(), nn.Dropout(0.1).train()), {}, "Dropout '1'"),
    "noise": (lambda: nn.Sequential(net(), Noisy(3, 3).double()), {}, "draws random numbers"),
    "an unknown mode": (net, {"mode": "train"}, "'batch-statistics'"),
    "an unknown kind": (net, {"kind": "fisher"}, "'gauss-newton'"),
}


@pytest.mark.parametrize(("make", "options", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence(make, options, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        _ = HessianProduct(make(), cross_entropy, [data()], **options).gradient
    assert str(caught.value).count("\n") == 0


class Pair(nn.Module):
    """A net whose output is a pair of tensors."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        y = self.net(x)
        return y, y


@pytest.mark.parametrize(
    ("model", "logits"),
    [(net(), lambda model, x: model(x) + model(x)), (Pair(), lambda model, x: model(x)[0])],
    ids=["the model runs twice", "two outputs"],
)
def test_gauss_newton_needs_one_output(model, logits):
    def loss(model, batch):
        return nn.functional.cross_entropy(logits(model, batch[0]), batch[1])

    with pytest.raises(ConfigError, match="runs the model once, to one tensor"):
        _ = HessianProduct(model, loss, [data()], kind="gauss-newton").gradient
    assert HessianProduct(model, loss, [data()]).gradient.isfinite().all()


@pytest.mark.parametrize("batch", [{"text": "a word"}, torch.ones(()), []])
def test_a_batch_that_shows_no_samples(batch):
    with pytest.raises(ConfigError, match=r"^A batch has no tensor with an axis: how many samples"):
        HessianProduct(net(), lambda model, batch: model.head.bias.sum(), [data(), batch])


@pytest.mark.parametrize("batches", [[], [(torch.zeros(0, 2, 6, 6), torch.zeros(0))]])
def test_an_empty_probe_set(batches):
    with pytest.raises(ConfigError, match="probe set is empty"):
        HessianProduct(net(), cross_entropy, batches)


def test_dropout_is_off_in_the_modes_that_say_so():
    model = nn.Sequential(net(), nn.Dropout(0.5)).train()
    for mode in MODES:
        _ = HessianProduct(model, cross_entropy, [data()], mode=mode).gradient
    assert model[1].training


def test_a_nan_is_an_error_and_leaves_no_trace():
    model = net()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        eigenvalues(HessianProduct(model, cross_entropy, [data()]))
    product = HessianProduct(net(), cross_entropy, [data()])
    with pytest.raises(TrainingError, match="not finite"):
        product(torch.full((product.dimension,), torch.nan, dtype=torch.float64))


def test_wrong_shapes():
    model = net()
    product = HessianProduct(model, cross_entropy, [data()])
    with pytest.raises(ConfigError, match=r"vectors = \(3,\): expected"):
        product(torch.zeros(3, dtype=torch.float64))


def _rebind(weight):
    weight.data = weight.data + 1


def _fused_step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def _write_by_numpy(weight):
    weight.detach().numpy()[...] += 1


@pytest.mark.parametrize(
    "write",
    [
        torch.no_grad()(lambda weight: weight.add_(1)),
        lambda weight: weight.data.add_(1),
        _rebind,
        _write_by_numpy,
        _fused_step,
    ],
    ids=["no_grad", "data", "rebind", "numpy", "fused"],
)
@pytest.mark.parametrize("memory", [2**30, 0], ids=["retained", "rebuilt"])
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_weights_that_have_changed_are_refused(write, memory, used):
    model = net()
    product = HessianProduct(model, cross_entropy, [data()], memory=memory)
    vector = torch.ones(product.dimension, dtype=torch.float64)
    if used:
        product(vector)
    write(model.head.bias)
    with pytest.raises(ConfigError, match="weights changed"):
        product(vector)
