"""Grids of one's own from a file, and options that are fields (oracle: `override`, the records)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from regimes import cli
from regimes.base.config import override, to_toml
from regimes.base.errors import ConfigError
from regimes.cli.app import app, list_options
from regimes.presets import get_grid, get_preset, seeds_of
from regimes.records import load_all
from regimes.search import sweep

GRID = """
base = "smoke"
seeds = [4, 9]
set = ["epochs=2", "data.train_size=100", "optimizer.decay_epochs=[]"]

[schedules.low]
policy = {level = "low", name = "static"}

[schedules.eager]
policy.eta = 0.3
optimizer.lr = 0.2
optimizer.warmup_from = "none"
instruments.msdr = {}
"""


@pytest.fixture
def grid(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(GRID)
    return str(tmp_path / "mine.toml")


def test_a_schedule_is_its_base_and_what_it_names(grid: str) -> None:
    cells = get_grid(grid)
    short = ["epochs=2", "data.train_size=100", "optimizer.decay_epochs=[]"]
    assert list(cells) == ["low", "eager"]
    assert cells["low"] == override(
        get_preset("smoke"), [*short, "name=low", "policy.name=static", "policy.level=low"]
    )
    assert cells["eager"] == override(
        get_preset("smoke"),
        [
            *short,
            "name=eager",
            "policy.eta=0.3",
            "optimizer.lr=0.2",
            "optimizer.warmup_from=none",
            "instruments.msdr={}",
        ],
    )
    assert cells["eager"].policy["interval"] == 3  # the base's
    assert seeds_of(grid) == [4, 9]
    assert seeds_of("smoke") is None


def test_tables_within_a_policy_are_written_out(tmp_path: Path) -> None:
    """Windows of single layers, whose names have dots in them, and another detector."""
    (tmp_path / "mine.toml").write_text("""base = "lm-small"
[schedules.front]
[schedules.front.policy]
name = "windows"
layers = {"blocks.0.out.weight" = [[0, 24]], "embedding.weight" = [[0, 6]]}
[schedules.cusum]
policy = {name = "detected", detector = {name = "cusum", h = 3.0}}
""")
    cells = get_grid(str(tmp_path / "mine.toml"))
    assert cells["front"].policy == {
        "name": "windows",
        "layers": {"blocks.0.out.weight": [[0, 24]], "embedding.weight": [[0, 6]]},
    }
    detector = {"name": "cusum", "h": 3.0}
    assert cells["cusum"].policy == {"name": "detected", "detector": detector}
    other = override(cells["cusum"], ["policy.detector.name=msdr-fall"])
    assert other.policy == {"name": "detected", "detector": {"name": "msdr-fall"}}


@pytest.mark.usefixtures("grid")
def test_it_is_trained_and_seeds_may_be_others(tmp_path: Path, command: Callable) -> None:
    done = command("ablate", "mine.toml", "--schedules", "low")
    assert done.returncode == 0, done.stderr
    assert "2 runs in runs/mine, 0 already finished" in done.stdout
    done = command("ablate", "mine.toml", "--schedules", "eager", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    found = {(r.config["name"], r.config["seed"]) for r in load_all(tmp_path / "runs/mine")}
    assert found == {("low", 4), ("low", 9), ("eager", 0)}


def test_a_base_may_be_written_out_or_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seeds = 2\n[base]\nepochs = 5\nworkers = 2\n[schedules.a]\nseed = 3\n")
    assert (get_grid(str(file))["a"].epochs, get_grid(str(file))["a"].seed) == (5, 3)
    assert seeds_of(str(file)) == [0, 1]
    file.write_text('base = "smoke/high"\n[schedules.a]\n')
    cell = get_grid(str(file))["a"]
    assert (cell.policy, cell.name) == ({"name": "static", "level": "high"}, "a")


def test_schedules_at_rates_from_files_and_of_bases_of_their_own(tmp_path: Path) -> None:
    """The start of the warm-up is in proportion: 0.1 at a rate of 0.4 in `smoke`."""
    (tmp_path / "arms.toml").write_text(
        '[schedules]\nhigh.policy = {name = "static", level = "high"}\nlow.rate = 0.2\n'
    )
    file = tmp_path / "mine.toml"
    file.write_text("""base = "smoke"
