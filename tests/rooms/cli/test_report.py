"""The report: its numbers against the record's rows (oracle: pandas), its page against a parser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regimes.base.errors import ConfigError, RecordError
from regimes.cli import html_report as report
from regimes.cli.html_report import content
from regimes.cost.cases import make_cases
from regimes.cost.network import Network, format_bandwidth
from regimes.cost.predict import predict_seconds
from regimes.plotting.schedules import DASH
from regimes.records import load_all, pack_records, read_lines, select_while_loading

REFERENCE = Path(__file__).parents[3] / "data" / "reference"
LINK = "100Mbit/s,50us"
URL = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")
LOADS = ("src", "href", "srcset", "data", "action", "poster", "background")
HOSTILE = '<script>alert(1)</script> $x$ & "q" \''


class Page(HTMLParser):
    """A page taken apart: tags, what they would load, tables as text, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.source, self.text, self._cell = text, "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in LOADS]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._cell = tag in ("td", "th")  # what a schedule is called in figures follows in <small>

    def handle_endtag(self, tag: str) -> None:
        self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def rows(self, number: int) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in self.tables[number][1:]}


@pytest.fixture(scope="module")
def small() -> Page:
    return Page(report.render_page(REFERENCE / "small.tar.xz", LINK))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schedules, two seeds each, out of the committed records."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(REFERENCE / "small.tar.xz", folder / "all")
    for name in ("low", "accordion"):
        for run in sorted((folder / "all" / name).iterdir())[:2]:
            shutil.copytree(run, folder / "mine" / name / run.name)
    return folder / "mine"


@pytest.fixture
def folder(unpacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unpacked, tmp_path / "mine"))


def rename(run: Path, name: str) -> None:
    header = json.loads((run / "run.json").read_text())
    header["config"]["name"] = name
    (run / "run.json").write_text(json.dumps(header))


def cut(run: Path, epochs: int, why: str | None = None) -> None:
    """Leave the first epochs of a run, as if it had broken off there (or been stopped)."""
    for name in ("epochs.jsonl", "seconds.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:epochs]))
    event = {"time": "2020-01-01T00:00:00+00:00", "event": "stopped" if why else "start"}
    (run / "events.jsonl").write_text(json.dumps(event | ({"why": why} if why else {})) + "\n")


# -- numbers ---------------------------------------------------------------------------------


def test_the_result_is_that_of_the_rows(small: Page) -> None:
    """Every cell of the first table, from the rows by pandas."""
    found = []
    for run in load_all(REFERENCE / "small.tar.xz"):
        rows = pd.DataFrame(run.rows)
        found.append(
            (
                run.name,
                100 * rows["metric"].iloc[-3:].mean(),
                rows["floats"].sum(),
                rows["bytes"].sum(),
            )
        )
    frame = pd.DataFrame(found, columns=["name", "metric", "floats", "bytes"]).groupby("name")
    mean, sd, n = frame.mean(), frame["metric"].std(), frame.size()
    shown = small.rows(0)
    assert shown.keys() == set(mean.index)
    for name, (metric, count, floats, of_low, size) in shown.items():
        assert metric == f"{mean['metric'][name]:.1f} ± {sd[name]:.1f}"
        assert int(count) == n[name] == 5
        assert float(of_low) == round(mean["floats"][name] / mean["floats"]["low"], 2)
        assert number(floats) == pytest.approx(mean["floats"][name], rel=5e-3)
        assert number(size.removesuffix("B")) == pytest.approx(mean["bytes"][name], rel=5e-3)


def number(text: str) -> float:
    """ "82.7 M" """
    value, _, unit = text.partition(" ")
    return float(value) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]


def test_where_the_time_went(small: Page) -> None:
    """Seconds of an epoch and their shares, from the lines of seconds.jsonl."""
    runs = [run for run in load_all(REFERENCE / "small.tar.xz") if run.name == "accordion"]
    clocks = pd.concat([run.epochs.filter(like="seconds_") for run in runs]).mean()
    heads = small.tables[2][0][1:]
    row = dict(zip(heads, small.rows(2)["accordion"], strict=True))
    for name in ("compute", "compress", "evaluate"):
        seconds, share = re.fullmatch(r"(\S+) \((\d+) %\)", row[name]).groups()  # type: ignore[union-attr]
        assert float(seconds) == pytest.approx(clocks[f"seconds_{name}"], rel=5e-3)
        assert int(share) == round(100 * clocks[f"seconds_{name}"] / clocks.sum())
    assert float(row["s/epoch"]) == pytest.approx(clocks.sum(), rel=5e-3)
    assert float(row["s/run"]) == pytest.approx(24 * clocks.sum(), rel=5e-3)


