"""What a search that is called from Python shows: lines on standard error, or nothing."""

from __future__ import annotations

import sys

import pytest

from regimes.base.console.progress import shown_by


def test_a_search_in_a_script_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_by(None) as show:
        show("trunk 0: 95.0 %", 0.25)
        show("pulse from 0: 94.0 %", 1.2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "regimes: 25% of the budget: trunk 0: 95.0 %",
        "regimes: 100% of the budget: pulse from 0: 94.0 %",
    ]


def test_on_a_terminal_a_bar_has_the_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_by(None):
        pass
    assert "searching" in capsys.readouterr().err


def test_who_shows_the_lines_has_them_alone(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    with shown_by(lambda line, share: told.append((line, share))) as show:
        show("trunk 0", 0.5)
    assert told == [("trunk 0", 0.5)]
    assert capsys.readouterr() == ("", "")


def test_a_closed_standard_error_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, _: str) -> int:
            raise ValueError("I/O operation on closed file")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Closed())
    with shown_by(None) as show:
        show("trunk 0", 0.5)
