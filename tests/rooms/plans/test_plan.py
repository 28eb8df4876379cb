"""Plans of real trainings (oracles: other formulas of the same numbers, a plan that was not
stopped)."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from odd_values import odd, places, with_odd
from torch import nn

import regimes
from regimes.base.config import RunConfig, override_fields
from regimes.base.errors import ConfigError, DataError, RecordError, TrainingError
from regimes.compression import make_compressor
from regimes.cost import measure
from regimes.cost.from_model import make_job
from regimes.cost.methods import parse_method
from regimes.cost.models import Model
from regimes.cost.network import Network
from regimes.cost.nodes import DataParallelJob
from regimes.cost.options import JobOptions
from regimes.presets import get_preset
from regimes.search.plans.dense_curve import read_curve
from regimes.search.plans.plan import _job
from regimes.search.plans.priced import Price, price_methods
from regimes.search.plans.probes import configure_probe, in_steps
from regimes.search.plans.search import decode_probes, read_prices
from regimes.search.rounds import LOG, SearchBudget, read_log
from regimes.training.learning_rate import LearningRate


def data(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :3] ** 2).argmax(1)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))


def job(between: Network, workers: int = 4) -> DataParallelJob:
    """So many nodes on a link; of no model yet."""
    return DataParallelJob(Model("", ()), 1.0, 1.0, nodes=workers, gpus=1, between=between)


def planned(out: Path, shift: float = 0.0, **more: Any) -> regimes.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    given = {
        "link": "100kbit/s,1ms",
        "seconds": 2.0,
        "methods": ["dense/4"],
        "runs": 12,
        "step": 1e-4,
    }
    own = {"workers": 2, "epochs": 2, "optimizer": {"name": "adamw", "lr": 0.01}}
    x, y = data(128, 0)
    return regimes.plan(model, (x + shift, y), data(64, 1), out=out, **{**given, **own, **more})


SHOWN: list[str] = []  # what `found` has shown of its runs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> regimes.Plan:
    SHOWN.clear()
    out = tmp_path_factory.mktemp("plan") / "a"
    return planned(out, show=lambda line, share: SHOWN.append(line))


def test_table_has_what_the_short_runs_and_the_prices_say(found: regimes.Plan) -> None:
    table = found.table.set_index("method")
    assert set(table.index) == {"dense", "dense, every 4 steps"}
    size = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    # an all-reduce among two sends the bytes once each way, in two messages; the loss goes with it
    network = 2 * 1e-3 + 8 * (size + 4) / 1e5
    assert table["step"]["dense"] >= network + 1e-4  # and the compression, which is timed
    assert table["mb"]["dense"] == pytest.approx(table["steps"]["dense"] * (size + 4) / 1e6)
    # of a quarter of the steps, and of the compression that is timed
    assert table["step"]["dense, every 4 steps"] < 0.4 * table["step"]["dense"]
    for method, row in table.iterrows():
        assert row["steps"] == max(16, round(2.0 / row["step"])), method
        times = table["step"]["dense"] / row["step"]
        assert row["speed"] == pytest.approx(times * row["clock"])
        assert row["low"] == pytest.approx(times * row["clock_low"])
        assert row["low"] <= row["speed"] <= row["high"]
    assert found.best == table["speed"].idxmax()
    assert found.best in found.sentence() or "tay dense" in found.sentence()
    assert all(text in str(found) for text in ("accuracy % in 2 s", "× dense", "dense, every 4"))


def test_each_run_is_shown_in_the_unit_of_figures(found: regimes.Plan) -> None:
    """An accuracy is never below 0, though the search takes its negative for a loss."""
    best = max(float(line.rpartition("accuracy ")[2]) for line in SHOWN)
    assert len(SHOWN) == len(found.known.losses)
    assert best == pytest.approx(-min(found.known.losses.values()), rel=1e-3)


def test_the_loss_in_the_end_is_on_the_given_curve_of_dense(
    found: regimes.Plan, tmp_path: Path
) -> None:
    """Oracle: a curve whose value at each length is known, in percent."""
    ends = {n: 10.0 * math.log2(n) for n in (4, 16, 64, 256, 1024)}
    plan = replace(found, curve=ends, smaller=True)
    for row in plan.table.to_dict("records"):
        if not plan.known.clocks[row["method"]].known:
            assert math.isnan(row["loss"])
            continue
        at = row["clock"] * row["steps"]
        assert row["loss"] == pytest.approx(10 * math.log2(at))
        assert row["loss_low"] <= row["loss"] <= row["loss_high"]
    assert "After 2 s dense ends at" in plan.sentence()
    assert plan.rate(plan.best) == plan.config.optimizer.lr  # that of the given trainings
    without = replace(found, smaller=True)
    assert without.table["loss"].isna().all()
    assert "(--curve, curve=); known are none." in without.sentence()
    short = replace(without, curve={2: 1.0, 8: 2.0})
    assert "(--curve, curve=); known are those of 2 to 8." in short.sentence()
    for heading, encoding in (("steps,loss\n", "utf-8"), ("", "utf-8"), ("", "utf-8-sig")):
        lines = heading + "".join(f"{n},{loss}\n" for n, loss in ends.items())
        (tmp_path / "losses.csv").write_text(lines, encoding=encoding)
        assert read_curve(tmp_path / "losses.csv") == ends
    assert read_curve(ends) == ends


def test_records_of_dense_are_its_curve(found: regimes.Plan, tmp_path: Path) -> None:
    """The end of each run; each test of one with a constant rate."""
    assert found.out is not None
    runs = found.out / "dense"
    read = read_curve(runs)
    assert {*read} == {probe.steps for probe in found.known.losses if probe.method == "dense"}
    x, y = data(128, 0)
    own: Any = {"workers": 2, "epochs": 3, "policy": {"name": "static", "level": "dense"}}
    for name, more, count in (("flat", {}, 3), ("falling", {"schedule": "cosine"}, 1)):
        optimizer = {"name": "adamw", "lr": 0.01, **more}
        record = regimes.simulate(
            small_net(),
            (x, y),
            (x, y),
            out=tmp_path / name,
            optimizer=optimizer,
            **own,
        )
        curve = read_curve(tmp_path / name)
        assert len(curve) == count
        assert max(curve) == sum(row["steps"] for row in record.rows)
        assert curve[max(curve)] == pytest.approx(100 * record.rows[-1]["metric"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one training or more"),
        ("steps,loss\n", "one training or more"),
        ("100\n", "expected lines of steps,loss"),
        ("100,low\n", "expected lines of steps,loss"),
        ("0,2.5\n", "a number above 0"),
        ("100,nan\n", "a finite number"),
    ],
)
def test_a_curve_that_is_none_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        planned(tmp_path / "wrong", curve=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        planned(tmp_path / "wrong", curve=tmp_path / "none.csv")


def test_a_link_on_which_nothing_is_faster_needs_no_search(tmp_path: Path) -> None:
    plan = planned(tmp_path / "fast", link="100Gbit/s,1us", step=1.0, seconds=600.0)
    assert plan.best == "dense"
    assert ([*plan.methods], plan.left_out) == (["dense"], ("dense, every 4 steps",))
    assert plan.sentence().startswith("Stay dense")
    assert {p.steps for p in plan.known.losses} == {16}  # seconds of training, not minutes
    assert plan.decided


@pytest.mark.parametrize("link", [None, "1Gbit/s"])
def test_links_of_a_file_are_those_that_a_cost_has(link: str | None, tmp_path: Path) -> None:
    """Of each kind its own: between two nodes, and within each."""
    path = tmp_path / "links.json"
    slow, fast = ({"bandwidth": speed, "latency": 1e-6} for speed in (2e9, 4e11))
    path.write_text(json.dumps({"within": fast, "between": slow}))
    ours = _job(link, path, 2, 4)
    where = JobOptions(model="resnet50", step="1s", nodes=2, gpus=2, links=path, between=link)
    theirs = make_job(where)
    assert (ours.nodes, ours.gpus) == (theirs.nodes, theirs.gpus)
    assert (ours.within, ours.between) == (theirs.within, theirs.between)
    assert ours.within == Network(**fast)


@pytest.mark.parametrize(("missing", "gpus"), [("within", 2), ("within", 4), ("between", 2)])
def test_a_link_that_a_file_lacks_is_not_made_up(missing: str, gpus: int, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    other = {"within": "between", "between": "within"}[missing]
    path.write_text(json.dumps({other: {"bandwidth": 2e9, "latency": 1e-6}}))
    with pytest.raises(ConfigError, match=f"has no '{missing}'"):
        _job(None, path, gpus, 4)
    if missing == "between":  # of workers that are each a node, or all on one, no other is needed
        assert _job(None, path, 1, 4).between == _job(None, path, 4, 4).within == Network(2e9, 1e-6)


def test_probes_take_the_time_of_this_machine_whatever_a_step_takes_elsewhere() -> None:
    methods = [parse_method("dense"), parse_method("dense/8")]
    _, prices, _ = price_methods(get_preset("smoke"), methods, job(Network(1e6, 1e-3)), compute=1e3)
    for price in prices.values():
        assert price.seconds > 1e3
        assert price.here < 100  # of a step of milliseconds


def test_its_files_and_its_lines(found: regimes.Plan) -> None:
    names = {path.name for path in found.save()}
    assert names == {"plan.png", "plan.svg", "plan.csv"}  # a model of one's own is in no file
    assert "regimes." in found.hook() or "plain" in found.hook()
    config = found.config_to_train
    assert config.steps == found.table["steps"].iloc[0]
    assert config.seed not in {probe.seed for probe in found.known.losses}


def test_a_method_without_a_run_is_named_and_not_ranked(found: regimes.Plan) -> None:
    """The budget's minutes may end before each method had one."""
    seen = {p: loss for p, loss in found.known.losses.items() if p.method == "dense"}
    plan = replace(found, known=replace(found.known, losses=seen))
    assert list(plan.table["method"]) == ["dense"]
    assert not plan.decided
    assert plan.sentence().startswith("Not decided, the budget had no time for dense, every 4")
    assert plan.figure().data is not None
    assert "plain" in plan.hook()


