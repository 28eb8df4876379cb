"""What a GPU would be asked for: launches and waits of the host, counted on a pretended one.

A launch is an operation that is no view; a ``foreach`` of many tensors counts as one. The numbers
are bounds: who makes a step shorter lowers them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretended
import pytest
import torch

import regimes
from regimes.config import RunConfig, from_dict, override
from regimes.curvature import lanczos as algorithm
from regimes.curvature.lanczos import lanczos
from regimes.seeding import stream

UNION, EACH = "union_pass=true", "union_pass=false"
DENSE = ["policy={name='static', level='dense'}"]
TOPK = ["compressor={name='topk'}", "levels={low=99, high=10}"]
STEPS: dict[str, tuple[list[str], int, int]] = {  # settings, launches and waits of a step
    "dense, union": ([UNION, *DENSE], 261, 0),
    "powersgd of rank 2, union": ([UNION], 326, 0),
    "powersgd of rank 2, worker by worker": ([EACH], 928, 0),
    "topk of 10 %, worker by worker": ([EACH, *TOPK], 1169, 0),
}
PRODUCT = 40, 2  # launches and waits of a step of Lanczos beside the product itself


class Steps:
    """A reporter that reads the diary after each step."""

    def __init__(self, diary: pretended.Diary) -> None:
        self.diary, self.seen = diary, []

    def start(self, *_: Any) -> None: ...
    def epoch(self, *_: Any) -> None: ...
    def stop(self, *_: Any) -> None: ...

    def step(self, *_: Any) -> None:
        self.seen.append((self.diary.ops.total(), self.diary.waits.total()))


def config(*settings: str) -> RunConfig:
    """Five steps of ResNet-18, narrow, on images of 8 x 8."""
    base = from_dict(
        RunConfig,
        {
            "epochs": 1,
            "workers": 4,
            "batch_size": 2,
            "device": "cuda",
            "data": {"name": "digits", "train_size": 40, "test_size": 10},
            "model": {"name": "resnet18-cifar10", "width": 4},
            "levels": {"low": 4, "high": 2},
            "policy": {"name": "static", "level": "high"},
        },
    )
    return override(base, list(settings))


@pytest.mark.parametrize(("settings", "launches", "waits"), STEPS.values(), ids=STEPS)
def test_a_step_costs_no_more_launches_and_waits(
    settings: list[str], launches: int, waits: int, tmp_path: Path
) -> None:
    with pretended.gpu() as diary:
        steps = Steps(diary)
        regimes.run(config(*settings), tmp_path / "run", reporters=[steps])
    (ops, waited), (more, again) = steps.seen[-2:]
    assert more - ops <= launches
    assert again - waited <= waits


def test_a_step_of_lanczos_does_not_grow_with_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 683 blocks and a rest, as ResNet-18 has."""
    d, products = 683 * 64 + 17, 12
    monkeypatch.setattr(algorithm, "CHUNK", 64)
    with pretended.gpu() as diary:
        scale = torch.linspace(-1, 30, d, device="cuda")

        def found(most: int) -> tuple[int, int]:
            diary.clear()
            lanczos(
                lambda v: scale * v,
                d,
                max_products=most,
                generator=stream(1),
                tolerance=1e-9,
                device="cuda",
            )
            return diary.ops.total(), diary.waits.total()

        (few, waits), (many, more) = found(2), found(2 + products)
    assert (many - few) / products - 1 <= PRODUCT[0]
    assert (more - waits) / products <= PRODUCT[1]


@pytest.mark.parametrize("size", [5, 64, 2 * 64, 683 * 64 + 17])
def test_sums_in_blocks_are_those_of_float64(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "CHUNK", 64)
    rows = torch.randn(7, size, generator=stream(2))
    exact = rows.double() @ rows[0].double()
    with pretended.gpu() as diary:
        there = rows.to("cuda")
        diary.clear()
        sums, norm = algorithm.inner(there[1:4], there[0]), algorithm.length(there[0])
        assert diary.ops.total() <= 12
        assert diary.waits.total() == 0
    torch.testing.assert_close(sums, exact[1:4], rtol=0, atol=1e-6 * float(exact[0]))
    torch.testing.assert_close(norm, exact[0].sqrt(), rtol=1e-6, atol=0)
