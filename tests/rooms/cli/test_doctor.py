"""`regimes doctor` (oracles: packages made to fail, and the width of a terminal)."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regimes.base.console.tables import Table
from regimes.cli import machine as doctor
from regimes.data import sources

TWO_LINES = 'raise RuntimeError("operator torchvision::nms does not exist\\n  here is more")\n'
IN_A_CHAIN = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    import nowhere\n"


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a torchvision that programs find first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torchvision.py"


def test_a_torchvision_that_can_be_imported_is_ok(torchvision: Path) -> None:
    torchvision.write_text("")
    assert doctor._torchvision() == "as a script of your own would"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            TWO_LINES,
            r"^RuntimeError: operator torchvision::nms does not exist\. Regimes reads "
            ".* from one index, e.g. pip install",
        ),
        (IN_A_CHAIN, "^ModuleNotFoundError: No module named 'nowhere'$"),
    ],
)
def test_one_that_fails_is_said_with_what_to_do(torchvision: Path, source: str, said: str) -> None:
    torchvision.write_text(source)
    with pytest.raises(RuntimeError, match=said):
        doctor._torchvision()


def test_one_that_hangs_is_said_too(torchvision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision.write_text("import time\ntime.sleep(30)\n")
    monkeypatch.setattr(doctor, "MINUTE", 0.5)
    with pytest.raises(RuntimeError, match="not imported within"):
        doctor._torchvision()


def test_its_failure_leaves_the_exit_code_alone(
    torchvision: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchvision.write_text(TWO_LINES)
    monkeypatch.setenv("COLUMNS", "80")
    for slow in ("_data_sets", "_digits", "_figures", "_backend", "_curvature"):
        monkeypatch.setattr(doctor, slow, lambda *_: "not tried")
    here = [sources.Availability("these", True, "/a"), sources.Availability("those", False, "/b")]
    monkeypatch.setattr(sources, "find_data", lambda: here)
    assert doctor.print_report()
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert {"data: these found /a", "data: those not found /b"} < {*rows}
    (row,) = (line for line in lines if line.startswith("import torchvision"))
    assert row.split()[2] == "no"
    assert all(len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines)


def test_gloo_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one that needs no address, and that is left afterwards."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert doctor._backend("gloo") == "one all-reduce done"
    assert not torch.distributed.is_initialized()


def test_what_is_needed_is_what_an_install_brings() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    assert [*doctor.NEEDED] == [each.split(">")[0] for each in project["project"]["dependencies"]]
    assert not {*doctor.NEEDED} & {*doctor.EXTRAS}


def test_long_paths_are_broken_and_not_cut() -> None:
    path = "/data/" + "x" * 100
    table = Table(("what", "state", "detail"), [("data: cifar10", "not found", path)], texts=3)
    shown = io.StringIO()
    Console(width=80, file=shown).print(table.drawn())
    assert shown.getvalue().count("x") == 100
    assert "…" not in shown.getvalue()


def test_packages_are_shown_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hessian of (w1^2 + 3 w2^2) / 2 has 3 as its largest eigenvalue."""
    for backend in ("lanczos", "pyhessian"):
        assert doctor._curvature(backend).startswith("top eigenvalue 3.0 ")
    assert "PNG" in doctor._figures()
    monkeypatch.setattr("regimes.instruments.hessian.eigenvalues", lambda *args, **more: _Wrong)
    with pytest.raises(RuntimeError, match=r"top eigenvalue 2\.0 of a Hessian that has 3"):
        doctor._curvature("lanczos")


class _Wrong:
    largest = torch.tensor([2.0])
