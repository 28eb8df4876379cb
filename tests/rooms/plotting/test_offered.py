"""`regimes figure`: what packages offer, under one roof (oracle: made-up packages)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from analysis import __main__ as study
from analysis.__main__ import commands, offers
from analysis.common.command import start
from analysis.paper import curves
from analysis.paper.figures import FIGURES
from regimes.base.errors import ConfigError
from regimes.plotting import offered
from regimes.plotting.offered import Offer

Install = Callable[..., None]
started: list[list[str]] = []


def mine() -> dict[str, Offer]:
    return {"mine": Offer("A figure of mine.", lambda words: started.append([*words]), ("small",))}


def broken() -> dict[str, Offer]:
    raise ImportError("no module named colours")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Packages with entry points ``name=function of this module`` (or any reference)."""

    def points(**references: str) -> None:
        found = [
            EntryPoint(name, f"{__name__}:{what}" if ":" not in what else what, offered.GROUP)
            for name, what in references.items()
        ]
        monkeypatch.setattr(offered, "entry_points", lambda group: found)

    return points


def test_the_study_offers_its_figures_and_commands(install: Install) -> None:
    install(study="analysis.__main__:offers")
    assert [*offered.find_figures()] == [
        *FIGURES,
        *(name for name in commands() if name != "figures"),
    ]
    for name, offer in offers().items():
        assert offer.says.endswith((".", "?")), name
        assert bool(offer.grids) == (name in FIGURES)


def test_a_package_offers_beside_the_study(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(study="analysis.__main__:offers", other="mine")
    offered.print_figures()
    printed = capsys.readouterr().out
    assert "A figure of mine." in printed
    assert "\ncurves " in printed
    offered.begin_figure("mine", ("runs/small", "--style", "plain"))
    assert started == [["runs/small", "--style", "plain"]]


def test_bad_offers_are_one_sentence(install: Install) -> None:
    install()
    with pytest.raises(ConfigError, match="no installed package offers figures: install Regimes"):
        offered.begin_figure("2", ())
    install(one="mine", two="mine")
    with pytest.raises(ConfigError, match="offers mine, and so does another package"):
        offered.print_figures()
    for what, why in (("broken", "no module named colours"), ("nothing", "no attribute 'nothing'")):
        install(other=what)
        with pytest.raises(ConfigError, match=f"{what} cannot be loaded: .*{why}"):
            offered.find_figures()
    install(other="mine")
    with pytest.raises(ConfigError, match="no figure 'mime': did you mean 'mine'"):
        offered.begin_figure("mime", ())


@pytest.mark.parametrize(
    "name", ["curves", "figure3", "signals", "claims", "controls", "detectors"]
)
def test_a_command_without_records_says_how_to_make_them(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} needs records: `regimes .*`, then `regimes fig"
    ):
        offers()[name].start(())


@pytest.mark.parametrize(
    ("words", "begin", "called"),
    [
        (["analysis", "curves"], study.main, "-m analysis curves"),
        (["losses.py"], lambda: start(curves.main), "losses.py"),
    ],
)
def test_modules_and_files_of_ones_own_say_the_same(
    words: list[str],
    begin: Callable[[], object],
    called: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="2"):
        begin()
    assert capsys.readouterr().err.startswith(f"error: python {called} needs records: `regimes ")


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_of_the_study_begins_in_a_checkout(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["analysis", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert not ended.value.code
    assert f"-m analysis {name}" in " ".join(capsys.readouterr().out.split())


def test_every_room_with_commands_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folders of the study."""
    monkeypatch.setattr("sys.argv", ["analysis"])
    study.main()
    printed = capsys.readouterr().out
    for name, command in commands().items():
        assert f"  {name} " in printed
        assert command.summary in printed
    files = Path(study.__file__).parent.rglob("*.py")
    rooms = {p.parent.name for p in files if "\ndef main(" in p.read_text(encoding="utf-8")}
    assert rooms - {"analysis", "common"} == {*study.ROOMS}


def test_the_list_may_be_read_by_a_command_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python -m analysis | head -1``."""
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr("sys.argv", ["analysis"])
    with open(writes, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as end:
            study.main()
    assert end.value.code == 128 + signal.SIGPIPE


def test_every_figure_takes_the_style_of_a_paper(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of a figure's own are the others, and its options hold while it is drawn."""
    from regimes.plotting import canvas

    install(mine="mine")
    seen: list[object] = []
    words = ["runs", "--style", "paper", "--out=figures", "--width", "5"]
    monkeypatch.setattr(canvas, "use_options", lambda **given: seen.append(given) or nullcontext())
    started.clear()
    offered.begin_figure("mine", words)
    assert started == [["runs", "--out=figures"]]
    assert seen == [{"width": 5.0, "formats": ("pdf", "png"), "plain": True}]
    offered.begin_figure("mine", ["runs", "--style=own"])
    assert started[1:] == [["runs", "--style=own"]], "the figure's own"
