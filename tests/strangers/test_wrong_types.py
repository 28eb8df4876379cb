"""Public functions called with a value of another type (oracle: the rule that bad input is one
sentence, from the package itself)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import regimes
from regimes.base.errors import RegimesError

FUNCTIONS = [name for name in regimes.__all__ if inspect.isfunction(getattr(regimes, name))]
WRONG: list[Any] = [object(), 5, "no such thing", ["x"], None, b"x", {"a": 1}]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_wrong_value_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(regimes, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for wrong in WRONG:
        places = [wrong for p in needed if p.kind is not p.KEYWORD_ONLY]
        words = {p.name: wrong for p in needed if p.kind is p.KEYWORD_ONLY}
        with pytest.raises(RegimesError) as caught:
            function(*places, **words)
        assert "\n" not in str(caught.value), f"{name}({wrong!r})"
    assert not [*tmp_path.iterdir()], "refused before any work"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelt_argument_is_named_with_its_function(name: str) -> None:
    parameters = inspect.signature(getattr(regimes, name)).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return  # the others go on to a configuration, which names a misspelt field
    misspelt = [*parameters][-1].name + "x"
    with pytest.raises(TypeError, match=rf"{name}\(\) .*'{misspelt}'"):
        getattr(regimes, name)(**{misspelt: 1})


def test_a_cell_shows_the_sentence_alone() -> None:
    """IPython calls this method in place of its own traceback, if an error has it."""
    error = RegimesError("epochs = -1: expected at least 1")
    assert error._render_traceback_() == ["RegimesError: epochs = -1: expected at least 1"]


def test_a_table_of_no_folder_is_one_sentence() -> None:
    with pytest.raises(RegimesError, match="folders"):
        regimes.frame()
