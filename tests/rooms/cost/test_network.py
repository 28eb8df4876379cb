"""The cost model: closed forms, simulated schedules, records, and the printed tables."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regimes.base.config import override
from regimes.base.errors import ConfigError, RecordError
from regimes.cost import cases as cost_cases
from regimes.cost import measure
from regimes.cost.cases import make_cases, measure_cases, per_sample, recorded_work
from regimes.cost.network import (
    ALGORITHMS,
    BACKWARD,
    Network,
    Work,
    break_even,
    collective_seconds,
    format_bandwidth,
    mean_step,
)
from regimes.cost.predict import main, predict_seconds
from regimes.cost.recorded import tabulate_alternatives
from regimes.presets import get_preset
from regimes.records import Record, load_all

KINDS = ("mean", "gather", "broadcast")
SMALL = Path(__file__).parents[3] / "data/reference/small.tar.xz"
TEN = Network(1e10, 50e-6)

positive = st.floats(1e-6, 10)
sizes = st.floats(1, 1e9)
networks = st.builds(Network, st.floats(1e5, 1e12), st.floats(0, 1e-2))
names = st.sampled_from(sorted(ALGORITHMS))


@st.composite
def works(draw: st.DrawFn) -> Work:
    calls = {kind: float(draw(st.integers(1, 4))) for kind in KINDS}
    return Work(draw(positive), draw(positive), calls, {kind: draw(sizes) for kind in KINDS})


# -- closed form: one collective -------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_talks_to_nobody(algorithm: str, kind: str) -> None:
    assert collective_seconds(kind, 1e6, TEN, 1, algorithm) == 0


@pytest.mark.parametrize(
    ("algorithm", "kind", "workers", "hops", "copies"),
    [
        ("ring", "mean", 4, 6, 1.5),
        ("ring", "gather", 4, 3, 3),
        ("ring", "broadcast", 5, 3, 3),
        ("ring", "exchange", 4, 1, 1),
        ("gloo", "exchange", 4, 1, 1),
        ("tree", "mean", 5, 6, 2),
        ("tree", "gather", 8, 3, 7),
        ("tree", "broadcast", 8, 3, 1),
        ("tree", "exchange", 4, 1, 1),
    ],
)
def test_latency_and_bandwidth_terms(
    algorithm: str, kind: str, workers: int, hops: int, copies: float
) -> None:
    expected = hops * 50e-6 + copies * 8 * 1e6 / 1e10
    assert collective_seconds(kind, 1e6, TEN, workers, algorithm) == pytest.approx(expected)


def test_arrays_broadcast_over_bandwidths_and_workers() -> None:
    bandwidths, workers = np.array([1e8, 1e9])[:, None], np.array([1.0, 2.0, 1024.0])
    grid = collective_seconds("mean", 1e6, Network(bandwidths, 1e-4), workers)
    assert isinstance(grid, np.ndarray)
    assert grid.shape == (2, 3)
    assert grid[1, 2] == collective_seconds("mean", 1e6, Network(1e9, 1e-4), 1024)
    assert (grid[:, 0] == 0).all()


# -- simulation of the schedule --------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(3, 64), st.floats(1e-6, 1e-1), st.floats(0, 1e-1), st.sampled_from([1, 2]))
def test_segments_in_flight(workers: int, message: float, latency: float, segments: int) -> None:
    """A node sends its next segment once the one ``segments`` before it has come in (gloo's ring);
    the formula leaves out only how the last two overlap, the smaller of latency and segment."""
    hops, each = workers - 1, message / segments
    free, arrived = 0.0, [0.0] * segments
    for i in range(hops * segments):
        free = max(free, arrived[i]) + each
        arrived.append(free + latency)
    network = Network(8 * 1.0, latency)  # one byte per second
    algorithm = {1: "ring", 2: "gloo"}[segments]
    formula = collective_seconds("gather", message, network, workers, algorithm)
    left_out = min(each, latency) if segments == 2 else 0.0
    assert arrived[-1] - left_out == pytest.approx(float(formula))


@pytest.mark.parametrize(("kind", "parts"), [("gather", 2), ("exchange", 1)])
def test_two_workers_of_gloo_say_behind_a_message_that_they_are_ready(
    kind: str, parts: int
) -> None:
    """One connection, a queue in each direction. The first worker says at once that it is ready for
    all parts; the second, a moment later, posts each part, and behind it says that it is ready for
    one of the other's."""
    message, at = 6.0, 0.0  # seconds of it, and of the second worker's queue
    free = 0.0
    for _ in range(parts):
        at += message / parts
        free = max(free, at) + message / parts  # the first worker sends the part now
    found = collective_seconds(kind, message, Network(8.0), 2, "gloo")
    assert found == pytest.approx(free)
    # all bytes of both are on their way at once where the two are ready before they post
    assert collective_seconds(kind, message, Network(8.0), 2, "ring") == message
    assert collective_seconds("mean", message, Network(8.0), 2, "gloo") == message


@settings(deadline=None)
@given(works(), networks, st.integers(2, 100), st.integers(1, 32), names)
def test_overlap_is_a_pipeline_of_two_stages(
    work: Work, network: Network, workers: int, buckets: int, algorithm: str
) -> None:
    gradient = (BACKWARD * work.compute + work.compress) / buckets
    sending = float(work.communicate(network, workers, algorithm, buckets)) / buckets
    ready = done = 0.0
    for _ in range(buckets):
        ready += gradient
        done = max(done, ready) + sending
    seconds = work.seconds(network, workers, algorithm, buckets)
    assert (1 - BACKWARD) * work.compute + done == pytest.approx(float(seconds))


def test_broadcasts_are_not_cut_into_buckets() -> None:
    """Twice a step a mean of 3 MB, in thirds; every other step a broadcast of 20 kB, whole."""
    work = Work(0.0, 0.0, {"mean": 2.0, "broadcast": 0.5}, {"mean": 6e6, "broadcast": 1e4})
    mean = 6 * collective_seconds("mean", 1e6, TEN, 4)
    broadcast = 0.5 * collective_seconds("broadcast", 2e4, TEN, 4)
    assert work.communicate(TEN, 4, "ring", 3) == pytest.approx(mean + broadcast)


# -- what must hold for any network ----------------------------------------------------------


@settings(deadline=None)
@given(works(), networks, st.floats(1.01, 100), st.integers(2, 5000), names, st.integers(1, 8))
def test_a_faster_network_is_faster(
    work: Work, network: Network, factor: float, workers: int, algorithm: str, buckets: int
) -> None:
    how = (workers, algorithm, buckets)
    faster = Network(factor * network.bandwidth, network.latency / factor)
    before, after = (float(work.seconds(n, *how)) for n in (network, faster))
    assert after < before
    assert after >= work.compute + work.compress or buckets > 1


@settings(deadline=None)
@given(works(), networks, st.integers(2, 5000), st.integers(2, 16))
def test_overlap_gains_at_most_the_shorter_stage(
    work: Work, network: Network, workers: int, buckets: int
) -> None:
    free = Network(network.bandwidth, 0.0)
    apart = float(work.seconds(free, workers))
    piped = float(work.seconds(free, workers, buckets=buckets))
    shorter = min(BACKWARD * work.compute + work.compress, float(work.communicate(free, workers)))
    assert apart - shorter <= piped * (1 + 1e-12)
    assert piped < apart


@settings(deadline=None)
@given(works(), networks, st.integers(2, 64), names, st.floats(0.5, 100))
def test_many_steps_as_one(
    work: Work, network: Network, workers: int, algorithm: str, steps: float
) -> None:
    whole = (work * steps).seconds(network, workers, algorithm, 4)
    assert whole == pytest.approx(steps * float(work.seconds(network, workers, algorithm, 4)))
    same = mean_step([(steps, work), (1.0, work)])
    assert same.seconds(network, workers) == pytest.approx(float(work.seconds(network, workers)))


# -- where compression pays ------------------------------------------------------------------


def pair(compress: float, size: float, calls: float = 1.0) -> tuple[Work, Work]:
    dense = Work(0.01, 0.0, {"mean": 1.0}, {"mean": 1e6})
    return Work(0.01, compress, {"mean": calls}, {"mean": size}), dense


@settings(deadline=None)
@given(st.floats(1e-5, 1e-1), st.floats(1, 9e5), st.integers(1, 4), st.floats(0, 1e-3))
def test_break_even_in_closed_form(
    compress: float, size: float, calls: int, latency: float
) -> None:
    work, dense = pair(compress, size, calls)
    expected = 8 * 1.5 * (1e6 - size) / (compress + 6 * latency * (calls - 1))
    assert break_even(work, dense, latency, 4) == pytest.approx(expected, rel=1e-6)


@settings(deadline=None)
@given(works(), works(), st.floats(0, 1e-3), st.integers(2, 64), names, st.integers(1, 8))
def test_at_break_even_both_take_equally_long(
    work: Work, dense: Work, latency: float, workers: int, algorithm: str, buckets: int
) -> None:
    at = break_even(work, dense, latency, workers, algorithm, buckets)
    how = (workers, algorithm, buckets)
    if 0 < at < math.inf:
        ours, theirs = (float(w.seconds(Network(at, latency), *how)) for w in (work, dense))
        assert ours == pytest.approx(theirs, rel=1e-6)
    slow = Network(np.array([at / 2, at / 10]) if 0 < at < math.inf else 1e6, latency)
    gain = np.asarray(dense.seconds(slow, *how)) - np.asarray(work.seconds(slow, *how))
    if at == 0:
        far = Network(1.0, latency)
        assert work.seconds(far, *how) >= dense.seconds(far, *how) * (1 - 1e-8)
    else:
        assert (gain > -1e-8 * np.asarray(dense.seconds(slow, *how))).all()


# -- reading and spelling --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("10Gbit/s,50us", 1e10, 50e-6),
        ("10 Gbit/s, 50 µs", 1e10, 50e-6),
        ("1.5Mbps,2ms", 1.5e6, 2e-3),
        ("100 kbit/s", 1e5, 0),
        ("1e9bit/s,0s", 1e9, 0),
    ],
)
def test_parse(text: str, bandwidth: float, latency: float) -> None:
    network = Network.parse(text)
    assert (network.bandwidth, network.latency) == pytest.approx((bandwidth, latency))
    again = Network.parse(str(network))
    assert (again.bandwidth, again.latency) == pytest.approx((bandwidth, latency))