def test_what_was_trained_for_a_small_part_of_its_length_gives_no_advice(
    found: regimes.Plan,
) -> None:
    seen = {p: loss for p, loss in found.known.losses.items() if p.seed == found.config.seed}
    known = replace(found.known, seconds=1e5, losses=seen)
    plan = replace(found, known=known, more=SearchBudget(12.0))
    words = "Too short for advice: the training is"
    assert plan.sentence().startswith(words)
    assert "times as long as the short runs; the same call with 12 minutes trains more" in (
        plan.sentence()
    )
    assert plan.sentence().count("times as long as the short runs") == 1


def test_what_would_train_more_is_said(tmp_path: Path) -> None:
    """With the budget that is named the same call goes on."""
    plan = planned(tmp_path / "few", runs=9)
    assert plan.more is not None
    assert f"the same call with {plan.more.runs} runs trains more" in plan.sentence()
    again = planned(tmp_path / "few", runs=plan.more.runs)
    assert len(again.known.losses) > len(plan.known.losses)
    over = replace(plan, budget=SearchBudget(3.0), more=SearchBudget(4.25))
    assert "the same call with 4.2 minutes trains more" in over.sentence()
    assert "The 3 minutes are over." in over.sentence()


def test_minutes_count_from_the_first_timed_step(tmp_path: Path) -> None:
    """What is trained ends in them, or a little later: the run that has begun is ended."""
    start = time.monotonic()
    found = planned(tmp_path / "minutes", runs=None, minutes=0.5)
    assert time.monotonic() - start < 30 + 15  # a loaded machine
    assert {p.method for p in found.known.losses} >= {"dense"}


