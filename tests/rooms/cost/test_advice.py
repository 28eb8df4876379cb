"""Which method `regimes cost --model` advises (oracles: properties over links; sums by hand)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regimes.base.errors import ConfigError
from regimes.cost.advice import (
    find_thresholds,
    list_candidates,
    recommend_method,
    seconds_to_a_loss,
    tabulate_clocks,
    write_advice,
)
from regimes.cost.from_model import make_job
from regimes.cost.methods import method_work, parse_method, tabulate_methods, usual_methods
from regimes.cost.network import Network
from regimes.cost.nodes import DEVICES, DataParallelJob
from regimes.cost.options import JobOptions

SMALL = 'item = "token"\n[[layers]]\nname = "block.{}"\nshape = [192, 768]\ntimes = 12\n'
JOBS = {
    "eight devices in a node": JobOptions("gpt2-124m", items=8192, nodes=4, gpus=8),
    "a small model on processors": JobOptions("small.toml", step="0.16s", nodes=2, gpus=1),
    "one node": JobOptions("vit-b", step="0.1s", nodes=1, gpus=8),
    "half precision": JobOptions("gpt2-124m", step="0.3s", nodes=16, gpus=1, dtype="bfloat16"),
}
STEP = 1.05


@pytest.fixture(autouse=True)
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)


def on(planned: DataParallelJob, bandwidth: float, latency: float) -> DataParallelJob:
    link = Network(bandwidth, latency)
    slow = "between" if planned.nodes > 1 else "within"
    return replace(planned, **{slow: link})


@pytest.mark.parametrize("name", JOBS)
def test_a_small_change_of_the_link_changes_the_advice_by_one_neighbour(name: str) -> None:
    """Bandwidth in steps of 5 % at each latency, and latency in such steps at each bandwidth."""
    planned = make_job(JOBS[name])
    steps = list_candidates(planned, usual_methods(planned))
    labels = [method.label for method, _ in steps]
    bandwidths = [float(x) for x in 1e6 * STEP ** np.arange(250)]
    places = []
    for latency in 1e-5 * STEP ** np.arange(160):
        limits = find_thresholds(on(planned, 1e9, float(latency)), steps)
        places.append([labels.index(recommend_method(steps, limits, b).label) for b in bandwidths])
    grid = np.array(places)
    by_bandwidth, by_latency = np.diff(grid, axis=1), np.diff(grid, axis=0)
    assert set(np.unique(grid)) > {0}, "the walk changes the advice"
    assert (by_bandwidth <= 0).all(), "a faster link never advises to send less"
    assert by_bandwidth.min() >= -1
    assert np.abs(by_latency).max() <= 1


@pytest.mark.parametrize("name", JOBS)
def test_what_is_recommended_is_never_slower_to_a_loss_than_dense(
    name: str,
) -> None:
    planned = make_job(JOBS[name])
    every = [
        *usual_methods(planned),
        *map(parse_method, ("powersgd:2", "topk:0.1", "dense/64", "randomk:1")),
    ]
    steps = list_candidates(planned, every)
    assert all(method.clock_number for method, _ in steps)
    for latency in (1e-6, 1e-3, 2.5e-2):
        limits = find_thresholds(on(planned, 1e9, latency), steps)
        for bandwidth in 1e7 * STEP ** np.arange(200):
            here = on(planned, float(bandwidth), latency)
            chosen = recommend_method(steps, limits, float(bandwidth))
            (own,) = [pair for pair in steps if pair[0] is chosen]
            own, dense = (seconds_to_a_loss(here, *pair)(bandwidth) for pair in (own, steps[0]))
            assert own <= dense


def test_the_advice_names_where_the_clock_was_measured_and_how_far_that_is() -> None:
    planned = on(make_job(JOBS["half precision"]), 1e8, 5e-5)
    methods = usual_methods(planned)
    said = write_advice(planned, methods, tabulate_methods(planned, methods))
    assert said.startswith("Try powersgd 4: ")
    assert "1.64 M parameters and AdamW (n = 3); your model is 76 times as" in said
    rows = {row[0]: row[1:] for row in tabulate_clocks(planned, methods).rows}
    assert rows["powersgd 32"] == ("-", "-", "-", "-")
    assert rows["powersgd 1"][0] == "0.33 [0.29, 0.36]"


def test_a_speed_is_the_ratio_of_seconds_times_the_clock() -> None:
    planned = on(make_job(JOBS["half precision"]), 1e8, 5e-5)
    frame = tabulate_methods(planned, usual_methods(planned)).set_index("method")
    assert frame["speed"]["dense"] == 1.0
    assert math.isnan(frame["speed"]["powersgd 32"])
    for name, row in frame.iterrows():
        if not math.isnan(row["clock"]):
            ratio = frame["seconds"]["dense"] / row["seconds"]
            assert row["speed"] == pytest.approx(min(row["clock"], 1.0) * ratio), name


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9, 1e10, 1e12])
@pytest.mark.parametrize("name", JOBS)
def test_what_is_called_faster_is_faster(name: str, bandwidth: float) -> None:
    """Each method that the advice lists as more than 10 % faster to a loss than the one it names,
    and no other, by the table."""
    planned = on(make_job(JOBS[name]), bandwidth, 1e-5)
    frame = tabulate_methods(planned, usual_methods(planned)).set_index("method")
    said = write_advice(planned, usual_methods(planned), frame.reset_index())
    tried = said.partition("Try ")[2].partition(":")[0] if said.startswith("Try ") else "dense"
    every = sorted(frame.index, key=len, reverse=True)
    for words, column in (("More than 10 % faster: ", "speed"), ("unknown clock: ", "speed_up")):
        listed, names = said.partition(words)[2].partition(".")[0], set()
        for one in every:  # a name may hold a comma
            if one in listed:
                listed, names = listed.replace(one, ""), {*names, one}
        faster = frame[column] > 1.1 * frame["speed"][tried]
        unknown = frame["speed"].isna()
        assert names == {*frame.index[faster & (unknown if column == "speed_up" else ~unknown)]}


# -- the device ------------------------------------------------------------------------------


def test_nothing_pays_below_a_bandwidth_of_a_device_that_was_not_named() -> None:
    options = JobOptions("gpt2-124m", items=8192)
    unnamed, named = (make_job(replace(options, device=x)) for x in (None, "a100"))
    assert unnamed.compute == named.compute
    frame = tabulate_methods(unnamed, usual_methods(unnamed))
    assert frame["break_even"].isna().all()
    assert "assumed to be an a100" in write_advice(unnamed, usual_methods(unnamed), frame)
    assert tabulate_methods(named, usual_methods(named))["break_even"].notna().all()


def test_a_step_alone_does_not_price_compression() -> None:
    """It may be of few samples or of many: 3 M parameters are compressed by an A100 alike, unless
    the step moves the model's arrays faster than that."""
    a100 = DEVICES["a100"].memory
    for seconds in ("0.16s", "20s"):
        slow = make_job(JobOptions("small.toml", step=seconds, nodes=2, gpus=1))
        assert (slow.memory, slow.priced) == (a100, "assumed")
        frame = tabulate_methods(slow, usual_methods(slow))
        assert frame["break_even"].isna().all()
        assert "assumed to be an a100" in write_advice(slow, usual_methods(slow), frame)
    fast = make_job(JobOptions("small.toml", step="10us", nodes=2, gpus=1))
    assert method_work(fast, parse_method("powersgd:1")).compress == pytest.approx(fast.compute)


