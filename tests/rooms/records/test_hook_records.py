"""What reads records, on those that the hook writes of somebody's own training: only what is known
is said, and the rest is as on the trainer's record of the same numbers."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from configs import smoke as config
from hooked import LOSSES, held, hooked
from rich.console import Console

import regimes
from analysis.common.compare import norms
from analysis.paper import batch, curves, figure18_20
from analysis.tournament import yoked
from regimes.base.errors import RecordError
from regimes.cli import monitor as watching
from regimes.cli.html_report import content, render_page
from regimes.cost.cases import make_cases, recorded_work
from regimes.cost.network import Network
from regimes.cost.predict import main as cost
from regimes.cost.predict import predict_seconds
from regimes.instruments.panel import Readings
from regimes.job.rows import unit_columns
from regimes.job.run_warnings import run_warnings
from regimes.plotting import style
from regimes.plotting.curves import tabulate_ends
from regimes.plotting.groups import find_decays, group_runs
from regimes.plotting.schedules import summarise_reached
from regimes.policies.replay.detect import default_rules, main, make_rule
from regimes.policies.replay.replay import replay_rule
from regimes.records import Record, load, pack_records, read_lines, summary, unknown_fields
from regimes.records.reader import IN_EVERY_ROW

torch.set_num_threads(1)
EPOCHS = 6
NET = "10Gbit/s,50us"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's record, in whose layers levels differ."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = (
        "name=accordion",
        "policy.interval=2",
        "policy.eta=0.3",
        "optimizer.decay_epochs=[4]",
    )
    regimes.run(config(*settings, epochs=EPOCHS), folder)
    return folder


def grad_norm(epoch: int) -> dict[str, float | None]:
    return {
        "grad_norm": 1.5 + epoch,
        "floats": float(epoch),
        **({"validation_loss": None if epoch < 4 else 2.25} if epoch else {}),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"known": (), "policy": {"name": "mine:Weekly", "interval": "weekly"}},
    "everything": {"logged": grad_norm, "metric": "accuracy", "batch": 8},
    "named": {"metric": "BLEU", "ended": False, "units": 10, "unit_steps": 50},
    "broken off": {
        "metric": "accuracy",
        "each": 4,
        "ended": False,
        "statistics": False,
        "policy": {"name": "Weekly"},
    },
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Path:
    return hooked(trained, tmp_path / request.param, **VARIANTS[request.param])


def shown(folder: Path) -> str:
    """What ``watch --once`` prints in 80 columns."""
    out = io.StringIO()
    watching.watch_runs(folder, once=True, console=Console(file=out, width=80))
    return out.getvalue()


def words(html: str) -> str:
    """A page's words, without its configuration."""
    body = re.sub(r"<pre>.*?</pre>|<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


# -- watch -----------------------------------------------------------------------------------


def test_a_job_of_unknown_length_has_no_bar_and_no_time_left(trained: Path, tmp_path: Path) -> None:
    with held(hooked(trained, tmp_path / "run", ended=False)):
        said = shown(tmp_path / "run")
        many = shown(tmp_path)
    assert "6 epochs so far, running" in said
    assert not {"━", "left", "/6"} & {*said.replace("━", " ━ ").split()}
    (line,) = [line.split() for line in many.splitlines() if line.startswith(" run  ")][1:]
    assert line[:2] == ["run", "6"]
    assert line[-1] == "running"


def test_a_job_whose_length_was_named_has_both(trained: Path, tmp_path: Path) -> None:
    with held(hooked(trained, tmp_path / "run", ended=False, units=10)):
        said = shown(tmp_path / "run")
    assert re.search(r"━+.*\n6/10 epochs, running: about 0.0 min left", said)


def test_a_job_that_is_gone_or_has_ended(trained: Path, tmp_path: Path) -> None:
    gone = shown(hooked(trained, tmp_path / "gone", ended=False)).replace("\n", "")
    assert "6 epochs so far, broken off: no process writes to" in gone
    assert "--resume" not in gone
    assert "6/6 epochs, finished" in shown(hooked(trained, tmp_path / "ended"))


def test_what_was_not_logged_is_a_dash_and_what_was_is_said(trained: Path, tmp_path: Path) -> None:
    nothing = shown(hooked(trained, tmp_path / "nothing", metric="accuracy", known=()))
    (row,) = [line.split() for line in nothing.splitlines() if line.startswith("     5 ")]
    assert row[2:5] == ["-", "-", "-"]
    assert "logged:" not in nothing
    everything = shown(hooked(trained, tmp_path / "all", logged=grad_norm))
    assert "logged: grad_norm 6.5, floats 5, validation_loss 2.25" in everything
    sparse = hooked(trained, tmp_path / "folder" / "sparse", metric="accuracy", each=4)
    last = 100 * load(sparse).rows[3]["metric"]
    assert f" {last:.1f} " in shown(tmp_path / "folder")  # the last that is known


def test_units_of_steps_count_as_units(trained: Path, tmp_path: Path) -> None:
    said = shown(hooked(trained, tmp_path / "run", unit_steps=50))
    words = " ".join(said.split())
    assert "units count from 0" in words
    assert "epochs count" not in words
    assert re.search(r"\n +300 ", said)  # steps done


def test_tensorboard_leaves_out_what_was_not_logged(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from regimes.plotting.reporters import Scalars

    run, seen = load(hooked(trained, tmp_path / "run", known=(), logged=grad_norm)), {}

    class Writer:
        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            seen[name, epoch] = value

        def flush(self) -> None: ...

    scalars = Scalars(tmp_path)
    scalars.writer_class = lambda *_, **__: Writer()  # type: ignore[assignment]
    scalars.start(run.header, [])
    for row in run.rows[:2]:
        scalars.epoch(row, {})
    assert seen["logged/grad_norm", 1] == 2.5
    assert not {name for name, _ in seen} & {"loss", "loss/train", "logged/validation_loss"}


# -- what is not recorded --------------------------------------------------------------------

MADE_UP = (
    "warmup",
    "nesterov",
    "weight_decay",
    "scale_with_batch",
    "deterministic =",
    "decay_",
    "epochs =",
    "schedule =",
    "union_pass",
    "precision =",
    "sequence",
    "checkpoint",
)


@pytest.mark.parametrize("made_up", [True, False], ids=["older", "this version"])
def test_what_nobody_has_said_is_shown_as_not_said(
    made_up: bool, trained: Path, tmp_path: Path
) -> None:
    folder = hooked(trained, tmp_path / "run", made_up=made_up)
    if not made_up:
        header = json.loads((folder / "run.json").read_text())
        header["config"]["optimizer"]["options"] = {"betas": [None, 0.9]}
        (folder / "run.json").write_text(json.dumps(header))
    run = load(folder)
    missing = ["data", "batch_size", "optimizer.schedule", "precision", "deterministic"]
    if made_up:  # what was in the block, and what was not, cannot be told apart
        missing.insert(2, "optimizer.options")
    assert unknown_fields(run.header) == missing
    assert (run.config["optimizer"].get("options") is None) == made_up
    sentence = f"not recorded: {', '.join(missing)}"
    assert sentence in " ".join(shown(folder).split())
    html = render_page(folder, NET)
    block = re.sub(r"<h2>.*", "", html, flags=re.DOTALL)
    assert ("&#34;not recorded&#34;," in block) == (not made_up)  # a null in a list
    assert f"# {sentence}" in block
    assert "# learning rate: 0.1 in the first unit, 0.04 in the last" in block
    assert not [word for word in MADE_UP if word in block]
    assert "data not recorded" in style.describe_setting(run)
    assert "batch not recorded" in style.describe_setting(run)
    assert run.config["epochs"] is None
    assert unknown_fields(load(trained).header) == []


def test_a_trainers_record_has_its_epochs(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    header = json.loads((trained / "run.json").read_text())
    header["config"]["epochs"] = None
    (tmp_path / "run/run.json").write_text(json.dumps(header))
    with pytest.raises(RecordError, match=r"config\.epochs is None, expected a whole number"):
        load(tmp_path / "run")


# -- seconds that a kill has lost ------------------------------------------------------------


def lose(folder: Path, *units: int) -> Path:
    """The record, without the seconds of some units."""
    lines = read_lines(folder / "seconds.jsonl")
    kept = [{"epoch": row["epoch"]} if row["epoch"] in units else row for row in lines]
    (folder / "seconds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return folder


def test_a_unit_without_seconds_is_priced_by_the_others(trained: Path, tmp_path: Path) -> None:
    whole = load(hooked(trained, tmp_path / "whole"))
    columns = whole.epochs[["seconds_compute", "seconds_compress", "steps"]].drop(index=2)
    found = make_cases([load(lose(hooked(trained, tmp_path / "run"), 2))])
    (policy,) = (case for case in found if case.runs)
    compute = (columns["seconds_compute"] / columns["steps"]).median()
    assert policy.work.compute == pytest.approx(compute, rel=1e-12)
    assert all(0 < work.compress < 1 for _, work in policy.epochs)
    html = words(render_page(tmp_path / "run", NET))
    assert "No prediction" not in html
    row = [line.split() for line in shown(tmp_path / "run").splitlines() if line[:6] == "     2"]
    assert row[0][-1] == "-"
    mean = columns[["seconds_compute", "seconds_compress"]].mean()
    spent = content.tabulate_seconds(content.read_study(tmp_path / "run", tmp_path / "run"))
    cell = spent.rows[0][list(spent.heads).index("compute")]
    assert cell.startswith(f"{mean['seconds_compute']:.3g} ")


def test_compression_without_seconds_is_that_of_its_levels(trained: Path, tmp_path: Path) -> None:
    """The median of the units at the same levels, of which all seconds are known here."""
    folder = lose(hooked(trained, tmp_path / "run"), 2)
    run = load(folder)
    for unit, row in enumerate(run.rows):
        row["layers"]["level"] = ["low" if unit < 3 else "high"] * len(row["layers"]["level"])
        run.epochs.loc[unit, "seconds_compress"] = [2.0, 4.0, math.nan, 9.0, 9.0, 9.0][unit]
        run.epochs.loc[unit, "steps"] = row["steps"] = 2
    assert [work.compress for _, work in recorded_work(run)] == [1.0, 2.0, 1.5, 4.5, 4.5, 4.5]
    run.epochs["seconds_compute"] = math.nan
    with pytest.raises(RecordError, match="does not say where the time of its epochs went"):
        make_cases([run])


# -- tables ----------------------------------------------------------------------------------


def test_logged_values_are_columns(trained: Path, tmp_path: Path) -> None:
    run = load(hooked(trained, tmp_path / "run", logged=grad_norm, known=("train_loss",)))
    table = run.epochs
    np.testing.assert_array_equal(table["grad_norm"], 1.5 + np.arange(EPOCHS))
    np.testing.assert_array_equal(table["logged_floats"], np.arange(EPOCHS))
    assert table["floats"].equals(load(trained).epochs["floats"])
    for name in IN_EVERY_ROW:  # the same out of the rows, without a frame
        np.testing.assert_array_equal(np.array(load(tmp_path / "run").column(name)), table[name])
    np.testing.assert_array_equal(table["validation_loss"], [np.nan] * 4 + [2.25] * 2)
    assert {str(table[c].dtype) for c in (*LOSSES, "batch_size", "grad_norm")} == {"float64"}
    assert table["metric"].isna().all()


def test_the_summary_takes_what_was_logged(trained: Path, tmp_path: Path) -> None:
    def metric(name: str, **what: Any) -> float:
        run = load(hooked(trained, tmp_path / name, **what))
        return float(summary([run])["metric"].iloc[0])

    assert metric("sparse", metric="accuracy", each=4) == load(trained).rows[3]["metric"]
    assert metric("loss") == pytest.approx(load(trained).epochs["test_loss"].tail(3).mean())
    assert math.isnan(metric("nothing", known=()))
    with pytest.raises(RecordError, match=r"6 epochs so far: its training has not ended"):
        metric("running", ended=False)


def test_packed_and_read_again(trained: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        hooked(trained, tmp_path / "runs" / f"{seed}", seed=seed, logged=grad_norm)
    assert pack_records(tmp_path / "runs", tmp_path / "runs.tar.xz") == 2
    again = regimes.load_all(tmp_path / "runs.tar.xz")
    pd.testing.assert_frame_equal(again[0].epochs, load(tmp_path / "runs" / "0").epochs)


# -- against the trainer's record of the same numbers -----------------------------------------


def test_replay_is_that_of_the_trainers_record(trained: Path, tmp_path: Path) -> None:
    theirs, ours = load(trained), load(hooked(trained, tmp_path / "run", ended=False, known=()))
    assert default_rules([ours]) == default_rules([theirs])
    for text in default_rules([theirs]):
        pd.testing.assert_frame_equal(
            replay_rule(ours, make_rule(text, ours)), replay_rule(theirs, make_rule(text, theirs))
        )


def test_cost_does_not_depend_on_whether_the_batch_is_known(trained: Path, tmp_path: Path) -> None:
    runs = [load(hooked(trained, tmp_path / f"{b}", batch=b)) for b in (None, 8)]
    unknown, known = (predict_seconds(make_cases([run]), Network.parse(NET), 4) for run in runs)
    pd.testing.assert_frame_equal(unknown, known, rtol=1e-12)


def test_decays_are_those_of_the_rates(trained: Path, tmp_path: Path) -> None:
    ours = load(hooked(trained, tmp_path / "run"))
    assert find_decays(ours) == [(4, pytest.approx(10.0))] == find_decays(load(trained))
    ours.rows[4]["next_lr"] = ours.rows[5]["lr"] = 0.0
    ours.rows[5]["next_lr"] = 0.0
    assert find_decays(ours)[1] == (5, math.inf)


def test_runs_of_one_setting_compare(trained: Path, tmp_path: Path) -> None:
    runs = [load(hooked(trained, tmp_path / f"{seed}", seed=seed)) for seed in (0, 1)]
    assert [run.seed for run in group_runs(runs)["accordion"]] == [0, 1]
    with_batch = load(hooked(trained, tmp_path / "batch", seed=2, batch=8))
    assert len(group_runs([*runs, with_batch])) == 2  # another experiment of that name
    other = load(hooked(trained, tmp_path / "other", seed=3))
    other.config["model"]["name"] = "Other"
    with pytest.raises(RecordError, match="differ in model"):
        group_runs([*runs, other])


# -- what is said of policies ----------------------------------------------------------------


def test_a_reader_does_not_import_somebodys_policy(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    policy = {"name": "theirs:Policy", "interval": 7}
    run = load(hooked(trained, tmp_path / "run", policy=policy))
    for row in run.rows:
        row["layers"]["level"] = ["low"] * len(row["layers"]["level"])
    assert run_warnings(run.header, run.rows) == [
        "policy: theirs:Policy compares every 7 units, and the run has 6: it has compared nothing. "
        "Set policy.interval lower.",
        "policy: theirs:Policy chose 'low' for everything in all of 6 epochs: the run is one at a "
        "static level.",
    ]


# -- figures and pages -----------------------------------------------------------------------


PICTURES = {  # of each variant, what the page has drawings of, before those of levels
    "nothing": [],
    "everything": [
        "Test accuracy against epoch",
        "Test accuracy against floats",
        "Training loss against epoch",
        "Test loss against epoch",
        "grad_norm against epoch",
        "logged_floats against epoch",
        "validation_loss against epoch",
    ],
    "named": [
        "BLEU against unit",
        "BLEU against floats",
        "Training loss against unit",
        "Test loss against unit",
    ],
    "broken off": [
        "Test accuracy against epoch",
        "Test accuracy against floats",
        "Training loss against epoch",
        "Test loss against epoch",
    ],
}


def test_every_page_and_table_is_whole(variant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each variant: nothing raises but one sentence, nothing says None or nan."""
    run, html = load(variant), render_page(variant, NET)
    pictures = re.findall(r'alt="([^"]+)"', html)
    assert pictures[: pictures.index("Levels of ACCORDION")] == PICTURES[variant.name]
    said = [words(html), shown(variant)]
    one = "unit" if run.config["unit_steps"] else "epoch"
    assert f"Seconds per {one} and their share, mean over {one}s and runs" in said[0]
    assert f"Traffic per {one}" in pictures
    assert f"Predicted, not measured: seconds per {one}" in said[0]
    cost([str(variant)], None, Network.parse(NET), None)
    if run.rows[0]["statistics"]:
        main([variant], (), None)
    else:
        for reads in (lambda: main([variant], (), None), lambda: norms([run])):
            with pytest.raises(RecordError, match="recorded no "):
                reads()
    said += capsys.readouterr()
    assert not re.search(r"\b(None|nan|inf)\b", " ".join(said))


def test_a_page_of_runs_of_which_some_have_logged_nothing(trained: Path, tmp_path: Path) -> None:
    for seed, more in enumerate(({}, {"known": ()}, {"ended": False})):
        hooked(trained, tmp_path / "runs" / f"{seed}", seed=seed, metric="accuracy", **more)
    silent = hooked(trained, tmp_path / "runs" / "3", known=(), metric="accuracy")
    header = json.loads((silent / "run.json").read_text())
    header["config"]["name"] = "silent"
    (silent / "run.json").write_text(json.dumps(header))
    said = words(render_page(tmp_path / "runs", NET))
    assert "1 of 4 runs are not finished" in said
    assert "Not logged: silent." in said
    assert not re.search(r"\b(None|nan)\b", said)


def panels(run: Record, **what: Any) -> Iterator[Any]:
    return iter(curves.figure([run], **what)[0].axes)


def test_curves_of_what_was_logged_now_and_then(trained: Path, tmp_path: Path) -> None:
    """A point per value, the last one marked where it lies; the axis has all epochs."""
    run = load(hooked(trained, tmp_path / "run", metric="accuracy", each=2))
    epochs, floats = panels(run)
    assert [*epochs.lines[0].get_xdata()] == [1, 3, 5]
    assert epochs.get_xlim()[0] < 0
    assert len(floats.lines[0].get_xdata()) == 3
    once = load(hooked(trained, tmp_path / "once", metric="accuracy", each=4))
    end = tabulate_ends({"accordion": [once]})
    assert end["epoch"].item() == 3
    assert end["floats"].item() == once.epochs["total_floats"][3]
    assert end["accuracy"].item() == 100 * once.rows[3]["metric"]


def test_a_figure_without_its_numbers_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    nothing = hooked(trained, tmp_path / "nothing", known=())
    with pytest.raises(RecordError, match="has no 'loss': no loss or metric was logged in it"):
        curves.main(nothing, tmp_path)
    with pytest.raises(RecordError, match="has no 'loss'"):
        yoked.numbers([load(nothing)])
    train = hooked(trained, tmp_path / "train", known=("train_loss",), logged=grad_norm)
    with pytest.raises(RecordError, match="one of train_loss, grad_norm, logged_floats, validat"):
        curves.main(train, tmp_path)
    with pytest.raises(RecordError, match="does not say what its batch size was"):
        batch.figure([load(hooked(trained, tmp_path / "loss"))])
    with pytest.raises(RecordError, match="its training has not ended, or was broken off"):
        figure18_20.level_map([load(hooked(trained, tmp_path / "running", ended=False))])
    assert not list(tmp_path.glob("*.png"))
    run = hooked(trained, tmp_path / "part", metric="part")  # would take the place of a column
    for shows in (regimes.plot, lambda folder: summarise_reached([load(folder)])):
        with pytest.raises(RecordError, match="is a column of the tables that show it"):
            shows(run)


def test_a_loss_of_unknown_unit_is_drawn_without_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = hooked(trained, tmp_path / "run", known=("train_loss",))
    paths = curves.main(train, tmp_path / "figures", metric="train_loss")
    assert [path.suffix for path in paths] == [".png", ".svg", ".csv"]  # no table: never tested
    epochs, _ = panels(load(train), column="train_loss")
    assert epochs.get_ylabel() == "training loss\nlower is better"
    (trainers, _) = panels(load(trained), column="train_loss")
    assert trainers.get_ylabel() == "training loss (nats)\nlower is better"


def test_a_unit_of_ones_own_training_by_hand() -> None:
    readings = Readings({"norm:update": [2.0]}, {"x": 1.0}, {})
    row = unit_columns(3, (15, 20), 5, (0.1, 0.05), None, readings)
    nothing = dict.fromkeys(("batch_size", "train_loss", "test_loss", "metric", "weights"))
    assert row == nothing | {
        "epoch": 3,
        "unit": {"first": 15, "stop": 20},
        "lr": 0.1,
        "next_lr": 0.05,
        "steps": 5,
        "batch": {"level": None, "why": None, "multiple": 1},
        "sync": {"level": None, "why": None, "period": 1},
        "statistics": {"norm:update": [2.0]},
        "model": {"x": 1.0},
    }