def test_seconds_may_be_a_text(found: regimes.Plan, tmp_path: Path) -> None:
    assert found.out is not None
    shutil.copytree(found.out, tmp_path / "same")
    again = planned(tmp_path / "same", seconds="2000ms", step="0.1ms")
    assert again.table.equals(found.table)


def test_a_schedule_that_is_stretched_is_said(found: regimes.Plan) -> None:
    own = found.known.prices["dense"].seconds * 4
    assert 2.0 / own > 2
    assert f"Your schedule of 4 steps takes dense {1e3 * own:.3g} ms and is stretched" in (
        found.sentence()
    )
    plan = replace(found, config=replace(found.config, steps=10**6))
    assert "and is cut" in plan.sentence()


def test_the_training_is_as_long_as_the_configured_one_without_seconds(tmp_path: Path) -> None:
    plan = planned(tmp_path, seconds=None, epochs=20, runs=1)
    assert plan.known.horizon("dense") == plan.config.steps == 40


def test_a_stopped_plan_goes_on_as_one_that_was_not(found: regimes.Plan, tmp_path: Path) -> None:
    assert found.out is not None
    folder = tmp_path / "b"
    shutil.copytree(found.out, folder)
    lines = (found.out / LOG).read_text().splitlines()
    # the prices are those of the log: timing them again would ask for other steps
    (folder / LOG).write_text("\n".join(lines[:5]) + "\n")
    last = [json.loads(line).get("run") for line in lines][-1]
    shutil.rmtree(folder / last)
    other = planned(folder)
    assert other.known.losses == found.known.losses
    again = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    for line, before in zip(again, map(json.loads, lines), strict=True):
        line.get("facts", {}).pop("prices", None)  # renewed where they were slower before
        before.get("facts", {}).pop("prices", None)
        assert {**line, "seconds": 0} == {**before, "seconds": 0}
    with pytest.raises(RecordError, match=r"holds a search with seconds 2\.0, not 1"):
        planned(folder, seconds=1.0)
    with pytest.raises(RecordError, match="data"):
        planned(folder, shift=1.0)