def test_a_step_and_its_items_price_compression() -> None:
    """As on an A100 that is as slow."""
    a100 = DEVICES["a100"]
    given = make_job(JobOptions("gpt2-124m", items=8192))
    same = make_job(JobOptions("gpt2-124m", items=8192, step=f"{given.compute}s"))
    assert same.memory == pytest.approx(a100.memory)
    assert same.priced == "step"
    slower = make_job(JobOptions("gpt2-124m", items=8192, step=f"{5 * given.compute}s"))
    assert slower.memory == pytest.approx(a100.memory / 5)
    named = make_job(JobOptions("gpt2-124m", step="1s", device="h100"))
    assert named.memory == DEVICES["h100"].memory


EITHER: dict[str, tuple[Any, ...]] = {
    "model": ("small.toml", "samples.toml"),
    "step": (None, "1s"),
    "items": (None, 10**7),
    "flops": (None, 1e9),
    "device": (None, "h100"),
    "utilisation": (0.4, 0.3),
    "nodes": (2, 1),
    "gpus": (8, 1),
    "within": (None, "1Mbit/s,1us"),
    "between": (None, "2Mbit/s,1us"),
    "links": (None, Path("links.json")),
}


@settings(max_examples=60)
@given(st.sampled_from(["step", "items"]), st.sets(st.sampled_from(sorted(EITHER)), max_size=4))
def test_an_option_that_changes_no_number_is_refused(one: str, others: set[str]) -> None:
    """Each option of a job that is predicted: without it another number, or no job."""
    link = {"bandwidth": 3e6, "latency": 1e-6}
    Path("links.json").write_text(json.dumps({"within": link, "between": link}))
    Path("samples.toml").write_text(SMALL.replace("token", "sample"))

    def numbers(of: dict[str, Any]) -> Any:
        try:
            job = make_job(JobOptions(**of))
        except ConfigError:
            return None
        links = [job.link, *([job.within] if job.nodes > 1 < job.gpus else [])]
        return job.priced, job.compute, job.memory, job.replicas, links

    options = {name: both[name in {one, *others}] for name, both in EITHER.items()}
    if (found := numbers(options)) is None:
        return
    for name, (usual, _) in EITHER.items():
        if name != "model" and options[name] != usual:
            assert numbers({**options, name: usual}) != found, name
