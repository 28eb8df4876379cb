"""What is typed wrong, or asked of the command line itself: an answer, or one sentence."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import make

import regimes
from regimes import cli, presets
from regimes.base.console.tables import Table
from regimes.base.errors import ConfigError
from regimes.cli.app import app, check_no_empty_word

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_version(command: Command) -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"regimes {regimes.__version__}\n")


@pytest.mark.parametrize("verb", [verb for verb in cli.__all__ if verb != "app"])
def test_the_help_of_a_command_names_what_it_takes(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PRESET, not the type STR, nor a default that is none."""
    monkeypatch.setattr("sys.argv", ["regimes", verb, "--help"])
    with pytest.raises(SystemExit):
        app.cli(prog="regimes")
    printed = capsys.readouterr().out
    shown = " ".join(printed.replace("│", "").split())
    assert "None" not in shown
    assert "(default: )" not in shown
    assert not re.search(r"--\S+ \S*STR\b", shown)

    usage, _, _ = printed.partition("\n\n")
    taken = re.sub(r"\[-[^\]]*\]|--\S+ \S+", "", usage)
    assert not re.search(r"\b(STR|PATH|None)\b", taken), usage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ablate mine.tom", "no grid 'mine.tom', and a file of that name does not exist"),
        ("tune mine.tom", "no grid 'mine.tom', and a file of that name does not exist"),
        ("run mine.tom", "no preset 'mine.tom', and a file of that name does not exist"),
        ("ablate there.txt", "no grid 'there.txt', and a file of that name is no file *.toml"),
        ("ablate mine.toml", "cannot read the grid mine.toml: no such file"),
        ("run mine.toml", "cannot read the configuration mine.toml: no such file"),
        (
            "ablate tournament-smok",
            "unknown grid 'tournament-smok': did you mean "
            f"'tournament-smoke'? regimes presets lists all {len(presets.GRIDS)}.",
        ),
        (
            "run smoke --eta 0.3",
            "--eta is no option of regimes run: write --set policy.eta=0.3",
        ),
        (
            "tune smoke --decay-rule=false",
            "--decay-rule is no option of regimes tune: write --set policy.decay_rule=false",
        ),
        ("ablate smoke --seeds 1000000000", "--seeds = 1000000000: expected 1 to 10000"),
        (
            "ablate smoke --option timeout_min=5",
            "--option = ('timeout_min=5',): expected --executor as well",
        ),
        (
            "ablate smoke --executor local --option timeout_min",
            "--option = 'timeout_min': expected the form key=value",
        ),
        (
            "ablate many.toml",
            "many.toml: seeds = 1000000000: expected a number of seeds up to "
            "10000, or a list of different ones",
        ),
    ],
)
def test_one_sentence(words: str, says: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("")
    grid = 'base = "smoke"\nseeds = 1000000000\n[schedules.low]\nepochs = 3\n'
    (tmp_path / "many.toml").write_text(grid)
    done = command(*words.split())
    assert (done.returncode, done.stderr) == (2, f"error: {says}\n")


def test_a_table_breaks_no_name_within_a_word() -> None:
    """As `regimes detect` has it at 80 columns: three names of detectors, and numbers."""
    import io

    from rich.console import Console

    from regimes.policies.replay import detect

    name = "norm-change statistic=norm*lr"
    heads = ("detector", "with", "by", "Jaccard", "kappa", "lag")
    numbers = ("layer", "0.64 ± 0.08", "-0.46 ± 0.20", "0.0 ± 0.0")
    out = io.StringIO()
    table = Table(heads, [(name, name, *numbers), ("random-windows", name, *numbers)], texts=2)
    Console(file=out, width=80).print(table.drawn(word=detect.WORD, padding=(0, 1, 0, 0)))
    words = out.getvalue().split()
    assert (words.count("norm-change"), words.count("statistic=norm*lr")) == (3, 3)
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("name", ["a|b", "|", "two\nlines"])
def test_a_name_breaks_no_table_of_markdown(name: str) -> None:
    """As GitHub parses it: a bar ends a cell unless there is a backslash before it."""
    lines = Table((name, "n"), [("low", "5"), (name, "6")]).markdown().split("\n")
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cost runs --set optimizer.lr=0.1", "--set optimizer.lr=0.1 changes a preset"),
        ("cost smoke --where seed=0", "--where seed=0 selects recorded runs"),
        ("figure 2 runs --needs smoke", "--needs GRID stands alone"),
        ("figure 2 --needs", "--needs GRID stands alone"),
    ],
)
def test_no_option_is_ignored(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "runs", "low", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["regimes", *words.split()])
    with pytest.raises(ConfigError, match=said):
        app.cli()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "smoke", "--out", ""], "an empty text as --out: expected a value"),
        (["run", "smoke", "--out="], "an empty text as --out: expected a value"),
        (["ablate", ""], "an empty text: expected a value"),
        (["pack", "", "a.tar.xz"], "an empty text: expected a value"),
        (["branch", "runs", "--at", "1", "--out", ""], "an empty text as --out: expected"),
    ],
)
def test_an_empty_word_is_no_folder(words: list[str], said: str) -> None:
    """As a path it would be the current folder, which a run would fill."""
    with pytest.raises(ConfigError, match=said):
        check_no_empty_word(words)
    check_no_empty_word([words[0], "--set", "policy.level="])


def test_an_empty_word_fills_no_folder(command: Command, tmp_path: Path) -> None:
    done = command("run", "smoke", "--out", "")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not [*tmp_path.iterdir()]
