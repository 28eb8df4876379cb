"""The explorer. Oracles: the record (its own policy replayed), `cost.predict_seconds`,
`replay.replay_rule`, and what a real browser shows of the notebook."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.cost.whatif import RECORDED, PricedRuns, Settings
from analysis.notebook.explorer import Explorer, as_html, explorer
from regimes.base.config import override
from regimes.base.errors import ConfigError, RecordError
from regimes.cost.cases import make_cases
from regimes.cost.network import Network
from regimes.cost.predict import predict_seconds
from regimes.policies.replay.replay import replay_rule, replay_traffic
from regimes.presets import get_preset
from regimes.records import Record, load_all
from regimes.training.loop import run as train

ROOT = Path(__file__).parents[2]


@cache
def study(archive: str) -> PricedRuns:
    return PricedRuns(load_all(ROOT / "data" / "reference" / f"{archive}.tar.xz"))


def settings_of(run: Record, **others: Any) -> Settings:
    """Knobs at the run's own policy."""
    table = run.config["policy"]
    own = {name: table[name] for name in ("eta", "interval") if name in table}
    return Settings(run.name, run.seed, **{**own, **others})


def adaptive(archive: str) -> list[Record]:
    return [run for (name, _), run in study(archive).runs.items() if name == "accordion"][:2]


# -- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", ["small", "smoke-quantise", "lstm-small"])
def test_a_run_replayed_by_its_own_policy_costs_what_it_cost(archive: str) -> None:
    for run in adaptive(archive):
        answer = study(archive).answer(settings_of(run))
        numbers = answer.numbers
        assert numbers["floats"]["accordion"] == pytest.approx(run.epochs["floats"].sum(), rel=1e-9)
        assert (answer.bands.loc["accordion"] == answer.bands.loc[RECORDED]).all()
        assert numbers["seconds"]["accordion"] == numbers["seconds"][RECORDED]


@pytest.mark.parametrize(
    "changes",
    [
        ["start_compressing_after=8"],
        ["sync_policy={name='static', level='4'}"],
        ["sync_policy={name='post-local', before='1', after='3'}", "signal='movement'"],
        ["start_compressing_after=4", "sync_policy={name='static', level='2'}"],
    ],
)
def test_what_was_trained_is_priced_by_its_exchanges(changes: list[str], tmp_path: Path) -> None:
    """Local steps have one in each round; the first ones may be dense, in no level's price."""
    short = ["epochs=3", "data.train_size=200", "data.test_size=50", "model.width=4", "workers=2"]
    short += ["optimizer.decay_epochs=[1]", *changes]
    trained = train(override(get_preset("smoke"), short), tmp_path / "run")
    knobs = Settings(trained.name, trained.seed, bandwidth=1e3, latency=0)
    numbers = PricedRuns([trained]).answer(knobs).numbers
    assert numbers["floats"][RECORDED] == trained.epochs["floats"].sum()
    exchanges = sum(row["sync"].get("rounds", row["steps"]) for row in trained.rows)
    for level, cost in trained.header["per_step"].items():
        if (name := f"{level} throughout") in numbers.index:
            assert numbers["floats"][name] == pytest.approx(exchanges * cost["floats"], rel=1e-12)
    assert numbers["floats"]["high throughout"] < numbers["floats"][RECORDED]
    more = numbers[["seconds", "floats"]] - numbers[["seconds", "floats"]].loc["low throughout"]
    per_float = 4 * 8 / 1e3  # on so slow a link bytes alone take time; two workers send each once
    assert more["seconds"].to_list() == pytest.approx((per_float * more["floats"]).to_list(), abs=1)


@pytest.mark.parametrize("archive", ["small", "smoke-quantise", "lstm-small"])
def test_a_step_of_mixed_levels_has_the_collectives_that_were_counted(archive: str) -> None:
    """PowerSGD, quantised and TopK layers, each at its own level."""
    mixed = 0
    for run in adaptive(archive):
        for row in run.rows:
            work = study(archive).work(dict(enumerate(row["layers"]["level"])))
            mixed += len({*row["layers"]["level"]} - {"dense"}) > 1
            for kind in ("mean", "gather"):
                calls, size = (row["collectives"][part][kind] for part in ("calls", "bytes"))
                assert row["steps"] * work.calls[kind] == pytest.approx(calls, abs=2)  # its end
                assert row["steps"] * work.bytes[kind] == pytest.approx(size, rel=1e-3)
    assert mixed > 0