def test_the_prediction_is_that_of_regimes_cost(small: Page) -> None:
    frame = predict_seconds(
        make_cases(load_all(REFERENCE / "small.tar.xz")), Network.parse(LINK), 4
    )
    policies = frame[frame["kind"] == "policy"].set_index("case")
    for name, row in policies.iterrows():
        cells = small.rows(3)[f"{name} (schedule)"]
        assert cells[-3:] == [
            f"{row['epoch']:.3g}",
            f"{row['speed_up']:.2f}",
            format_bandwidth(row["break_even"]),
        ]
    assert "4 workers, 100 Mbit/s, 50 µs" in small.text


@pytest.mark.slow
def test_a_schedule_of_other_steps_is_left_out_of_the_prediction_and_named() -> None:
    page = Page(report.render_page(REFERENCE / "small-batch.tar.xz", LINK))
    assert "small-batch (schedule)" in page.rows(3)
    assert "smith (schedule)" not in page.rows(3)
    assert "Of another setting: smith." in page.text


def test_provenance_and_commands(small: Page) -> None:
    header = load_all(REFERENCE / "small.tar.xz")[0].header
    said = (
        header["code"]["commit"],
        *map(header["machine"].get, ("torch", "processor", "command")),
    )
    for words in (*said, "regimes report small.tar.xz --network 100Mbit/s,50us"):
        assert words in small.text
    assert str(REFERENCE) not in small.text
    assert tempfile.gettempdir() not in small.text


def test_checkpoints_are_counted_with_their_bytes(folder: Path) -> None:
    for unit, run in enumerate(sorted(folder.glob("*/*"))):
        place = run / "checkpoints" / f"epoch-{unit:04}"
        place.mkdir(parents=True)
        (place / "process-0.pt").write_bytes(bytes(250_000))
    with select_while_loading(["name=low"]):
        found = dict(content.tabulate_provenance(content.read_study(folder, folder)))
    assert found["checkpoints"] == ["2, 0.5 MB"]


def test_commands_draw_the_same_page(folder: Path) -> None:
    where = ["name=low"]
    with select_while_loading(where):
        study = content.read_study(folder, folder)
    rest = "--where name=low"
    assert content.redraw_commands(study, LINK, "my low", where) == [
        f"regimes report mine --network {LINK} --baseline 'my low' {rest}",
        f"regimes cost mine --network {LINK} {rest}",
        f"regimes detect mine {rest}",
        f"regimes figure curves mine {rest}",
    ]


