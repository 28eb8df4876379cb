"""The numbers of docs/explanation, computed anew (oracle: the pages).

On another processor rounding differs, and PowerSGD amplifies that: each number is held to a factor.
"""

from __future__ import annotations

import re
from pathlib import Path

import forked
import numpy as np
import pytest
import states
import torch
from runs import weights

import regimes
from regimes.base.config import RunConfig, override
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.training import checkpoint

PAGES = Path(__file__).parents[2] / "docs" / "explanation"


def numbers(page: str, row: str) -> list[float]:
    """Those of a table's row, after its name."""
    text = (PAGES / page).read_text()
    (found,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)
    return [float(cell) for cell in found.split("|")]


def powersgd(preset: str, rank: int, *settings: str) -> RunConfig:
    words = ["policy=static", "policy.level=high", f"levels={{high={rank}}}", "device=cpu"]
    return override(regimes.get_preset(preset), [*words, *settings])


# -- half precision on the wire --------------------------------------------------------------


def after_20_steps(folder: Path, wire: str, processes: int = 1) -> torch.Tensor:
    """The weights, one after the other."""
    c = powersgd(
        "smoke",
        1,
        "steps=20",
        "unit_steps=20",
        "dtype=float64",
        f"compressor={{name='powersgd', wire='{wire}'}}",
    )
    if processes == 1:
        regimes.run(c, folder)
    else:
        forked.train(c, folder, processes)
    found = weights(folder)
    trained = [t for name, t in found.items() if not re.search("running|num_batches", name)]
    return torch.cat([t.flatten() for t in trained])


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["full", "fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_precision_on_the_wire_ends_equality(wire: str, tmp_path: Path) -> None:
    full = after_20_steps(tmp_path / "full", "full")
    simulated = after_20_steps(tmp_path / "simulated", wire)
    real = after_20_steps(tmp_path / "real", wire, processes=4)
    apart, effect = (
        float((a - b).norm() / full.norm()) for a, b in ((real, simulated), (simulated, full))
    )
    said_apart, said_effect = numbers("workers.md", f"`{wire}`")
    if wire == "full":
        assert effect == said_effect == 0.0
        assert apart < 1e-11
        assert said_apart < 1e-11
        return
    for said, measured in ((said_apart, apart), (said_effect, effect)):
        assert said / 3 < measured < said * 3
    assert 0.3 < said_apart / said_effect < 3  # as large as the wire's own effect


# -- what is in the residual -----------------------------------------------------------------


def steps_in_the_residual(preset: str, rank: int, steps: int, folder: Path) -> float:
    """The norm of the workers' mean residual over that of the mean gradient of all steps; both of
    all compressed layers together."""
    words = [f"steps={steps}", f"unit_steps={steps}", 'instruments.norms.readings=["global"]']
    words += ["dtype=float64", "data.test_size=300"]
    record = regimes.run(powersgd(preset, rank, *words), folder)
    found = checkpoint.load(folder)
    assert found is not None
    residuals = states.owed(found[1]).values()
    sums = record.rows[0]["statistics"]["norm:global"]  # of the gradients' sum over the unit
    pairs = [
        (r.mean(0).norm(), s / steps) for r, s in zip(residuals, sums, strict=True) if r is not None
    ]
    residual, mean = np.linalg.norm(np.array(pairs), axis=0)
    return float(residual / mean)


CASES = {"`smoke`, 40 steps": ("smoke", 40), "`lm-small`, 200 steps": ("lm-small", 200)}


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=[pytest.mark.slow] * r.startswith("`lm")) for r in CASES]
)
def test_so_many_mean_steps_are_in_the_residual(row: str, tmp_path: Path) -> None:
    preset, steps = CASES[row]
    found = [steps_in_the_residual(preset, rank, steps, tmp_path / str(rank)) for rank in (1, 4)]
    assert found == pytest.approx(numbers("error-feedback.md", row), rel=0.3)


def test_after_a_decay_by_ten_a_tenth_of_the_residual_moves_the_weights() -> None:
    """Plain SGD, and no gradients after the decay: the rest arrives at the new rate."""
    reducer = Reducer(PowerSGD(), [Layer("m", (12, 9))], World(2), seed=0)
    losses, nothing = torch.zeros(2), torch.zeros(2, 12, 9)

    def update(gradient: torch.Tensor) -> torch.Tensor:
        return (
            Exchange(reducer)
            .exchange_step([gradient], [1], losses, gradient.flatten(1))[0][0]
            .clone()
        )

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(2, 12, 9, generator=generator) for _ in range(20)]
    moved = sum(update(gradient) for gradient in gradients)
    (residual,) = (owed.mean(0).clone() for owed in reducer.residuals() if owed is not None)
    assert residual.norm() > 3  # or nothing would be late
    moved = moved + 0.1 * sum(update(nothing) for _ in range(100))
    dense = sum(gradient.mean(0) for gradient in gradients)
    torch.testing.assert_close(dense - moved, 0.9 * residual, rtol=1e-4, atol=1e-4)
