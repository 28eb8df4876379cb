"""Hessians of any user's model. Oracle: a twin with the same function, of plain operations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from probes import data, net, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regimes
from regimes.base.errors import ConfigError
from regimes.base.seeding import make_generator
from regimes.instruments import make_instruments
from regimes.instruments.hessian import (
    HessianProduct,
    critical_sharpness,
    cross_entropy,
    eigenvalues,
    fisher_trace,
    layer_eigenvalues,
)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, written out."""
    time, size = q.shape[-2:]
    future = torch.ones(time, time).triu(1).bool()
    scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.kernel = nn.Linear(4, 12), nn.Linear(4, 3), kernel

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.kernel else None
        y = attend(q, k, v) if y is None else y
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)


class MultiHead(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x, x, x, need_weights=self.weights)[0].mean(1))


class Encoder(nn.Module):
    """Torch's layer, or its computation by a MultiheadAttention that returns its weights."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.out, self.kernel = nn.Linear(4, 3), kernel

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        if self.kernel:
            return self.out(layer(x).mean(1))
        x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=True)[0])
        return self.out(layer.norm2(x + layer.linear2(layer.linear1(x).relu())).mean(1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(4, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten()
        )
        self.out, self.reentrant = nn.Linear(12, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.out(self.body(x.transpose(1, 2)))
        return self.out(checkpoint(self.body, x.transpose(1, 2), use_reentrant=self.reentrant))


class Experts(nn.Module):
    """The second one serves long inputs alone."""

    def __init__(self, twin: bool) -> None:
        super().__init__()
        self.first, self.second, self.twin = nn.Linear(4, 3), nn.Linear(4, 3), twin

    def forward(self, x: Tensor) -> Tensor:
        x, long = x.mean(1), x.shape[1] > 5
        other = self.second(x) * long if self.twin or long else 0.0
        return torch.tanh(self.first(x)) + other * self.first(x)


TWINS = {
    "scaled_dot_product_attention": (lambda: Attention(True), lambda: Attention(False)),
    "MultiheadAttention": (lambda: MultiHead(False), lambda: MultiHead(True)),
    "TransformerEncoderLayer": (lambda: Encoder(True), lambda: Encoder(False)),
    "a re-entrant checkpoint": (lambda: Checkpointed(True), lambda: Checkpointed(None)),
    "a checkpoint": (lambda: Checkpointed(False), lambda: Checkpointed(None)),
    "an expert of some micro-batches": (lambda: Experts(False), lambda: Experts(True)),
}


def sequences(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches; checkpoints' models take the first's length only."""
    sizes = ((4, 5), (3, 6))
    return [
        (
            torch.randn(n, time, 4, generator=make_generator(n), dtype=dtype),
            torch.randint(3, (n,), generator=make_generator(n)),
        )
        for n, time in sizes
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", TWINS)
def test_every_model_has_the_hessian_of_its_twin(name: str, kind: str, training: bool) -> None:
    model, twin = (seeded(make, "twin").double().train(training) for make in TWINS[name])
    batches = sequences()[: 1 if "checkpoint" in name else 2]
    for mode in ("eval", "batch-statistics"):
        first, second = (
            HessianProduct(m, cross_entropy, batches, mode=mode, kind=kind, memory=memory)
            for m, memory in ((model, 2**30), (twin, 0))
        )
        block = torch.randn(3, first.dimension, generator=make_generator(1), dtype=torch.float64)
        torch.testing.assert_close(first(block), second(block), rtol=0, atol=1e-12)
        torch.testing.assert_close(first.gradient, second.gradient, rtol=0, atol=1e-13)
        for layer, size in enumerate(p.numel() for p in first.parameters):
            v = torch.ones(size, dtype=torch.float64)
            blocks = first.block(layer)(v), second.block(layer)(v)
            torch.testing.assert_close(*blocks, rtol=0, atol=1e-12)
    # the other measures differentiate once, and a checkpoint must not stop them either
    traces = [fisher_trace(m, batches, mode="eval").total.value for m in (model, twin)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-12)
    rates = [critical_sharpness(m, cross_entropy, batches, mode="eval").rate for m in (model, twin)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)


# -- functions without a second derivative ---------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.detach().tanh()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.detach().numpy() * (1 - ctx.y.numpy() ** 2))


class Call(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def hooked(x: Tensor) -> Tensor:
    y = x.tanh()
    y.register_hook(lambda g: g.detach() * 2 if x.requires_grad else g)
    return y


WITHOUT = {
    "once_differentiable": (Once.apply, "the Function Once in module '1' .Call."),
    "numpy": (ByNumpy.apply, "the Function ByNumpy in module '1' .Call."),
    "a gradient hook": (hooked, "a gradient hook"),
    "a kernel of torch": (lambda x: torch._prelu_kernel(x, x.new_ones(5)).tanh(), None),
}


def small(function) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), Call(function), nn.Linear(5, 3)), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [None, lambda flat: flat], ids=["alone", "processes"])
@pytest.mark.parametrize("name", WITHOUT)
def test_a_loss_without_a_second_derivative_is_refused_by_name(name, dtype, mean) -> None:
    function, sentence = WITHOUT[name]
    batches = [(x.mean(1), y) for x, y in sequences(dtype)]
    product = HessianProduct(small(function).to(dtype), cross_entropy, batches, mean=mean)
    if sentence is None:  # torch differentiates it twice
        product.check()
        return
    for use in (lambda: product.loss_value, lambda: eigenvalues(product), product.check):
        with pytest.raises(ConfigError, match=sentence):
            use()