def test_single_levels_cost_what_the_cost_model_says() -> None:
    runs, network = list(study("small").runs.values()), Network(2e8, 1e-4)
    numbers = study("small").answer(settings_of(runs[0], bandwidth=2e8, latency=1e-4)).numbers
    table = predict_seconds(make_cases(runs), network, 4).query("kind == 'level'")
    for row in table.to_dict("records"):
        name = f"{row['case'].partition(' (')[0]} throughout"
        assert numbers["speed_up"][name] == pytest.approx(row["speed_up"], rel=1e-3)
        assert numbers["seconds"][name] == pytest.approx(24 * row["epoch"], rel=1e-3)


@pytest.mark.parametrize("detector", ["accordion", "trace-cusum", "eigenvalue-change"])
def test_traffic_is_that_of_replay(detector: str) -> None:
    """`replay.replay_traffic` prices decisions from a header that knows every layer at every
    level."""
    (name, seed), run = next(iter(study("small-signals").runs.items()))
    knobs = Settings(name, seed, detector, eta=0.3, interval=2)
    floats = study("small-signals").answer(knobs).numbers["floats"][detector]
    decided = replay_rule(run, study("small-signals").rule(knobs, detector))
    assert floats == pytest.approx(replay_traffic(run, decided), rel=1e-12)


@pytest.mark.slow
@given(st.floats(0.05, 1.5), st.floats(0.05, 1.5), st.integers(1, 12))
@settings(max_examples=10, deadline=None)
def test_a_higher_threshold_never_sends_more(one: float, other: float, interval: int) -> None:
    low, high = sorted((one, other))
    answers = [
        study("small").answer(Settings("low", 1000, "norm-change", eta, interval)).numbers
        for eta in (low, high)
    ]
    more, less = (numbers["floats"]["norm-change"] for numbers in answers)
    floats = answers[0]["floats"]
    assert floats["high throughout"] <= less <= more <= floats["low throughout"]


def test_each_run_offers_the_detectors_whose_signal_it_has() -> None:
    offered = {
        archive: study(archive).detectors(next(iter(study(archive).runs.values())))
        for archive in ("small", "small-signals")
    }
    assert "eigenvalue-change" not in offered["small"]
    assert {"eigenvalue-change", "fisher-change", "trace-cusum"} <= {*offered["small-signals"]}


def test_runs_without_two_levels_are_refused_in_a_sentence() -> None:
    with pytest.raises(RecordError, match="no two levels of compression"):
        study("small-batch")


def test_runs_of_one_name_and_seed_at_two_rates_are_both_there() -> None:
    """As `load_all` names them, which saw each folder alone."""
    runs = [run for run in study("small").runs.values() if run.seed == 1000]
    low = next(run for run in runs if run.name == "low")
    config = low.config | {"optimizer": low.config["optimizer"] | {"lr": 0.1}}
    other = replace(low, header=low.header | {"config": config}, folder=Path("other"))  # type: ignore[operator]
    found = PricedRuns([*runs, other]).runs
    rates = {run.rate for (name, _), run in found.items() if name.startswith("low (")}
    assert len(found) == len(runs) + 1
    assert rates == {low.rate, 0.1}


def test_a_detector_rejects_what_no_slider_allows() -> None:
    with pytest.raises(ConfigError, match=r"eta = -1\.0: expected a positive number"):
        study("small").answer(Settings("low", 1000, eta=-1.0))


# -- widgets ---------------------------------------------------------------------------------


def test_moving_a_knob_shows_the_answer_of_the_new_settings() -> None:
    """That of the network changes seconds alone."""
    view = Explorer(study("small"))
    before, picture = view.numbers.value, view.picture.value
    view.knobs["eta"].value = 0.2
    expected = replace(view.settings, eta=0.2)
    assert view.settings == expected
    assert view.numbers.value == as_html(study("small").answer(expected), expected) != before
    assert bytes(view.picture.value).startswith(b"\x89PNG")
    assert view.picture.value != picture
    old = view.answer.numbers
    view.knobs["bandwidth"].value = 1e7
    new = view.answer.numbers
    assert (new["floats"] == old["floats"]).all()
    assert (new["seconds"] > old["seconds"]).all()


@pytest.mark.slow
def test_knobs_follow_the_run_and_the_detector() -> None:
    view = Explorer(study("smoke-signals"), schedule="accordion")
    assert view.knobs["seed"].value == min(view.knobs["seed"].options)
    view.knobs["detector"].value = "first-share"
    disabled = {name for name, knob in view.knobs.items() if knob.disabled}
    assert disabled == {"eta", "interval"}
    view.knobs["schedule"].value = "low"
    assert view.settings.detector == "first-share"
    assert view.answer.bands.index[:2].tolist() == ["first-share", RECORDED]


def test_names_from_a_record_are_text_not_html() -> None:
    knobs = Settings("low", 1000)
    answer = study("small").answer(knobs)
    renamed = replace(answer, numbers=answer.numbers.rename(index={RECORDED: "<script>"}))
    assert "<script>" not in as_html(renamed, knobs)