def test_a_folder_of_another_plan_is_refused_before_anything_is_timed(
    found: regimes.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regimes.search.plans.priced.price_methods", None)
    for changed, words in (
        ({"methods": ["dense/8"]}, r"holds a search with methods \['dense', 'dense, every 4 steps"),
        ({"link": "1Mbit/s,1ms"}, "holds a search with link"),
    ):
        with pytest.raises(RecordError, match=words):
            planned(cast("Path", found.out), **changed)


@pytest.mark.parametrize("budget", [{"runs": 1}, {"runs": 20}])
def test_a_rate_at_which_nothing_ends_is_one_sentence(
    budget: dict[str, int], tmp_path: Path
) -> None:
    broken = {"optimizer": {"name": "sgd", "lr": 1e28}}
    with pytest.raises(TrainingError, match="no training of the plan ended with a finite loss"):
        planned(tmp_path / "broken", **broken, **budget)


def test_a_loss_of_the_users_own_is_that_of_the_short_runs(tmp_path: Path) -> None:
    def twice(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.cross_entropy(output, targets)

    plan = planned(tmp_path / "own", loss=twice, runs=2)
    assert plan.shown.name == "loss"
    run = next((tmp_path / "own").rglob("epochs.jsonl")).parent
    assert regimes.load(run).header["data"]["loss"].endswith("twice")


def test_a_method_alone_with_too_few_minutes_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"minutes = 0.0001: expected .* or more"):
        planned(tmp_path / "alone", methods=["dense"], runs=None, minutes=1e-4)


def test_prices_that_were_too_high_are_renewed(
    found: regimes.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call at a quieter time: no training is repeated, and the training's length is that
    of the new price."""
    shutil.copytree(found.out, tmp_path / "quiet")  # type: ignore[type-var]
    local = "dense, every 4 steps"
    price = found.known.prices[local]

    def quiet(*given: Any) -> tuple[int, dict[str, Price], float]:
        prices = {**found.known.prices, local: replace(price, seconds=price.seconds / 2)}
        return found_per_epoch, prices, 4.0

    found_per_epoch = 2
    monkeypatch.setattr("regimes.search.plans.priced.price_methods", quiet)
    again = planned(tmp_path / "quiet")
    assert again.known.losses.items() >= found.known.losses.items()
    steps = (plan.table.set_index("method")["steps"] for plan in (again, found))
    now, before = ({**each} for each in steps)
    assert now == {**before, local: pytest.approx(2 * before[local], abs=1)}
    assert "Half of the timed steps took 5.0 times as long as the fastest" in again.sentence()


def test_computing_is_timed_once_for_all_and_the_fastest_step_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine where each seventh step alone is not slowed down by another load."""
    turns = itertools.count()

    def seconds(action: Callable[[], None], device: torch.device) -> float:
        action()
        return 1.0 if next(turns) % 7 == 0 else 5.0

    monkeypatch.setattr(measure, "_seconds", seconds)
    texts = ("dense", "cast:fp16", "powersgd:2", "powersgd:1", "acp-sgd:1", "dense/8")
    methods = [parse_method(text) for text in texts]
    _, prices, unrest = price_methods(get_preset("smoke"), methods, job(Network(1e18)))
    assert unrest == 4.0
    kinds = {"acp-sgd 1": 1 / 2}  # of its two kinds of steps each is timed
    for method in methods:
        compress = kinds.get(method.label, 1.0) / method.period
        assert prices[method.label].here == pytest.approx(4 + compress)
        assert prices[method.label].seconds == pytest.approx(1 + compress, rel=1e-3)


@hypothesis.given(data=st.data())
def test_a_damaged_log_is_one_sentence(data: st.DataObject, found: regimes.Plan) -> None:
    """Another value at any place of any line; what is no number is never taken for one."""
    assert found.out is not None
    log = [json.loads(line) for line in (found.out / LOG).read_text().splitlines()]
    number = data.draw(st.integers(0, len(log) - 1))
    at = data.draw(st.sampled_from([*places(log[number])]))
    changed = [*log[:number], with_odd(log[number], at, data.draw(odd)), *log[number + 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, LOG).write_text("".join(json.dumps(each) + "\n" for each in changed))
        with contextlib.suppress(RecordError):
            for each in read_log(Path(folder), decode_probes).rounds:
                prices = read_prices(each.facts) if "prices" in each.facts else {}
                assert all(price.seconds > 0 for price in prices.values())


@pytest.mark.parametrize("value", [None, True, "7", -1, -1e300, 10**400, []], ids=str)
def test_a_damaged_log_names_its_line(value: Any, found: regimes.Plan, tmp_path: Path) -> None:
    assert found.out is not None
    log = [json.loads(line) for line in (found.out / LOG).read_text().splitlines()]
    probe, price = ("facts", "probes", 0), ("facts", "prices", "dense", 0)
    for line, at in ((1, (*probe, 1)), (1, (*probe, 3)), (1, price), (2, ("seconds",))):
        changed = [*log]
        changed[line - 1] = with_odd(log[line - 1], at, value)
        (tmp_path / LOG).write_text("".join(json.dumps(each) + "\n" for each in changed))
        with pytest.raises(RecordError, match=f"{LOG}, line {line} is damaged"):
            read_log(tmp_path, decode_probes)


def test_a_smaller_model_stands_for_the_larger_one(tmp_path: Path, found: regimes.Plan) -> None:
    """Oracles: the bytes of the larger model, which is not trained; the shapes in the records."""
    torch.manual_seed(0)
    plan = planned(tmp_path / "small", probe=lambda: small_net(), runs=6)
    table = plan.table.set_index("method")
    assert table["mb"]["dense"] == pytest.approx(
        table["steps"]["dense"] * 4 * (8 * 16 + 16 + 16 * 3 + 3 + 1) / 1e6
    )
    run = next((tmp_path / "small").rglob("epochs.jsonl")).parent
    assert regimes.load(run).header["layers"][0]["shape"] == [4, 8]
    assert table["loss"].isna().all()  # of the larger one nothing was trained
    assert {*table["rate"]} == {plan.config.optimizer.lr}
    assert "smaller model" in plan.sentence()
    again = planned(tmp_path / "small", probe=lambda: small_net(), runs=6)  # as in another process
    assert again.known.losses == plan.known.losses
    with pytest.raises(RecordError, match=r"layers|weights|model|shape"):
        planned(tmp_path / "small", probe=lambda: nn.Linear(8, 3))
    with pytest.raises(RecordError, match="holds a search with probe"):
        planned(tmp_path / "small")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"probe": {"model.width": 4}}, "a model for the same data"),
        ({"loss": 80.0}, "loss = 80.0: expected a function of the model's output"),
        ({"link": None}, "one of the two"),
        ({"link": "fast"}, "expected the form 10Gbit/s,50us"),
        ({"methods": ["powersgd"]}, "a level is missing"),
        ({"methods": []}, r"methods = \[\]: expected one or more"),
        ({"methods": ["dense/4", "topk:1", "dense/4"]}, "expected dense, every 4 steps once"),
        ({"methods": ["topk:1", "topk:1/1"]}, "expected topk 1 once"),
        ({"runs": None, "minutes": math.inf}, "above 0, and finite"),
        ({"gpus": 3}, "a number that divides the 2 workers"),
        ({"step": 0.0}, "a duration above 0"),
        ({"step": "4 metres"}, "a duration above 0"),
        ({"seconds": 1e-4}, "and a training has 16 or more"),
        ({"seconds": None, "epochs": 1}, "and a training has 16 or more"),
        ({"methods": "dense/4"}, "expected a list, each a text"),
        ({"workers": 1}, "2 or more: one exchanges nothing"),
        ({"batch_size": 100}, "too few for one step of 2 workers x 100"),
        (
            {"runs": None, "minutes": 1e-4},
            "or more, which short runs of 16 steps need here and now .2 methods",
        ),
        ({"epoch": 3}, "no argument of a training"),
    ],
)
def test_wrong_use_is_one_sentence(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        planned(tmp_path / "wrong", **changed)
    assert not (tmp_path / "wrong" / LOG).exists()


@pytest.mark.parametrize("text", ["dense", "powersgd:2", "dense/8", "quantised-all-reduce:4/8"])
def test_the_lines_of_a_script_are_calls_that_there_are(
    found: regimes.Plan, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the signatures, to which the words are bound."""
    called = {}
    for name in ("attach", "local_steps"):
        real = inspect.signature(getattr(regimes, name))

        def bound(*args: Any, name: str = name, real: Any = real, **options: Any) -> None:
            called[name] = real.bind(*args, **options).arguments

        monkeypatch.setattr(regimes, name, bound)
    method = parse_method(text)
    lines = replace(found, methods=dict.fromkeys(found.methods, method)).hook()
    exec(lines, {"regimes": regimes, "model": "model", "optimizer": "optimizer"})
    assert "adamw, learning rate" in lines
    assert "2 workers x 32" in lines
    if method.period > 1:
        assert "job.step()" in lines
        assert called["local_steps"]["policy"] == method.period
        sent = called["local_steps"].get("compressor")
        assert (sent.level if sent else "dense") == method.level
        assert called["local_steps"]["optimizer"] == "optimizer"
    elif method.level != "dense":
        sent = called["attach"]["compressor"]
        assert sent.level == method.level
        assert sent.with_level(None) == make_compressor(dict(method.table))
    else:
        assert not called


@pytest.mark.parametrize("schedule", ["step", "cosine", "wsd", "cyclic"])
def test_a_training_in_steps_has_the_rates_of_its_epochs(schedule: str) -> None:
    """At the first step of each epoch, where the rate of an epoch is taken; with steps of the rate
    throughout."""
    decays = {"decay_epochs": [6, 9]} if schedule == "step" else {}
    cycles = {"cycle_epochs": 4} if schedule == "cyclic" else {}
    fields = {"schedule": schedule, "warmup_from": 0.1, "warmup_epochs": 2, **decays, **cycles}
    config = override_fields(RunConfig(epochs=12), {"optimizer": fields})
    per_epoch = 7
    other = in_steps(config, per_epoch)
    before = LearningRate(config.optimizer, per_epoch, 12 * per_epoch)
    after = LearningRate(other.optimizer, per_epoch, other.steps or 0)
    for epoch in range(12):
        assert after(epoch * per_epoch) == pytest.approx(before(epoch * per_epoch))
    half = configure_probe(other, parse_method("dense"), 6 * per_epoch, 1.0, 3)
    cut = LearningRate(half.optimizer, per_epoch, half.steps or 0)
    for epoch in range(0, 12, 2):
        assert cut(epoch * per_epoch // 2) == pytest.approx(2 * before(epoch * per_epoch), rel=0.12)


def test_decays_that_fall_on_one_step_are_both_counted_in_steps() -> None:
    fields = {"schedule": "step", "per": "step", "decay_epochs": [2, 2, 3], "decay_steps": [24]}
    config = override_fields(RunConfig(epochs=4), {"optimizer": fields})
    before = LearningRate(config.optimizer, 12, 48)
    after = LearningRate(in_steps(config, 12).optimizer, 12, 48)
    assert [after(step) for step in range(48)] == [before(step) for step in range(48)]
    assert after(24) == pytest.approx(config.optimizer.lr / 10**3)


def test_a_probe_is_the_configuration_by_its_method() -> None:
    config = in_steps(RunConfig(), 10)
    made = configure_probe(config, parse_method("quantised-all-reduce:4/8"), 40, 0.0, 5)
    assert made.compressor == {"name": "quantised-all-reduce"}
    assert made.levels == {"sent": 4}
    assert made.sync_levels == {"sent": 8}
    assert (made.steps, made.unit_steps, made.seed) == (40, 40, 5)
    plain = configure_probe(config, parse_method("dense"), 40, 0.0, 5)
    assert plain.sync_policy is None
    assert plain.policy == {"name": "static", "level": "dense"}