def test_clocks_are_told_from_what_a_user_has_logged_and_from_none(folder: Path) -> None:
    """A logged value is no clock whatever its name is; a schedule without clocks took no 0 s."""
    for run in (folder / "low").iterdir():
        rows = read_lines(run / "epochs.jsonl")
        logged = (row | {"logged": {"wall_seconds_total": 1000.0}} for row in rows)
        (run / "epochs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    for run in (folder / "accordion").iterdir():
        (run / "seconds.jsonl").unlink()
    shown = content.tabulate_seconds(content.read_study(folder, folder))
    rows = {row[0]: row[1:] for row in shown.rows}
    assert not any("wall" in head for head in shown.heads)
    assert {*rows["accordion"]} == {DASH}
    assert float(rows["low"][-1]) < 100


# -- the page --------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(small: Page) -> None:
    text = small.source
    assert len(text.encode()) < 2e6
    assert small.loads
    assert all(value.startswith("data:image/svg+xml;base64,") for value in small.loads)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(small.tags)
    assert not URL.search(re.sub(r"base64,[\w+/=]+", "", text))
    assert "@import" not in text
    assert "url(" not in text
    for value in small.loads:
        picture = ElementTree.fromstring(base64.b64decode(value.partition(",")[2]))
        for element in picture.iter():
            targets = [v for k, v in element.attrib.items() if k.endswith("href")]
            assert all(v.startswith(("#", "data:")) for v in targets)


@pytest.mark.slow
def test_an_archive_shows_what_its_folder_shows(folder: Path, tmp_path: Path) -> None:
    """But for the command that reads folders alone."""
    pack_records(folder, tmp_path / "mine.tar.xz")
    ours = report.render_page(folder, LINK).replace("regimes detect mine\n", "")
    assert report.render_page(tmp_path / "mine.tar.xz", LINK).replace("mine.tar.xz", "mine") == ours


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoke-signals", "lstm-small", "small-budget"])
def test_every_kind_of_study_has_its_pictures(name: str) -> None:
    page = Page(report.render_page(REFERENCE / f"{name}.tar.xz", LINK))
    assert page.tags.count("img") >= 5
    assert len(page.tables) == 5  # results, differences, seconds, prediction, other methods
    assert "not finished" not in page.text


def test_a_single_run_has_its_map_of_levels(folder: Path) -> None:
    """And the same bytes again."""
    run = next((folder / "accordion").iterdir())
    text = report.render_page(run, LINK)
    assert report.render_page(run, LINK) == text
    page = Page(text)
    assert "One run." in page.text
    assert "Levels of ACCORDION." in page.text
    assert page.tags.count("img") == 5
    assert page.tables[0][1][1].count("±") == 0  # one seed has no spread


# -- names, broken runs, bad input -----------------------------------------------------------


def test_hostile_names_are_text(folder: Path) -> None:
    for run in (folder / "accordion").iterdir():
        rename(run, HOSTILE)
    text = report.render_page(folder, LINK)
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert HOSTILE in page.rows(0)
    assert f"Levels of {HOSTILE}." in page.text
    assert page.text.count("decay_epochs") == 1  # each setting stands once


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1))
def test_any_name_is_text(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """In the title, the configuration and the state; without an epoch nothing is drawn."""
    run = tmp_path_factory.mktemp("run")
    shutil.unpack_archive(REFERENCE / "lstm-small.tar.xz", run)
    run = next((run / "low").iterdir())
    cut(run, 0)
    rename(run, name)
    text = report.render_page(run, LINK)
    page = Page(text)
    assert f"{name}, seed {content.read_study(run, run).example.seed}" in page.text
    assert page.tags == Page(report.render_page(run, LINK)).tags


def test_an_unfinished_schedule_is_shown_as_such_and_a_seed_left_out_of_the_mean(
    folder: Path,
) -> None:
    for run in (folder / "accordion").iterdir():
        cut(run, 7, "the loss is not finite")
    kept, broken = sorted((folder / "low").iterdir())
    cut(broken, 3)
    page = Page(report.render_page(folder, LINK))
    assert "3 of 4 runs are not finished" in page.text
    assert "stopped, 7 of 24 epochs: the loss is not finite" in page.text
    assert page.rows(0)["accordion"] == ["unfinished: 7 of 24 epochs", *"––––"]
    metric = [row["metric"] for row in read_lines(kept / "epochs.jsonl")]
    shown, n = page.rows(0)["low"][:2]
    assert float(shown) == pytest.approx(100 * sum(metric[-3:]) / 3, abs=0.0501)
    assert n == "1"
    assert f"low/{broken.name}: broken off, 3 of 24 epochs" in page.text


def test_damaged_and_empty_runs_are_listed(folder: Path) -> None:
    first, second = sorted((folder / "low").iterdir())
    (first / "run.json").write_text("{")
    cut(second, 0)
    page = Page(report.render_page(folder, LINK))
    assert f"low/{first.name}: damaged: low/{first.name}/run.json is damaged" in page.text
    assert f"low/{second.name}: broken off, 0 of 24 epochs" in page.text
    assert page.rows(0).keys() == {"accordion"}
    assert "of low throughout" in page.tables[0][0]  # no run of low to compare with
    alone = Page(report.render_page(second, LINK))
    assert "No epoch is complete" in alone.text
    assert alone.tags.count("img") == 0


def test_of_low_without_a_run_of_low(folder: Path) -> None:
    """The header's floats of a step at low, times the steps."""
    shutil.rmtree(folder / "low")
    runs = load_all(folder)
    shares = [
        sum(r["floats"] for r in run.rows)
        / (run.header["per_step"]["low"]["floats"] * sum(r["steps"] for r in run.rows))
        for run in runs
    ]
    study = content.read_study(folder, folder)
    assert content.tabulate_results(study).rows[0][4] == f"{sum(shares) / 2:.2f}"


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.tar.xz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        with pytest.raises(RecordError, match=f"no run in or under .*{place}"):
            report.render_page(tmp_path / place, LINK)
    with pytest.raises(RecordError, match=r"text.tar.xz is no archive of records: [^\n]*$"):
        report.render_page(tmp_path / "text.tar.xz", LINK)
    with pytest.raises(ConfigError, match="no bandwidth and latency"):
        report.render_page(folder, "fast")
    shutil.copytree(next((folder / "low").iterdir()), folder / "again")
    with pytest.raises(RecordError, match="are both 'low' runs of seed"):
        report.render_page(folder, LINK)


def test_runs_of_other_settings_are_refused(folder: Path) -> None:
    path = next((folder / "low").iterdir()) / "run.json"
    header = json.loads(path.read_text())
    header["config"]["model"]["name"] = "other"
    path.write_text(json.dumps(header))
    with pytest.raises(RecordError, match="differ in model"):
        report.render_page(folder, LINK)


def test_the_command_line_does_not_load_the_drawing() -> None:
    late = {"matplotlib", "seaborn", "jinja2", "pandas", "torch"}
    code = f"import sys, regimes.cli; assert not {late} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)