set = ["epochs=3"]
rates = [0.1, 1]
include = ["arms.toml"]
[schedules.low]
base = "smoke/low"
rate = 0.2
[schedules.few]
rates = [0.05]
workers = 2
""")
    cells = get_grid(str(file))
    assert list(cells) == ["high at 0.1", "high at 1", "low", "few at 0.05"]
    at = [override(get_preset("smoke/high"), ["epochs=3", f"optimizer.lr={x}"]) for x in (0.1, 1)]
    for cell, known in zip(cells.values(), at, strict=False):
        warm = cell.optimizer.warmup_from
        assert warm == pytest.approx(cell.optimizer.lr / 4)
        optimizer = replace(known.optimizer, warmup_from=warm)
        assert cell == replace(known, name=cell.name, optimizer=optimizer)
    low = cells["low"]
    assert (low.policy["level"], low.epochs, low.optimizer.lr) == ("low", 3, 0.2)
    assert low.optimizer.warmup_from == pytest.approx(0.05)
    assert cells["few at 0.05"].workers == 2


MISTAKES = [
    ("epochs = 3\n", "is no grid: it needs a table [schedules.NAME]"),
    ("schedules = []\n", "is no grid"),
    ("a = \n", "cannot read the grid"),
    ("sedes = 3\n[schedules.a]\n", "unknown key 'sedes': did you mean 'seeds'"),
    ('base = "smok"\n[schedules.a]\n', "base: unknown preset 'smok': did you mean 'smoke'"),
    ("base = 3\n[schedules.a]\n", "base = 3: expected the name of a preset"),
    ('set = "epochs=3"\n[schedules.a]\n', "set = 'epochs=3': expected a list"),
    ("[schedules]\na = 3\n", "schedules.a = 3: expected a table"),
    ("[schedules.a]\noptimizer.rate = 1.0\n", "schedules.a: unknown key 'optimizer.rate'"),
    ("[schedules.a]\nepochs = 'many'\n", "schedules.a: epochs = 'many'"),
    ("[schedules.a]\nrate = 'high'\n", "schedules.a.rate = 'high': expected a positive number"),
    ("[schedules.a]\nrates = [0]\n", "schedules.a.rates = 0: expected a positive number"),
    ("rates = 0.1\n[schedules.a]\n", "schedules.a.rates = 0.1: expected a list of learning rates"),
    (f"[schedules.a]\nrate = 1{'0' * 400}\n", "expected a positive number up to 1e+30"),
    ("[schedules.a]\nrate = 0.1\nrates = [1]\n", "a.rates = [1]: expected no such key beside rate"),
    ("rate = 0.1\nrates = [1]\n[schedules.a]\n", "rates = [1]: expected no such key beside rate"),
    ("rates = [0.1, 0.1000000001]\n[schedules.a]\n", "schedules.a = 'a at 0.1': expected a name"),
    ("[schedules.a]\nrates = [0.1]\n[schedules.'a at 0.1']\n", "schedules.a at 0.1 = 'a at 0.1'"),
    (
        "[schedules.a]\n[schedules.'b from 1']\n[schedules.b]\nbranch = {of = 'a', at = 1}\n",
        "schedules.b = 'b from 1': expected a name of its own",
    ),
    ("[schedules.a]\nbase = 'no'\n", "schedules.a: base: unknown preset 'no'"),
    ("include = 'a.toml'\n[schedules.a]\n", "include = 'a.toml': expected a list"),
    ("include = ['a.toml']\n[schedules.a]\n", "mine.toml includes: "),
    ("include = ['mine.toml']\nseeds = 3\n[schedules.a]\n", "expected tables [schedules.NAME]"),
    *[
        (f"[schedules.{name!r}]\n", f"schedules = {name!r}: expected a name for a folder")
        for name in ("../../elsewhere", "/elsewhere", "..", ".", "", "x" * 101)
    ],
    *[(f'[schedules."a{x}"]\n', "expected a name for a folder") for x in ("\\u001b", "\\\\")],
]


@pytest.mark.parametrize(("text", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_name_the_file_and_the_place(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        get_grid(str(file))
    assert "mine.toml" in str(error.value)
    assert says in str(error.value)


def test_two_included_files_have_no_schedule_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.toml").write_text('[schedules.low]\nbase = "smoke/low"\n')
    file = tmp_path / "mine.toml"
    file.write_text('base = "smoke"\ninclude = ["one.toml", "other.toml"]\n[schedules.few]\n')
    with pytest.raises(ConfigError, match=r"other\.toml is included by .* 'low'"):
        get_grid(str(file))


@pytest.mark.parametrize("seeds", ["0", "[]", "[1, 1]", "[1, -1]", "'3'", "true"])
def test_seeds_are_a_number_or_different_ones(seeds: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"seeds = {seeds}\n[schedules.a]\n")
    with pytest.raises(ConfigError, match="expected a number of seeds"):
        seeds_of(str(tmp_path / "mine.toml"))


@pytest.mark.usefixtures("grid")
def test_a_first_seed_beside_the_files_seeds_is_refused(command: Callable) -> None:
    done = command("ablate", "mine.toml", "--first-seed", "10")
    assert done.returncode == 2
    assert "--first-seed = 10: expected --seeds as well: mine.toml names its seeds" in done.stderr


@pytest.mark.usefixtures("grid")
def test_a_grid_is_not_run(command: Callable) -> None:
    done = command("run", "mine.toml")
    assert done.returncode == 2
    assert "is a grid of schedules: regimes ablate mine.toml" in done.stderr


# -- options that are fields -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["run", "smoke", "--epochs=3"], "--set epochs=3"),
        (["run", "smoke", "--lr", "0.1", "--seed", "3"], "--set optimizer.lr=0.1"),
        (["ablate", "smoke", "--batch-size", "16"], "--set batch_size=16"),
        (["run", "smoke", "--policy.eta", "0.3"], "--set policy.eta=0.3"),
        (["run", "smoke", "--width", "--quiet"], "--set model.width=..."),
        (["tune", "smoke", "--decay-epochs", "[4, 8]"], "--set 'optimizer.decay_epochs=[4, 8]'"),
        (["cost", "smoke", "--levels.low=2"], "--set levels.low=2"),
        (["run", "smoke", "--workers", "3", "--unit-steps", "2"], "--set unit_steps=2"),
        (["ablate", "smoke", "--seed", "2"], "--seeds 1 --first-seed 2"),
        (["tune", "smoke", "--seed=2"], "--seeds 1 --first-seed 2"),
    ],
)
def test_a_field_as_an_option_is_answered(words: list[str], write: str, command: Callable) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.endswith(f"is no option of regimes {words[0]}: write {write}\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", ["ablate", "tune"])
def test_a_seed_that_a_grid_would_ignore_is_refused(verb: str, command: Callable) -> None:
    done = command(verb, "smoke", "--set", "seed=2")
    assert done.returncode == 2
    assert "write --seeds 1 --first-seed 2" in done.stderr


@pytest.mark.parametrize("where", [".", "grids"])
def test_a_base_may_be_a_file_beside_the_grid(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / where
    folder.mkdir(exist_ok=True)
    (folder / "base.toml").write_text(to_toml(replace(get_preset("smoke"), epochs=7)))
    (folder / "other.toml").write_text(to_toml(replace(get_preset("smoke"), epochs=9)))
    grid = 'base = "base.toml"\n[schedules.low]\n[schedules.high]\nbase = "other.toml"\n'
    (folder / "g.toml").write_text(grid)
    cells = get_grid(f"{where}/g.toml")
    assert {name: cell.epochs for name, cell in cells.items()} == {"low": 7, "high": 9}
    (folder / "none.toml").write_text('base = "gone.toml"\n[schedules.low]\n')
    with pytest.raises(ConfigError, match=r"base: cannot read the configuration .*gone.toml"):
        get_grid(f"{where}/none.toml")


WRONG = ("workers=0", "levels.low=-1")


def test_a_folder_without_configurations_is_no_grid(command: Callable, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = command("ablate", "empty", "--out", "runs")
    assert done.returncode == 2
    assert "empty has no configuration: expected files *.toml in it" in done.stderr


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_ends_an_ablation_before_its_first_run(
    setting: str, command: Callable, tmp_path: Path
) -> None:
    done = command("ablate", "smoke", "--set", setting, "--out", "runs")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not [*tmp_path.glob("runs/**/run.json")]


AGAIN = "interrupted; start the same command again to go on\n"
INTERRUPTED = {
    "run smoke": "interrupted; continue with --resume\n",
    **dict.fromkeys(("ablate smoke", "tune smoke", "branch runs/x --at 1 --out y"), AGAIN),
    **dict.fromkeys(("harm smoke", "plan smoke --seconds 60"), AGAIN),
    "report runs": "interrupted\n",
}


@pytest.mark.parametrize("words", INTERRUPTED)
def test_ctrl_c_says_how_this_command_goes_on(
    words: str, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "cli", stop)
    done = command(*words.split())
    assert (done.returncode, done.stderr) == (130, INTERRUPTED[words])
    if "--resume" in done.stderr:
        assert "resume" in list_options(getattr(cli, words.split()[0]))


def test_other_options_are_left_alone(command: Callable) -> None:
    assert "Unrecognized" in command("run", "smoke", "--colour", "red").stderr
    assert command("run", "--help").returncode == 0


def test_the_end_of_each_cell_is_reported_and_failures_are_collected() -> None:
    ended: list[tuple[Path, str | None]] = []
    other = sweep.InUse("another process is writing")
    outcomes = [(Path("a"), None), (Path("b"), "diverged"), (Path("c"), other)]
    failures = sweep.collect_outcomes(outcomes, lambda folder, error: ended.append((folder, error)))
    assert ended == outcomes
    assert failures == ["b: diverged"]
