"""What a GPU would be asked for: launches and waits of the host, counted on a pretended one.

A launch is an operation that is no view; a ``foreach`` of many tensors counts as one. The bounds
stand in ``gpu_steps``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from ddp_scripts import gpus as jobs
from ddp_scripts import group
from gpu_steps import (
    BOUNDS,
    DENSE,
    STEPS,
    Counts,
    compressed,
    config,
    copying,
    counted,
    taking,
    waiting,
)

from analysis.plugins.cosine import DCTTopK
from regimes import compression, instruments
from regimes.base.seeding import make_generator
from regimes.compression.elementwise import Sign
from regimes.compression.powersgd import ACPSGD
from regimes.data import deficits
from regimes.data.models.transformer import GPT
from regimes.instruments.hessian import lanczos as algorithm
from regimes.instruments.hessian.lanczos import lanczos
from regimes.training import loop

PRODUCT = 40, 2  # launches and waits of a step of Lanczos beside the product itself


SLOW = [
    name
    for name in STEPS
    if name.endswith(("-cifar10", ", graphs")) or name == "instrument moments"
]
UNBOUNDED = {  # they need another task or network than these, or act between steps, or seldom
    "instrument residual",
    "instrument cosine",
    "instrument sharpness",
    "instrument spread",
    "deficit other-task",
}
PARTS: dict[str, tuple[Any, str]] = {  # what a wait, a copy, an allocation is put into, by its row
    "sign": (Sign, "exchange"),
    "acp-sgd": (ACPSGD, "exchange"),
    "dct-topk": (DCTTopK, "exchange"),
    "local steps": (loop, "_step_alone"),
    "gpt": (GPT, "forward"),
    "adamw": (torch.optim.AdamW, "step"),
}


def exceeded(found: Counts, bound: Counts) -> list[str]:
    pairs = zip(Counts._fields, found, bound, strict=True)
    return [f"{name}: {n}, at most {most}" for name, n, most in pairs if n > most]


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STEPS]
)
def test_a_step_costs_no_more_than_its_bounds(name: str, tmp_path: Path) -> None:
    if name == "lstm, bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("a CPU under the name of a GPU computes this, and it has no LSTM in bfloat16")
    assert not exceeded(counted(STEPS[name], tmp_path / "run"), BOUNDS[name])


def test_what_has_no_bounds_is_named() -> None:
    names = {*compression.REGISTRY, *(f"instrument {x}" for x in instruments.REGISTRY)}
    names |= {f"deficit {x}" for x in deficits.REGISTRY}
    assert names - STEPS.keys() == UNBOUNDED
    assert STEPS.keys() == BOUNDS.keys()


@pytest.mark.whole
@pytest.mark.parametrize("name", PARTS)
def test_what_is_put_into_a_part_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait, a copy, for which the host waits as well, and an allocation, each time."""
    owner, method = PARTS[name]
    original = getattr(owner, method)

    @functools.wraps(original)
    def slower(*args: Any, **options: Any) -> Any:
        for put in (waiting, copying, taking):
            put()
        return original(*args, **options)

    monkeypatch.setattr(owner, method, slower)
    found, bound = counted(STEPS[name], tmp_path / "run"), BOUNDS[name]
    copies = found.copies - bound.copies
    assert found.waits - bound.waits == 2 * copies > 0
    assert found.memory - bound.memory == copies


PROCESSES = {  # beside more buckets than one
    "dense": [*DENSE],
    "powersgd": compressed("powersgd"),
    "topk": compressed("topk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("put", [False, True], ids=["as it is", "a wait in the thread"])
def test_a_step_of_two_processes_waits_for_no_collective(
    name: str, put: bool, tmp_path: Path
) -> None:
    c = config(*PROCESSES[name], "union_pass=false", "bucket_mb=0.002")
    for answer in group.run(jobs.counted, 2, c, tmp_path / "run", put):
        assert answer["collectives"] > 0
        assert (answer["waits"] > 0) == put
        assert answer["copies"] == 0


# Processes, and bounds of a step from backward on. The one wait: was every gradient finite?
OWN_LOOP = {
    "hook": (2, Counts(196, 1, 0, 168, 0)),
    "islands": (4, Counts(54, 1, 0, 48, 0)),
    "shards": (2, Counts(107, 1, 1, 65, 0)),  # 4 bits, two modules, blocks of each parameter
    "local steps": (2, Counts(20, 1, 0, 9, 0)),
}


def test_a_step_of_ones_own_loop_costs_no_more_than_its_bounds() -> None:
    """And a wait in the reduction is seen. One test: its cases share their processes."""
    for processes in (2, 4):
        kinds = [kind for kind, (count, _) in OWN_LOOP.items() if count == processes]
        calls = [(jobs.attached, kind, put) for kind in kinds for put in (False, True)]
        for (_, kind, put), found in zip(calls, group.run_in_turn(processes, *calls), strict=True):
            for counts in found:
                seen = exceeded(Counts(*counts, 0), OWN_LOOP[kind][1])
                assert [words.split(":")[0] for words in seen] == ["waits"] * put, (kind, seen)


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
                generator=make_generator(1),
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
    rows = torch.randn(7, size, generator=make_generator(2))
    exact = rows.double() @ rows[0].double()
    with pretended.gpu() as diary:
        there = rows.to("cuda")
        diary.clear()
        sums, norm = algorithm.inner_products(there[1:4], there[0]), algorithm.vector_norm(there[0])
        assert diary.ops.total() <= 12
        assert diary.waits.total() == 0
    torch.testing.assert_close(sums, exact[1:4], rtol=0, atol=1e-6 * float(exact[0]))
    torch.testing.assert_close(norm, exact[0].sqrt(), rtol=1e-6, atol=0)