def test_explorer_reads_archives_and_starts_where_it_is_told() -> None:
    archive = ROOT / "data" / "reference" / "small.tar.xz"
    view = explorer(archive, eta=0.7, bandwidth=3e8)
    assert view.children[0].children[1].children[0].value == 0.7


def test_no_other_start_is_taken_in_place_of_the_one_asked_for() -> None:
    """But another way to write a stop of the slider."""
    for name, value, sentence in (
        ("schedule", "typo", "schedule = 'typo': expected one of dense, low, high"),
        ("seed", 99, "seed = 99: expected one of 1000, 1001"),
        ("detector", "eigenvalue-change", "detector = 'eigenvalue-change': expected one of"),
        ("eta", 3.0, "eta = 3.0: expected 0.05 to 1.5"),
        ("interval", 20, "interval = 20: expected 1 to 12"),
        ("share", math.nan, "share = nan: expected 0.05 to 1"),
        ("bandwidth", -1.0, "bandwidth = '-1 bit/s'"),
        ("latency", -1.0, "latency = '-1 s'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            Explorer(study("small"), **{name: value})  # type: ignore[arg-type]
    start = {"latency": 49.9999999e-6, "bandwidth": 1.0000001e9}
    found = Explorer(study("small"), **start).settings
    assert {name: getattr(found, name) for name in start} == start


# -- a browser -------------------------------------------------------------------------------


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab on loopback that serves a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    options = [f"--IdentityProvider.token={token}", "--allow-root", "--no-browser"]
    server_options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": folder}
    options += [f"--ServerApp.{name}={value}" for name, value in server_options.items()]
    names = ["JUPYTERLAB_WORKSPACES_DIR", "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR"]
    names += ["JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"]
    own = {name: str(folder / ".jupyter" / name.lower()) for name in names}
    asked = Path(own["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", "apputils-extension")
    asked.mkdir(parents=True)
    answers = {"fetchNews": "false", "checkForUpdates": False}  # nothing leaves this machine
    (asked / "notification.jupyterlab-settings").write_text(json.dumps(answers))
    with (folder / "jupyterlab.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
        )
        try:
            _answering(port, server, folder / "jupyterlab.log")
            yield f"http://127.0.0.1:{port}/lab/tree/notebooks/3-detectors.ipynb?token={token}"
        finally:
            server.terminate()
            server.wait(30)


def _answering(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not answer within a minute: {log.read_text()}")


@pytest.mark.slow
def test_a_slider_moved_in_a_browser_changes_the_numbers(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs the browser chromium (Debian: apt install chromium)")
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "3-detectors.ipynb", tmp_path / "notebooks")
    (tmp_path / "data").symlink_to(ROOT / "data")
    with jupyterlab(tmp_path) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1100})
        page.set_default_timeout(120_000)
        page.goto(address)
        run_all(page)
        page.locator(ROW).scroll_into_view_if_needed()
        knobs = Explorer(study("small")).settings
        moved = replace(knobs, eta=0.2)
        before, after = of_low(knobs), of_low(moved)
        assert before != after
        page.wait_for_function(SHOWS, arg=before)
        handle = page.locator(".widget-slider", has_text="eta").locator(".noUi-handle")
        for _ in range(round((knobs.eta - moved.eta) / 0.05)):
            handle.press("ArrowLeft")
        page.wait_for_function(SHOWS, arg=after)
        page.screenshot(path=tmp_path / "explorer.png")
        browser.close()


ROW = "tr.regimes-chosen"
SHOWS = f"number => document.querySelector('{ROW}')?.innerText.includes(number)"


def run_all(page: Any) -> None:
    """Run All Cells, from the menu, once the kernel is there."""
    page.locator(".jp-Notebook").wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menubar").get_by_text("Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()


def of_low(knobs: Settings) -> str:
    return f"{study('small').answer(knobs).numbers['of_low']['accordion']:.3f}"


def test_it_says_that_it_is_busy_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each move: busy before the answer, ready behind it; ready after an error as well."""
    shown: list[str] = []
    one = Explorer(study("smoke-quantise"))
    one.busy.observe(lambda change: shown.append(change["new"]), "value")
    one.picture.observe(lambda change: shown.append("answer"), "value")
    one.knobs["eta"].value = 0.9
    words = ["answer" if text == "answer" else "regimes-busy" in text for text in shown]
    assert words == [True, "answer", False]
    assert one.busy in one.view.children

    def fails(*_: Any) -> None:
        raise RecordError("no")

    monkeypatch.setattr(PricedRuns, "answer", fails)
    with pytest.raises(RecordError):
        one.knobs["eta"].value = 0.1
    assert "regimes-busy" not in one.busy.value