def test_an_error_of_torch_names_its_operation() -> None:
    def no_second(x: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x[None, None]] * 3)[0]

    batches = [(x.mean(1), y) for x, y in sequences()]
    model = small(lambda x: no_second(x)[0, 0]).double()
    with pytest.raises(ConfigError, match="flash_attention_for_cpu_backward is not implemented"):
        HessianProduct(model, cross_entropy, batches).check()


@pytest.mark.parametrize("mode", ["eval", "batch-statistics"])
def test_rounding_is_no_asymmetry(mode: str) -> None:
    """Where a loss has been fitted to zero, float32 leaves few digits of its products."""
    model, (x, y) = net(torch.float32).train(), data(dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(3):
        for _ in range(20):
            optimizer.zero_grad()
            cross_entropy(model, (x, y)).backward()
            optimizer.step()
        HessianProduct(model, cross_entropy, [(x, y)], mode=mode).check()
    assert cross_entropy(model, (x, y)).item() < 1e-3


def test_an_impossible_curvature_is_refused_before_a_unit_is_trained(tmp_path: Path) -> None:
    x, y = (
        torch.randn(7, 4, generator=make_generator(0)),
        torch.randint(3, (7,), generator=make_generator(0)),
    )
    for table in ({"images": 6, "batch": 6}, {"images": 6, "batch": 3, "largest": 99}):
        with pytest.raises(ConfigError, match=r"Function Once|largest = 99"):
            regimes.simulate(
                small(torch.tanh if "largest" in table else Once.apply),
                (x, y),
                (x, y),
                out=tmp_path / "run",
                workers=1,
                batch_size=3,
                set={"instruments.curvature": table},
            )
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("targets", [torch.zeros(8, 3), torch.zeros(8), torch.zeros(8, 3).long()])
def test_a_fisher_trace_without_classes_is_refused_before_a_unit_is_trained(
    targets: torch.Tensor, tmp_path: Path
) -> None:
    data = torch.randn(8, 4, generator=make_generator(0)), targets
    with pytest.raises(ConfigError, match=r"instruments.fisher = .*: expected a class"):
        regimes.simulate(
            small(torch.tanh),
            data,
            data,
            out=tmp_path / "run",
            loss=lambda output, y: (output.sum(1) - y.view(len(y), -1).sum(1)).square().mean(),
            workers=1,
            batch_size=4,
            set={"instruments.fisher": {"images": 8, "batch": 4}},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tolerance", [-1.0, -1e-9, 0.0, math.nan, math.inf, -math.inf])
def test_a_tolerance_is_a_positive_number(tolerance: float) -> None:
    batches = [(x.mean(1), y) for x, y in sequences()]
    hessian = HessianProduct(small(torch.tanh).double(), cross_entropy, batches)
    for call in (
        lambda: eigenvalues(hessian, tolerance=tolerance),
        lambda: eigenvalues(hessian, tolerance=tolerance, backend="pyhessian"),
        lambda: layer_eigenvalues(hessian, tolerance=tolerance),
        lambda: make_instruments({"curvature": {"tolerance": tolerance}}),
    ):
        with pytest.raises(ConfigError, match="tolerance"):
            call()