WRONG = ("", "fast", "10GB/s,50us", "10Gbit/s,50", "-1Gbit/s", "0Gbit/s", "10Gbit/s,-1us")


@pytest.mark.parametrize("text", [*WRONG, "1.2.3Gbit/s", "10Gbit/s,50us,7", "1e999bit/s"])
def test_no_network(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected (the form 10Gbit/s,50us|[01] to \S+ \S+$)"):
        Network.parse(text)


def test_bad_arguments() -> None:
    work, _ = pair(0.0, 1.0)
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        collective_seconds("mean", 1.0, TEN, 4, "rings")
    with pytest.raises(ConfigError, match="unknown collective 'means'"):
        collective_seconds("means", 1.0, TEN, 4)
    with pytest.raises(ConfigError, match="workers = 0: expected at least 1"):
        work.seconds(TEN, 0)
    with pytest.raises(ConfigError, match="buckets = 0: expected at least 1"):
        work.seconds(TEN, 4, buckets=0)


def test_spelling() -> None:
    assert [format_bandwidth(b) for b in (0.0, 950.0, 999.9, 1e6, 999.6e6, 9.375e9, math.inf)] == [
        "none",
        "950 bit/s",
        "1 kbit/s",
        "1 Mbit/s",
        "1 Gbit/s",
        "9.38 Gbit/s",
        "any",
    ]


# -- a record's own numbers ------------------------------------------------------------------


@cache
def reference() -> list[Record]:
    return load_all(SMALL)


def chosen(*schedules: str) -> list[Record]:
    return [run for run in reference() if run.name in schedules]


def test_traffic_and_seconds_are_those_of_the_record() -> None:
    run = chosen("accordion")[0]
    epochs = recorded_work(run)
    sent = [steps * sum(work.bytes.values()) for steps, work in epochs]
    assert sent == pytest.approx(run.epochs["bytes"].tolist())
    compress = [steps * work.compress for steps, work in epochs]  # a union pass compresses once
    assert compress == pytest.approx(run.epochs["seconds_compress"].tolist())
    middle = (run.epochs["seconds_compute"] / run.epochs["steps"] / 4).median()  # of 4 workers
    assert epochs[0][1].compute == pytest.approx(middle)
    header = {**run.header, "world": {**run.header["world"], "union_pass": False}}
    apart = recorded_work(replace(run, header=header))
    assert apart[3][1].compress == pytest.approx(epochs[3][1].compress / 4)
    header = {**run.header, "world": {"workers": 4, "processes": 4, "union_pass": False}}
    real = recorded_work(replace(run, header=header))
    assert real[3][1].compute == pytest.approx(4 * epochs[3][1].compute)
    assert real[3][1].compress == pytest.approx(epochs[3][1].compress)


def test_levels_are_found_and_dense_is_derived() -> None:
    """Each level's bytes are its formula's (``per_step``) and what travels beside it: the loss, 4
    bytes, and once per epoch the buffers; a run without a dense epoch gives the same dense line."""
    run = chosen("accordion")[0]
    found = {case.name: case.work for case in make_cases([run])}
    assert list(found) == ["dense", "low (4)", "high (1)", "accordion"]
    other = {case.name: case.work for case in make_cases(chosen("dense"))}
    assert found["dense"].calls == pytest.approx(other["dense"].calls)
    assert found["dense"].bytes == pytest.approx(other["dense"].bytes)
    assert found["dense"].compress == 0
    for name, level in (("dense", "dense"), ("low (4)", "low"), ("high (1)", "high")):
        assert found[name].bytes["mean"] == pytest.approx(
            run.header["per_step"][level]["bytes"] + 4
        )
        assert found[name].bytes["broadcast"] == pytest.approx(1840 / 46)
    assert found["low (4)"].calls["mean"] == pytest.approx(2)
    assert other["dense"].calls["mean"] == pytest.approx(1)


def test_an_epoch_at_another_batch_size_says_nothing_of_a_level() -> None:
    """The last epochs are all high; with a larger batch in them there is no high line."""
    run = chosen("high")[0]
    assert [case.name for case in make_cases([run])] == ["dense", "high (1)", "high"]
    larger = 2 * run.config["batch_size"]
    run = replace(run, rows=[{**row, "batch_size": larger} for row in run.rows])
    assert [case.name for case in make_cases([run])] == ["dense", "high"]


def test_a_unit_computes_its_own_batch() -> None:
    """A batch policy doubles the batch in some units: their steps take twice as long; a unit
    without a batch size has the configuration's."""
    run = chosen("high")[0]
    usual = run.config["batch_size"]
    sizes = [(usual, 2 * usual, None)[i % 3] for i in range(len(run.rows))]
    rows = [{**row, "batch_size": size} for row, size in zip(run.rows, sizes, strict=True)]
    computed = [work.compute for _, work in recorded_work(replace(run, rows=rows), sample=0.5)]
    assert computed == [0.5 * (size or usual) for size in sizes]


@pytest.mark.parametrize("places", [[0, 1], [3], [22, 23]], ids=str)
def test_units_that_were_left_out_cost_nothing(places: list[int]) -> None:
    """A deletion pulse has rows without steps; the table is that of the other rows."""
    run = chosen("accordion")[0]
    nothing = {kind: dict.fromkeys(n, 0) for kind, n in run.rows[0]["collectives"].items()}
    left_out = {"steps": 0, "collectives": nothing}
    rows = [row | left_out if i in places else row for i, row in enumerate(run.rows)]
    kept = [row for i, row in enumerate(run.rows) if i not in places]
    clock = {epoch: times for epoch, times in run.clock.items() if epoch not in places}
    found = make_cases([replace(run, rows=rows, clock=run.clock)])
    assert found == make_cases([replace(run, rows=kept, clock=clock)])
    network = Network.parse("100Mbit/s,50us")
    table = tabulate_alternatives(replace(run, rows=rows), network)
    assert table.equals(tabulate_alternatives(replace(run, rows=kept, clock=clock), network))


def test_the_table_adds_up() -> None:
    runs = chosen("dense", "low", "high", "accordion", "high-in-critical")
    network = Network.parse("100Mbit/s,50us")
    table = predict_seconds(make_cases(runs), network, 4).set_index(["kind", "case"])
    whole = table["compute"] + table["compress"] + table["communicate"]
    assert table["seconds"].tolist() == pytest.approx(whole.tolist())
    assert table["epoch"].tolist() == pytest.approx((46 * table["seconds"]).tolist())
    assert table["compute"].tolist() == pytest.approx([16 * per_sample(runs)] * len(table))
    level, policy = table.loc["level"], table.loc["policy"]
    for static, name in (("dense", "dense"), ("low (4)", "low"), ("high (1)", "high")):
        assert policy.loc[name, "seconds"] == pytest.approx(level.loc[static, "seconds"])
    assert level.loc["dense", "speed_up"] == pytest.approx(1)
    assert 1 < policy.loc["high-in-critical", "speed_up"] < policy.loc["accordion", "speed_up"]
    low, high = policy.loc["low", "speed_up"], policy.loc["high", "speed_up"]
    assert low < policy.loc["accordion", "speed_up"] < high
    work = next(case.work for case in make_cases(runs) if case.name == "low (4)")
    ring = 2 * 6 * 50e-6 + 1.5 * 8 * work.bytes["mean"] / 1e8
    tree = work.calls["broadcast"] * 2 * 50e-6 + 2 * 8 * work.bytes["broadcast"] / 1e8
    assert level.loc["low (4)", "communicate"] == pytest.approx(ring + tree)


def test_more_workers_share_the_epoch() -> None:
    runs = chosen("low")
    steps = predict_seconds(make_cases(runs, 8), TEN, 8)["steps_per_epoch"]
    assert steps.tolist() == pytest.approx([23.0] * len(steps))


def test_records_that_cannot_be_costed() -> None:
    run = chosen("low")[0]
    with pytest.raises(RecordError, match="name at least one run"):
        make_cases([])
    with pytest.raises(RecordError, match="does not say where the time"):
        recorded_work(replace(run, clock={}))
    churn = {"present": 3, "worker_steps": 3 * run.rows[0]["steps"]}
    with pytest.raises(RecordError, match="had workers that were absent"):
        recorded_work(replace(run, rows=[{**row, "churn": churn} for row in run.rows]))
    other = replace(run, header={**run.header, "config": {**run.config, "batch_size": 8}})
    with pytest.raises(RecordError, match="differ in batch_size"):
        make_cases([run, other])


# -- a preset, measured ----------------------------------------------------------------------


@pytest.mark.parametrize("settings", [[], ["compressor=topk", "levels.low=10", "levels.high=1"]])
def test_a_timed_preset_sends_what_its_run_sends(tmp_path: Path, settings: list[str]) -> None:
    from regimes.training.loop import run

    config = override(
        get_preset("smoke/low-in-critical"),
        [
            *settings,
            "epochs=8",
            "data.train_size=64",
            "optimizer.decay_epochs=[]",
            "policy.windows=[[0,6]]",
        ],
    )
    timed = {case.name: case for case in measure_cases(config, 4, steps=2)}
    record = run(override(config, ["epochs=7"]), tmp_path / "run")
    real = {case.name: case for case in make_cases([record])}
    assert list(timed) == ["dense", *(n for n in real if "(" in n), "low-in-critical"]
    for name in (n for n in real if "(" in n or n == "dense"):
        assert timed[name].work.calls == pytest.approx(real[name].work.calls)
        assert timed[name].work.bytes == pytest.approx(real[name].work.bytes)
        assert timed[name].epochs[0][0] == 2  # 64 images / (4 x 8)
        assert timed[name].work.compute > 0
    low, high = (timed[n].work for n in real if "(" in n)
    both = mean_step([(6.0, low), (2.0, high)])
    assert timed["low-in-critical"].work.bytes == pytest.approx(both.bytes)


@pytest.mark.parametrize("unit", [1, 3, 6])
def test_buffers_are_sent_once_a_unit(tmp_path: Path, unit: int) -> None:
    from regimes.training.loop import run

    changes = ["data.train_size=96", "steps=6", "optimizer.decay_epochs=[]", f"unit_steps={unit}"]
    config = override(get_preset("smoke/low"), changes)  # an epoch has three steps
    timed, real = measure_cases(config, 4, steps=1), make_cases([run(config, tmp_path)])
    calls = [{case.name: case.work.calls["broadcast"] for case in both} for both in (timed, real)]
    assert calls[0]["dense"] == calls[1]["dense"] == pytest.approx(2 / unit)  # two dtypes


@pytest.mark.parametrize(
    ("unit", "total"), [(3, 5), (5, 5), (8, 5)], ids=["shorter last unit", "unit > epoch", "one"]
)
def test_a_policy_of_one_level_has_the_numbers_of_the_level(
    tmp_path: Path, unit: int, total: int
) -> None:
    """Timed, and of a record: whatever part of an epoch (of two steps) its units are."""
    from regimes.training.loop import run

    config = override(
        get_preset("smoke"),
        [
            "policy={name='static',level='low'}",
            "data.train_size=64",
            "optimizer.decay_epochs=[]",
            f"steps={total}",
            f"unit_steps={unit}",
        ],
    )
    for cases in (measure_cases(config, 4, steps=1), make_cases([run(config, tmp_path)])):
        table = predict_seconds(cases, Network.parse("100Mbit/s,50us"), 4).set_index("kind")
        level = table[table["case"].str.startswith("low")].loc["level"]
        policy = table.loc["policy"]
        for column in ("steps_per_epoch", "seconds", "epoch", "speed_up", "break_even"):
            assert policy[column] == pytest.approx(level[column]), column


@pytest.mark.parametrize("where", [slice(None), slice(0, 5), slice(5, None)], ids=str)
def test_a_larger_batch_is_compared_over_the_same_samples(where: slice) -> None:
    """Half as many steps of twice the batch: where nothing but products takes time, dense takes
    as long."""
    run = chosen("high")[0]
    for row in run.rows:
        assert row["unit"]["stop"] - row["unit"]["first"] == row["steps"] == 46
    larger = {"steps": 23, "batch_size": 2 * run.config["batch_size"]}
    changed = range(len(run.rows))[where]
    rows = [row | larger if i in changed else row for i, row in enumerate(run.rows)]
    clock = {epoch: {**times, "compress": 0.0} for epoch, times in run.clock.items()}
    found = make_cases([replace(run, rows=rows, clock=clock)])
    table = predict_seconds(found, Network(1e18), 4)
    assert table["speed_up"].tolist() == pytest.approx([1.0] * len(table))


def test_the_command_times_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    config = override(get_preset("smoke/low-in-critical"), ["data.train_size=64", "epochs=2"])
    frame = main([], config, TEN, None, steps=1)
    assert {"dense", "low-in-critical"} <= set(frame["case"])
    assert (frame["compute"] > 0).all()
    assert "4 workers, 10 Gbit/s" in capsys.readouterr().out


def test_the_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def action() -> None:
        calls.append(1)
        now[0] += 100.0 if len(calls) == 1 else 2.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    assert measure.median_seconds(action, 1, torch.device("cpu")) == 2.0
    assert len(calls) == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    file = tmp_path / "new" / "cost.csv"
    frame = main([str(SMALL)], None, TEN, None, csv=file)
    printed = capsys.readouterr().out
    assert "4 workers, 10 Gbit/s, 50 µs, ring" in printed
    assert max(map(len, printed.splitlines())) <= 80
    pd.testing.assert_frame_equal(pd.read_csv(file), frame, check_dtype=False)
    with pytest.raises(RecordError, match="cannot write"):
        main([str(SMALL)], None, TEN, 2, csv=file / "below")


# -- the study -------------------------------------------------------------------------------


def test_the_figure_and_its_curves(tmp_path: Path) -> None:
    from analysis.cost.cost import figure_cost
    from regimes.plotting.style import save

    fig, numbers = figure_cost(reference(), Network.parse("1Gbit/s,50us"))
    marks = numbers["panel"] == "break-even"
    shown = numbers[~marks]
    ends = ["ci_low", "ci_high"]
    assert shown.drop(columns=ends).notna().all(axis=None)
    alike = shown["case"].isin(["dense", "low", "high"])  # all seeds send as much
    assert shown.loc[~alike, ends].notna().all(axis=None)
    assert shown.loc[shown["case"] == "dense", ends].isna().all(axis=None)
    lines = numbers[numbers["panel"] == "bandwidth"].pivot(
        index="x", columns="case", values="speed_up"
    )
    assert np.allclose(lines["dense"], 1)
    table = predict_seconds(make_cases(reference()), Network.parse("1Gbit/s,50us"), 4)
    at = table[table["kind"] == "policy"].set_index("case").loc["accordion"]
    gigabit = np.interp(9, np.log10(lines.index), lines["accordion"])
    assert gigabit == pytest.approx(at["speed_up"], rel=3e-3)  # a mean of ratios, a ratio of means
    crossing = np.interp(np.log10(at["break_even"]), np.log10(lines.index), lines["accordion"])
    assert crossing == pytest.approx(1, abs=0.01)
    many = numbers[(numbers["panel"] == "workers") & (numbers["x"] == 4096)]
    assert len(many) == 4
    assert all(path.stat().st_size > 1000 for path in save(fig, tmp_path / "cost", numbers))


def test_runs_of_unequal_length_are_each_one_of_the_curve() -> None:
    """A budget of floats, for example, ends the seeds of a schedule after different epochs."""
    from analysis.cost.cost import curves

    known = {(run.name, run.seed): run for run in reference()}
    names = ("dense", 1000), ("accordion", 1000), ("accordion", 1001)
    dense, first, second = (known[name] for name in names)
    runs = [dense, replace(first, rows=first.rows[:5]), replace(second, rows=second.rows[-4:])]
    cases = {case.name: case for case in make_cases(runs) if case.runs}
    case, network = cases["accordion"], Network.parse("1Gbit/s,50us")
    numbers = curves(make_cases(runs), network, 4).query("case == 'accordion'")
    at = numbers[numbers["panel"] == "workers"].set_index("x").loc[4]
    each = [
        sum(n * work.seconds(network, 4) for n, work in part) / sum(n for n, _ in part)
        for part in (case.epochs[:5], case.epochs[5:])
    ]
    assert (case.runs, len(case.epochs), at["n"]) == (2, 9, 2)
    assert at["seconds"] == pytest.approx(np.mean(each), rel=1e-12)
    assert at["speed_up"] == pytest.approx(np.mean(at["dense"] / np.array(each)), rel=1e-12)


@pytest.mark.parametrize(("compress", "latency"), [(0.0, "0us"), (1e-9, "50us"), (1e9, "50us")])
def test_the_title_has_every_schedule_that_becomes_faster(compress: float, latency: str) -> None:
    """Also one that is so at any bandwidth, or beyond the axis (oracle: the table)."""
    from analysis.cost.cost import figure_cost

    runs = [run for run in reference() if run.seed == 1000]
    for i, run in enumerate(runs):
        if run.name != "dense":
            clock = {e: {**spent, "compress": compress} for e, spent in run.clock.items()}
            runs[i] = replace(run, clock=clock)
    network = Network.parse(f"1Gbit/s,{latency}")
    table = predict_seconds(make_cases(runs), network, 4).set_index(["kind", "case"])["break_even"]
    title = " ".join(figure_cost(runs, network)[0].legends[0].get_title().get_text().split())
    low = table["policy", "low"]
    assert (title.startswith("No schedule is faster than dense at 1 Mbit/s or")) == (low == 0)
    assert ("low compression at any bandwidth" in title) == math.isinf(low)
    assert (f"low compression below {format_bandwidth(low)}" in title) == (0 < low < math.inf)


def test_the_printed_times() -> None:
    from analysis.paper.paper_times import compare

    rows = compare().set_index(["table", "model"])
    assert len(rows) == 18
    # Table 1: rank 2 / rank 1, 2418.4 / 1350.4 M floats, 3509 / 3386 s; a mean, so 1.5 copies.
    model = 1.5 * 8 * 4 * (2418.4e6 - 1350.4e6) / 1e10
    assert rows.loc[(1, "resnet18"), "explained"] == pytest.approx(model / (3509 - 3386))
    # Table 3: a gather, counted once per worker: 2626.1 / 262.8 G floats, 33672 / 7957 s.
    model = 3 * 8 * 4 * (2626.1e9 - 262.8e9) / 4 / 1e10
    assert rows.loc[(3, "resnet18"), "explained"] == pytest.approx(model / (33672 - 7957))
    assert rows.loc[(3, "resnet18"), "printed"] == pytest.approx(33672 / 9356)


# -- the benchmark's nodes -------------------------------------------------------------------


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def _may_make_namespaces() -> bool:
    if not shutil.which("ip") or os.geteuid() != 0:
        return False
    name = f"regimes-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


@pytest.mark.skipif(not _may_make_namespaces(), reason="needs root, iproute2 and namespaces")
def test_nothing_is_left_after_an_interrupt() -> None:
    from benchmarks.nodes import islands, limit_trunk

    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout

    def interrupted() -> None:
        with islands() as (names, hubs):
            limit_trunk(hubs, 20)
            assert all(name in _namespaces() for name in (*names, *hubs))
            shown = subprocess.run(["tc", "-n", hubs[1], "qdisc"], capture_output=True, text=True)
            assert "rate 20Mbit" in shown.stdout
            limit_trunk(hubs, None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert f"regimes-bench-{os.getpid()}" not in _namespaces()
    assert subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout == links


# -- local steps -----------------------------------------------------------------------------


@given(works(), networks, st.integers(2, 64))
def test_a_round_is_so_many_steps_and_one_exchange(work: Work, network: Network, h: int) -> None:
    """Nothing overlaps: H computations, then one compression and its collectives."""
    once = work.compress + float(work.communicate(network, 4))
    whole = h * float(work.every(h).seconds(network, 4, buckets=3))
    assert whole == pytest.approx(h * work.compute + once, rel=1e-9)
    assert work.every(1) == work


@given(works(), networks, st.integers(2, 64), st.permutations([True, False, True]))
def test_a_mean_over_local_and_shared_steps_overlaps_nothing(
    work: Work, network: Network, h: int, local: list[bool]
) -> None:
    steps = [(1.0, work.every(h) if apart else work) for apart in local]
    both = mean_step(steps)
    serial = both.compute + both.compress + float(both.communicate(network, 4))
    assert float(both.seconds(network, 4, buckets=3)) == pytest.approx(serial, rel=1e-9)
    assert not both.overlaps
    assert mean_step([(1.0, work), (2.0, work)]).overlaps == work.overlaps


def test_the_plan_of_local_steps_follows_the_rate() -> None:
    """A period of 2 until the rate has fallen to a quarter, then 16 times as long."""
    config = override(
        get_preset("smoke"),
        [
            "policy={name='static',level='high'}",
            "sync_policy={name='qsr',alpha=0.4,base=1}",
            "optimizer.schedule=step",
            "optimizer.decay_epochs=[2]",
            "optimizer.decay_factor=4",
            "optimizer.lr=0.4",
            "epochs=4",
            "optimizer.warmup_from=0.4",
        ],
    )
    plan = cost_cases.plan_units(config, 10)
    assert plan == [(10, "high", 1), (10, "high", 1), (10, "high", 16), (10, "high", 16)]
    measured = override(config, ["sync_policy={name='accordion'}", "sync_levels={low=1,high=9}"])
    assert cost_cases.plan_units(measured, 10) is None


@pytest.mark.parametrize(
    ("policy", "levels"),
    [
        ("{name='by-layer',groups={'a*'={name='static',level='dense'}}}", None),
        ("{name='by-layer',groups={'a* b'={name='static',level='high'}}}", ["high"] * 3),
        ("{name='windows',layers={b=[[1,2]]}}", None),
        ("{name='windows',windows=[[1,2]]}", ["high", "low", "high"]),
    ],
)
def test_a_plan_has_one_level_for_all_layers(policy: str, levels: list[str] | None) -> None:
    config = override(get_preset("smoke"), [f"policy={policy}", "epochs=3"])
    plan = cost_cases.plan_units(config, 10, ["a.0", "b"])
    assert (plan and [level for _, level, _ in plan]) == levels
