"""Curvature of a job under the hook (oracles: numpy's eigenvalues of the whole Hessian; the same
job without instruments)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_scripts import group
from tensors import same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.records import read_lines

UNITS, STEPS, SHARE = 3, 4, 12  # samples of a process's probe


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)
    ).double()


def samples(seed: int, count: int = SHARE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def job(rank: int, folder: str, measured: bool, view: bool = False) -> dict[str, Any]:
    """A few units; the weights before each, and what the units' rows say."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = samples(100 + rank)
    batches = [{"x": x[:6], "y": y[:6]}, {"x": x[6:], "y": y[6:]}]
    probe = (mean_loss, batches, lambda batch: len(batch["y"])) if view else (mean_loss, batches)
    more: dict[str, Any] = {}
    if measured:
        tables = {"curvature": {"largest": 2, "tolerance": 1e-9}, "sharpness": {}}
        more = {"instruments": tables, "probe": probe}
    hook = regimes.attach(
        model,
        optimizer,
        policy={"name": "accordion", "interval": 1},
        record=f"{folder}/{measured}",
        **more,
    )
    weights = []
    for unit in range(UNITS):
        for step in range(STEPS):
            inputs, targets = samples(1000 * unit + 10 * step + rank)
            optimizer.zero_grad(set_to_none=not view)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        weights.append({k: v.clone() for k, v in model.module.state_dict().items()})
        hook.epoch_end()
    hook.close()
    state = {k: v.clone() for k, v in model.module.state_dict().items()}
    return {"weights": weights, "end": state, "rows": hook.rows, "draw": torch.rand(1).item()}


def largest_eigenvalues(states: Sequence[dict[str, Tensor]], count: int = 2) -> list[float]:
    """Of the mean over processes of the Hessian of the loss on a process's probe, formed whole.
    Weights are the same everywhere, running statistics are not."""
    wholes = [whole(state, *samples(100 + rank)) for rank, state in enumerate(states)]
    return sorted(np.linalg.eigvalsh(np.mean(wholes, 0)), reverse=True)[:count]


def whole(state: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
    """The Hessian [d, d]."""
    model = network()
    model.load_state_dict(state)
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        pieces = zip(names, model.parameters(), flat.split(sizes), strict=True)
        named = {name: piece.view_as(p) for name, p, piece in pieces}
        return F.cross_entropy(torch.func.functional_call(model, named, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(loss, flat).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@cache
def jobs(folder: Path, view: bool) -> list[list[dict[str, Any]]]:
    """With instruments and without; what each process has."""
    place = str(folder / str(view))
    return group.run_in_turn(2, (job, place, True, view), (job, place, False, view))


def test_eigenvalues_are_those_of_the_whole_hessian(folder: Path) -> None:
    found = jobs(folder, True)[0]
    for one in found:
        assert len(one["rows"]) == UNITS
        for unit, row in enumerate(one["rows"]):
            values = [row["model"]["eigenvalue"], row["model"]["eigenvalue_2"]]
            states = [process["weights"][unit] for process in found]
            assert values == pytest.approx(largest_eigenvalues(states), rel=1e-6)
            assert row["model"]["critical_sharpness"] > 0
    details = read_lines(folder / "True" / "True" / "instruments.jsonl")
    assert len(details) == 2 * UNITS
    record = regimes.load(folder / "True" / "True")
    assert record.config["instruments"].keys() == {"curvature", "sharpness"}
    assert record.epochs["eigenvalue"].notna().all()


@pytest.mark.parametrize("view", [False, True])
def test_instruments_leave_no_trace(view: bool, folder: Path) -> None:
    for measured, plain in zip(*jobs(folder, view), strict=True):
        same(measured["end"], plain["end"])
        assert measured["draw"] == plain["draw"]
        for a, b in zip(measured["rows"], plain["rows"], strict=True):
            assert a["layers"] == b["layers"]
            assert a["statistics"] == b["statistics"]


def by_eigenvalue(rank: int) -> list[str]:
    """A policy that reads the eigenvalue decides in the hook, too; and its state goes on."""
    x, y = samples(100 + rank)
    levels = []

    def made() -> tuple[Any, Any, Any]:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        detector = {"name": "eigenvalue-change", "interval": 1}
        hook = regimes.attach(
            model,
            optimizer,
            policy={"name": "detected", "detector": detector},
            record=regimes.RecordOptions(
                instruments={"curvature": {}}, probe=(mean_loss, {"x": x, "y": y})
            ),
        )
        return model, optimizer, hook

    model, optimizer, hook = made()
    for unit in range(3):
        for step in range(2):
            inputs, targets = samples(1000 * unit + 10 * step + rank)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            state = hook.state_dict()  # also within a unit
        hook.epoch_end()
        levels.append(str(sorted(hook.levels.items())))
    _, _, other = made()
    other.load_state_dict(state)
    return levels


def test_a_policy_may_read_the_eigenvalue() -> None:
    first, second = group.run(by_eigenvalue, 2)
    assert first == second
