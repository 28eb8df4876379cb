"""Critical sharpness. Oracles: a quadratic's Rayleigh quotient, a scan of the loss, a division."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from configs import smoke as config
from probes import Quadratic, data, net, split
from torch import Tensor, nn

import regimes
from regimes.base.errors import ConfigError, TrainingError
from regimes.instruments.hessian import critical_sharpness, cross_entropy

TIGHT = 1e-9


def bowl(values: list[float]) -> Quadratic:
    return Quadratic(torch.diag(torch.tensor(values, dtype=torch.float64)))


def flat_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


@pytest.mark.parametrize("start", [None, 1e-6, 1e6])
def test_along_the_gradient_of_a_quadratic_it_is_the_rayleigh_quotient(start: float | None) -> None:
    model = bowl([3.0, 1.0, 0.25])
    g = torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64)  # H w with w = 1
    rayleigh = float((g**2 * g).sum() / (g**2).sum())
    found = critical_sharpness(model, flat_loss, [torch.zeros(2)], start=start, tolerance=TIGHT)
    assert found.value == pytest.approx(rayleigh, rel=1e-8)
    assert found.value == 2 / found.rate
    assert torch.equal(model.w, torch.ones(3, dtype=torch.float64))


def test_it_counts_its_passes() -> None:
    calls = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x)
        return flat_loss(model, x)

    found = critical_sharpness(bowl([3.0, 1.0]), loss, [torch.zeros(2)], start=0.5)
    assert found.forwards == len(calls) > 2


def test_along_an_eigenvector_it_is_the_eigenvalue() -> None:
    model = bowl([3.0, 1.0, 0.25])
    with torch.no_grad():
        model.w.copy_(torch.tensor([0.0, 2.0, 0.0]))
    assert critical_sharpness(
        model, flat_loss, [torch.zeros(2)], tolerance=TIGHT
    ).value == pytest.approx(1.0, rel=1e-8)
    direction = [torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64)]  # a quarter of the gradient
    found = critical_sharpness(
        model, flat_loss, [torch.zeros(2)], direction=direction, tolerance=TIGHT
    )
    assert found.value == pytest.approx(0.25, rel=1e-8)


def test_of_a_network_by_scanning_the_loss() -> None:
    model, batch = net().eval(), data()
    value = cross_entropy(model, batch)
    gradient = torch.autograd.grad(value, list(model.parameters()))
    value = value.detach()

    def loss(rate: float) -> float:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(other.parameters(), gradient, strict=True):
                p -= rate * g
            return float(cross_entropy(other, batch))

    found = critical_sharpness(model, cross_entropy, split(batch, 7, 5), mode="eval")
    assert loss(found.rate) > float(value) >= loss(found.rate / (1 + 1 / 16) * (1 - 1e-9))
    again = critical_sharpness(
        model, cross_entropy, split(batch, 7, 5), mode="eval", start=found.rate
    )
    assert again.rate == pytest.approx(found.rate, rel=1 / 16)
    assert again.forwards <= 8  # from a good guess: two to bracket, four or five to bisect


def test_where_nothing_rises_there_is_no_number() -> None:
    slope, still = bowl([0.0, 0.0]), bowl([-1.0, -2.0])
    assert math.isnan(critical_sharpness(slope, flat_loss, [torch.zeros(2)]).value)  # no gradient
    assert math.isnan(
        critical_sharpness(still, flat_loss, [torch.zeros(2)]).value
    )  # falls for ever


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uphill_there_is_no_number(dtype: torch.dtype) -> None:
    """Every step against the gradient raises the loss, those that rounding hides, too."""
    model, batch = net(dtype).eval(), data(dtype=dtype)
    value = cross_entropy(model, batch)
    gradient = torch.autograd.grad(value, list(model.parameters()))
    uphill = [-g for g in gradient]
    found = critical_sharpness(model, cross_entropy, [batch], direction=uphill, mode="eval")
    assert math.isnan(found.value)
    assert math.isnan(found.rate)
    assert found.forwards == 1


def test_a_loss_may_be_a_vector_of_one_number() -> None:
    model, x = bowl([3.0, 1.0]), torch.zeros(2)
    found = critical_sharpness(model, lambda m, x: flat_loss(m, x).reshape(1), [x])
    assert found == critical_sharpness(model, flat_loss, [x])


def test_bad_input_is_one_sentence() -> None:
    model, x = bowl([1.0]), torch.zeros(2)
    one = torch.ones(1, dtype=torch.float64)
    for direction, shapes in (
        ([], r"\[\]"),
        ([one, one], r"\[\(1,\), \(1,\)\]"),
        ([one[0]], r"\[\(\)\]"),
    ):
        with pytest.raises(
            ConfigError, match=rf"shapes of direction = {shapes}: expected \[\(1,\)\]"
        ):
            critical_sharpness(model, flat_loss, [x], direction=direction)
    with pytest.raises(ConfigError, match="The probe set is empty"):
        critical_sharpness(model, flat_loss, [])
    for wrong in (0.0, 1.0):
        with pytest.raises(ConfigError, match=rf"tolerance = {wrong}: expected a number between"):
            critical_sharpness(model, flat_loss, [x], tolerance=wrong)
    with pytest.raises(ConfigError, match=r"start = -1\.0: expected a positive number"):
        critical_sharpness(model, flat_loss, [x], start=-1.0)
    dropout = nn.Sequential(OrderedDict(drop=nn.Dropout(0.5), line=nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="'drop' is active"):
        critical_sharpness(dropout, flat_loss, [torch.zeros(1, 2)])
    with torch.no_grad():
        model.w.fill_(math.nan)
    with pytest.raises(TrainingError, match="is not finite"):
        critical_sharpness(model, flat_loss, [x])


def test_a_run_is_steered_by_it(tmp_path: Path) -> None:
    detector = "{name='sharpness-change', interval=1, eta=0.1}"
    c = config(
        "dtype=float32",
        f"policy={{name='detected', detector={detector}}}",
        "instruments.sharpness={images=40, batch=20}",
    )
    record = regimes.run(c, tmp_path / "run")
    assert record.epochs["critical_sharpness"].gt(0).all()
    whys = [w for row in record.rows for w in row["layers"]["why"] if w]
    assert any(w["rule"] == "sharpness change" and "ratio" in w for w in whys)
