"""States that the releases 0.2 and 0.3 saved, continued by the present code.

Oracle, equivalence: continued by the release that saved it = continued today. The release's own
numbers are in `tests/data/states` (made by `make.py` there, with its code).
"""

from __future__ import annotations

import math
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from ddp_scripts import group, released
from torch import Tensor

from regimes import TopK
from regimes.job.refit import with_default_fields

STATES = Path(__file__).parents[1] / "data" / "states"
TOLERANCE = 1e-10  # in float64: other processors differ in last bits, a wrong state in all
# Since 0.3 the ``norm:update`` of streaming with Nesterov is another one, as the changelog says.
OTHER_NORMS = ("run-streamed", "local-streamed")


def cases() -> Iterator[Any]:
    for release in ("0.2", "0.3"):
        for name, case in released.CASES.items():
            if case.since <= release:
                for way in case.ways:
                    yield pytest.param(release, name, way, id=f"{release}-{name}-{way}")


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(theirs, Tensor):
        assert ours.shape == theirs.shape, where
        scale = max(float(theirs.abs().max()), 1e-6) if theirs.is_floating_point() else 1.0
        assert float((ours - theirs).abs().max()) <= TOLERANCE * scale, where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{where}[{number}]")
    elif isinstance(theirs, float):
        close = math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        assert close, f"{where}: {ours} and {theirs}"
    else:
        assert ours == theirs, where


@pytest.mark.parametrize(("release", "name", "way"), [*cases()])
def test_a_state_of_a_release_goes_on(release: str, name: str, way: str, tmp_path: Path) -> None:
    with tarfile.open(STATES / release / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = torch.load(tmp_path / "continued.pt", weights_only=True)[way]
    case, folder = released.CASES[name], tmp_path / "state"
    processes = case.ways[way][0]
    timeout = None if case.trains else 60.0
    found = group.run(released.continued, processes, name, way, folder, timeout=timeout)
    if case.trains:
        rows = [released.numbers(row) for row in runs.rows(folder / "run")]
        found = [{"weights": runs.weights(folder / "run"), "losses": [], "rows": rows}]
    if name in OTHER_NORMS:
        for outcome in (*found, *expected):
            for row in outcome["rows"]:
                row["statistics"].pop("norm:update", None)
    same(found, expected)


@pytest.mark.parametrize(
    ("saved", "compressor", "fits"),
    [
        ("TopK(error_feedback=True)", TopK(), True),  # without the fields that came later
        (repr(TopK(error_feedback=0.5)), TopK(error_feedback=0.5), True),
        ("TopK(error_feedback=0.5)", TopK(error_feedback=0.5), True),
        ("TopK(error_feedback=True)", TopK(error_feedback=0.5), False),
        ("TopK(error_feedback=True)", TopK(residual="update"), False),
        ("RandomK(error_feedback=True)", TopK(), False),
        ("TopK(error_feedback=True, gone=1)", TopK(), False),
    ],
)
def test_a_compressor_of_before_has_defaults_for_later_fields(
    saved: str, compressor: TopK, fits: bool
) -> None:
    assert (with_default_fields(saved, compressor) == repr(compressor)) is fits


def test_no_state_lies_unused() -> None:
    used = {f"{p.values[0]}/{p.values[1]}.tar.xz" for p in cases()}
    assert used == {path.relative_to(STATES).as_posix() for path in STATES.glob("*/*")}


def test_a_residual_that_is_wrong_by_a_millionth_is_seen(tmp_path: Path) -> None:
    """The comparison can fail."""
    with tarfile.open(STATES / "0.3" / "hook-powersgd.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = torch.load(tmp_path / "continued.pt", weights_only=True)["same"]
    for file in (tmp_path / "state").glob("*.pt"):
        saved = torch.load(file, weights_only=True)
        for residual in saved["hook"]["residuals"].values():
            if residual is not None:
                residual.mul_(1 + 1e-6)
        torch.save(saved, file)
    found = group.run(released.continued, 2, "hook-powersgd", "same", tmp_path / "state")
    with pytest.raises(AssertionError):
        same(found, expected)
