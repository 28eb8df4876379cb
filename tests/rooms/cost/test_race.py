"""The race's numbers: made-up lines, and predictions by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from drawn import colour_alone

from analysis.common import markov
from benchmarks import race, race_notes, race_report
from regimes.data import tokens
from regimes.presets import get_grid

LINE = {"stage": "race", "entrant": "dense", "seed": 1, "link": 100, "rate": 0.006}
TIMES = {"steps": [10, 10, 10], "seconds": [1.0, 2.0, 3.0], "loss": [4.0, 3.0, 2.0]}
MORE = {"predicted": 0.21, "crossed": 1e5, "processor": "a processor"}


def line(**changes: Any) -> dict[str, Any]:
    return {**LINE, **TIMES, **MORE, **changes}


def test_seconds_until_a_loss_are_interpolated() -> None:
    until = race_report.seconds_until
    assert until(line(), 4.0) == 1
    assert until(line(), 3.5) == pytest.approx(2)
    assert until(line(), 6.0) == pytest.approx(0.5)  # between 8 bits and the first unit
    assert until(line(), 1.9) == float("inf")


def test_the_page_says_who_is_first_and_who_never_arrives() -> None:
    fast = line(entrant="rank 1", seconds=[0.1, 0.1, 0.1])
    never = line(entrant="sign", loss=[4.0, 3.9, 3.8])
    free = line(stage="free", entrant="DDP", link=None)
    text = race_report.page({"race-lm": [line(), never, fast, free]}, "a system")
    rows = [x.split("|")[1].strip() for x in text.splitlines() if x.startswith("| ")]
    assert rows[1:] == ["rank 1", "dense", "sign"]
    assert "| sign | 0.006 | never | never | 3.800 |" in text
    assert "is 5 % in the median" in text


def test_pairs_in_the_right_order() -> None:
    """Steps of 0.2, 0.21 and 0.4 s: two pairs differ by more than a tenth."""
    races = [
        line(entrant=name, seconds=[10 * taken] * 3, predicted=guess)
        for name, taken, guess in (("a", 0.2, 0.3), ("b", 0.21, 0.1), ("c", 0.4, 0.2))
    ]
    assert race_report.ordered([race_report.mean([race]) for race in races]) == (1, 2)


def probes(link: float, **seconds: tuple[float, float]) -> list[dict[str, Any]]:
    """Collectives of 1 kB and 1 MB: without a limit they take nothing, and on a link these
    seconds; after a pass they take as long, if nothing else is said."""
    seconds.setdefault("after", seconds["mean"])
    tables = {None: {kind: [(1e3, 0.0), (1e6, 0.0)] for kind in seconds}}
    tables[link] = {k: list(zip((1e3, 1e6), x, strict=True)) for k, x in seconds.items()}
    return [
        {"stage": "probe", "entrant": "", "link": where, "table": x} for where, x in tables.items()
    ]


def free(**sent: float) -> dict[str, Any]:
    """Steps of 0.25 s without a limit; a collective of so many bytes of each kind in each step."""
    calls = {kind: [10, 10, 10] for kind in sent}
    size = {kind: [10 * x] * 3 for kind, x in sent.items()}
    return line(stage="free", calls=calls, bytes=size, period=[1, 1, 1])


def predicted(*lines: dict[str, Any], steps: int = 600, **changes: Any) -> float:
    head = {**LINE, "grid": "race-lm", "link": 8, **changes}
    return race.predicted(head, lines, steps)


def test_a_prediction_by_hand() -> None:
    """Half of 1 MB takes half of its time longer on the link than a free step of 0.25 s, and each
    of two means a delay that hardly depends on its size."""
    tables = probes(8, mean=(0.0, 1.5), gather=(0.3, 0.31))
    got = predicted(*tables, free(mean=5e5))
    assert got == pytest.approx(0.25 + 1.5 * 499 / 999)
    both = free(mean=5e5, gather=1e3)
    assert predicted(*tables, both) == pytest.approx(got + 0.3)
    twice = free(mean=1e6)
    twice["calls"] = {"mean": [20, 20, 20]}  # of half of the bytes each
    assert predicted(*tables, twice) == pytest.approx(2 * got - 0.25)


def test_a_prediction_takes_the_latest_steps_on_unlimited_links() -> None:
    tables = probes(8, mean=(0.0, 0.0))
    later = {**free(mean=5e5), "seconds": [9.0, 4.0, 4.0]}
    assert predicted(*tables, free(mean=5e5), later) == pytest.approx(0.4)


def test_a_race_anew_forgets_its_own_lines_alone() -> None:
    kept = [line(), line(entrant="4 bits", link=20), line(entrant="4 bits", grid="race-lm-460k")]
    dropped = [line(stage="free", entrant="4 bits"), line(entrant="4 bits")]
    old = line(stage="probe", entrant="", processor="another")
    left = race.forget([*kept, *dropped, old], "race-lm", [100], ["4 bits"], "a processor")
    assert left == [*kept, {**old, "stage": "earlier probe"}]


def test_nodes_that_leave_a_collective_apart_gain_once_a_step() -> None:
    tables = probes(8, mean=(1.0, 1.0), after=(0.9, 0.9))
    twice = free(mean=1e6)
    twice["calls"] = {"mean": [20, 20, 20]}
    assert predicted(*tables, twice) == pytest.approx(0.25 + 2 * 1.0 - 0.1)


def test_a_collective_at_the_end_of_a_unit_does_not_count() -> None:
    """30 steps with a period of 8 have four synchronisations of 1 MB; two more collectives of next
    to no bytes are of losses. A race of 20 steps has three."""
    local = line(stage="free", period=[8, 8, 8], calls={"mean": [2, 2, 2]})
    local["bytes"] = {"mean": [1e6, 1e6, 2e6]}
    tables = probes(8, mean=(0.0, 1.0), seldom=(9.0, 9.0))
    assert predicted(*tables, local, steps=20) == pytest.approx(0.25 + 3 / 20)


def test_with_a_long_period_most_collectives_are_of_losses() -> None:
    """30 steps with a period of 15 have two synchronisations; a unit that ends with one, like the
    last, has no collective of losses alone. With a period of 25 there are as many of each."""
    local = line(stage="free", period=[15, 15], steps=[10, 20], seconds=[1.0, 5.0])
    local |= {"calls": {"mean": [1, 2]}, "bytes": {"mean": [40, 2e6]}}
    assert race.exchanges("dense", {"dense": local}, 600, None) == [("mean", 40 / 600, 1000020)]
    local |= {"period": [25, 25, 25], "steps": [10, 10, 10], "calls": {"mean": [1, 1, 2]}}
    assert race.exchanges("dense", {"dense": local}, 600, None) == [("mean", 24 / 600, 1000020)]


def test_seldom_collectives_have_a_time_of_their_own() -> None:
    tables = probes(8, mean=(0.0, 1.0), seldom=(0.0, 3.0))
    local = line(stage="free", period=[15, 15, 15], calls={"mean": [1, 2, 1]})
    local["bytes"] = {"mean": [0, 1e6, 1e6]}
    assert predicted(*tables, local, steps=600) == pytest.approx(0.25 + 3.0 / 15)


def test_the_collectives_of_a_quantised_all_reduce_are_timed_together() -> None:
    tables = probes(8, mean=(0.0, 1.0), quantised=(0.0, 1.2))
    assert predicted(*tables, free(gather=2.5e5, mean=1e3, exchange=1e6)) == pytest.approx(1.45)


def test_what_ddp_hides_behind_the_backward_pass() -> None:
    """Of two buckets the first, 0.5 s longer on the link, runs while 0.1 s of the pass follow."""
    tables = probes(8, mean=(0.0, 1.0))
    ddp = line(stage="free", entrant="DDP", buckets=[500500, 250750], overlap=0.1)
    got = predicted(*tables, ddp, entrant="DDP")
    assert got == pytest.approx(0.25 + 0.5 + 0.25 - 0.1)
    ddp["overlap"] = 2.0  # no more than it takes
    assert predicted(*tables, ddp, entrant="DDP") == pytest.approx(0.25 + 0.25)


def test_hsdp_exchanges_each_block_alone() -> None:
    """Half of two blocks of 49,280 numbers, and of the rest, 16,448."""
    assert race.exchanges("HSDP", {"HSDP": line(stage="free")}, 600, None) == [
        *[("pairs", 1.0, 2 * 49280)] * 2,
        ("pairs", 1.0, 2 * 16448),
    ]


def test_every_entrant_has_a_configuration() -> None:
    named = race.entrants()
    assert {*race.RATE_OF.values()} <= named.keys()
    assert {*race.RATE_OF, race.POWER} <= named.keys()
    assert {*race.PLANNED, *race.CHANGING} <= named.keys()
    short = race.shortened(race.configured("rank 1", 0.003, 5), race.FREE_UNITS)
    assert short.data.train_size == 5 * 25 * 32 * 64 + 1
    assert (short.optimizer.lr, short.seed) == (0.003, 5)


def test_an_entrant_whose_ranks_change_takes_its_whole_training() -> None:
    larger = "race-lm-460k"
    taken = race.units_taken
    assert taken("free", "rank 4", "race-lm", 100) == 5
    assert taken("free", "accordion", "race-lm", 100) is None
    assert taken("race", "rank 4", "race-lm", 20) == taken("race", "rank 4", larger, 100) == 4
    assert taken("race", "rank 4", "race-lm", 100) is None
    assert taken("race", "rank 4", larger, 1000) is None
    for changing in ("l-greco", "rate 2-1", "qsr"):
        assert taken("race", changing, "race-lm", 20) is None


def test_a_short_race_has_the_losses_of_the_others_and_its_own_speed() -> None:
    whole = [line(seed=1), line(seed=2, loss=[4.0, 3.2, 2.5])]
    short = line(link=20, steps=[2], seconds=[1.0], loss=[5.0], crossed=7.0)
    (runs,) = race_report.grouped([*whole, short], 20).values()
    assert [run["loss"] for run in runs] == [run["loss"] for run in whole]
    assert [run["seconds"] for run in runs] == [[5.0, 5.0, 5.0]] * 2
    assert {run["crossed"] for run in runs} == {7.0}
    slower = line(link=20, steps=[2, 2, 2], seconds=[4.0, 1.0, 1.0], loss=[5.0] * 3)
    (runs,) = race_report.grouped([*whole, {**slower, "steps": [2, 2, 1]}], 20).values()
    assert [run["seconds"] for run in runs] == [[20.0, 5.0, 10.0]] * 2  # at the same share


def test_a_whole_race_of_one_seed_among_short_ones() -> None:
    """Its other seeds have its speed too; without short ones only the seeds raced there count."""
    changing = [line(entrant="qsr", seed=seed, loss=[4.0, 3.0, seed]) for seed in (1, 2)]
    raced = line(entrant="qsr", link=20, seconds=[2.0, 3.0, 4.0], loss=[4.0, 3.0, 1])
    short = line(link=20, steps=[2], seconds=[1.0], loss=[5.0])
    runs = race_report.grouped([*changing, raced, line(), short], 20)["qsr"]
    assert [run["seconds"] for run in runs] == [[2.0, 3.0, 4.0]] * 2
    assert [run["loss"][-1] for run in runs] == [1, 2]
    assert race_report.grouped([*changing, raced], 20) == {"qsr": [raced]}


def test_a_period_that_changes_is_predicted_from_steps_with_and_without() -> None:
    """Steps of 0.5 s with an exchange, 0.25 s with one in eight: 0.2143 s without."""
    lines = [
        line(stage="free", entrant=name, seconds=[0.0, 10 * each, 10 * each])
        for name, each in (("dense", 0.5), ("every 8", 0.25))
    ]
    often = (150 + 450 / 8) / 600
    tables = probes(8, mean=(0.0, 0.0))
    got = predicted(*tables, *lines, entrant="post-local 8")
    assert got == pytest.approx(0.5 - (0.25 / (7 / 8)) * (1 - often), rel=1e-4)


# -- what the numbers mean -------------------------------------------------------------------

LOCAL, WARM, COLD = race_notes.PEER, race.POST_LOCAL, race.NO_WARM_UP


def seeds(entrant: str, *factors: float, **changes: Any) -> list[dict[str, Any]]:
    """Runs of one loss whose seconds are so many times those of `TIMES`."""
    return [
        line(entrant=entrant, seed=i, seconds=[f * x for x in (1.0, 2.0, 3.0)], **changes)
        for i, f in enumerate(factors)
    ]


def paged(*runs: list[dict[str, Any]]) -> str:
    free = line(stage="free", entrant="DDP", link=None)
    return race_report.page({"race-lm": [*itertools.chain(*runs), free]}, "a system")


def test_the_first_is_held_against_what_averages_as_seldom() -> None:
    """Ratios by hand: 2, 2 and 4 by seed have the geometric mean 16^(1/3) and, of logarithms, a t
    interval of two degrees."""
    found = {"fast": seeds("fast", 1, 1, 1), LOCAL: seeds(LOCAL, 2, 2, 4)}
    logs = [math.log(2), math.log(2), math.log(4)]
    mean = sum(logs) / 3
    half = 4.302652729911275 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    wanted = [math.exp(x) for x in (mean, mean - half, mean + half)]
    said = race_notes.times_as_fast(found, "fast", LOCAL, 3.0)
    assert said == "{:.2f} [{:.2f}, {:.2f}]".format(*wanted)
    assert f"first **fast**, {said} times as fast as {LOCAL}" in paged(*found.values())


def test_post_local_sgd_is_said_to_have_our_first_quarter_until_it_is_raced_without() -> None:
    """Four units of 1, 1, 1 and 1 s: the quarter is one of the two seconds until 3 bits."""
    more: dict[str, Any] = {"steps": [5] * 4, "loss": [4.0, 3.0, 2.9, 2.8]}
    warm = [line(entrant=WARM, seed=i, **more | {"seconds": [1.0] * 4}) for i in range(3)]
    before = paged(warm)
    assert "that is 1.0 of its 2.0 seconds to 3 bits" in before
    assert "has not been raced" in before
    cold = [line(entrant=COLD, seed=i, **more | {"seconds": [0.5] * 4}) for i in range(3)]
    after = paged(warm, cold)
    assert "has not been raced" not in after
    assert f"| {COLD} |" in after
    assert f"first **{COLD}**, which is torch's own" in after


def test_the_page_says_which_losses_come_from_another_link() -> None:
    short = line(link=20, steps=[2], seconds=[1.0], loss=[5.0])
    text = paged(seeds("dense", 1, 1, 1), [short])
    (said,) = [x for x in text.splitlines() if "no entrant was trained to a loss" in x]
    assert "2 steps of one seed" in said
    assert paged(seeds("dense", 1, 1, 1)).count("trained to a loss") == 0


def test_who_is_first_by_loss() -> None:
    """Of 3.6 and 3.5 the quick one has 1.5 and 3 seconds, the slow one 1.8 and 2."""
    quick = seeds("quick", 0.5, 0.5, 0.5, loss=[4.0, 3.6, 3.5])
    found = {"quick": quick, "slow": seeds("slow", 1, 1, 1, loss=[4.0, 3.0, 2.9])}
    assert race_notes.by_loss(found) == (
        "First by loss, in the mean of all seeds: quick from 4.50 to 3.60, slow from 3.55 to 2.90 "
        "bits."
    )


def test_post_local_sgd_without_warm_up_has_one_mean_in_eight_steps() -> None:
    """Its steps take 0.25 s, and each eighth 0.8 s longer on the link; nothing is hidden."""
    tables = probes(8, mean=(0.8, 0.8))
    numbers, _ = race._shapes("race-lm")
    mean = ("mean", 1 / 8, 4.0 * numbers)
    assert race.exchanges(COLD, {}, 600, race._often(COLD, 0.006, "race-lm")) == [mean]
    steps = line(stage="free", entrant=COLD, buckets=[1000], overlap=0.7)
    assert predicted(*tables, steps, entrant=COLD) == pytest.approx(0.25 + 0.8 / 8)
    assert race.RATE_OF[COLD] == LOCAL
    taken = race.units_taken
    assert (taken("race", COLD, "race-lm", 20), taken("race", COLD, "race-lm", 100)) == (4, None)


def test_the_text_of_the_race_is_the_one_whose_markov_models_are_quoted() -> None:
    data = race.configured("dense", 0.006, 1).data
    if tokens.load_tokens(data).digest != race_notes.TEXT:
        pytest.skip("the standard library of this Python is another text")
    assert markov.known()[race_notes.TEXT].test == data.test_size
    assert data.train_size == race_notes.STEPS * 32 * 64 + 1


def test_what_was_raced_elsewhere_stands_beside_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(entrant: str, seed: int, loss: float) -> dict[str, Any]:
        head = {"stage": "race", "entrant": entrant, "seed": seed, "processor": "that"}
        return {**head, "loss": [9.0] * 23 + [loss]}  # at the end: of the last unit, as in a table

    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(run(COLD, seed, 2.0 + seed)) + "\n" for seed in range(3)))
    monkeypatch.setattr(race_notes, "ELSEWHERE", file)
    said = race_notes.elsewhere([run("every 8", seed, 1.0 + seed) for seed in range(3)])
    assert f"{COLD} was raced on another processor, that" in said
    assert "is 3.00 [0.52, 5.48], that of every 8 2.00 [-0.48, 4.48]" in said
    assert "7 steps after the last mean" in said  # after steps 1, 9, ... and 593 of 600
    assert race_notes.elsewhere([run("dense", 0, 1.0)]) == ""


def test_what_was_raced_again_stands_beside_ddp_of_the_same_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(entrant: str, seconds: float) -> dict[str, Any]:
        head = {"stage": "race", "entrant": entrant, "link": 100, "processor": "that"}
        return {**head, "seconds": [seconds] * 2, "steps": [25, 25]}

    file = tmp_path / "lines.jsonl"
    later = [run("DDP", 2.5), run("4 bits", 2.0), run("4 bits", 3.0), run("new", 1.0)]
    file.write_text("".join(json.dumps(line) + "\n" for line in later))
    monkeypatch.setattr(race_notes, "ELSEWHERE", file)
    said = race_notes.again([run("DDP", 1.0), run("4 bits", 1.5), run("old", 1.0)])
    assert said[-3:-1] == ["| DDP | 100.0 | 1.00 | 1.00 |", "| 4 bits | 100.0 | 1.00 | 1.50 |"]
    assert race_notes.again([run("DDP", 1.0)]) == []


def test_the_curves_of_the_race_are_told_apart_in_grey() -> None:
    runs = [line(entrant=name, link=race_report.AT) for name in race_report.SHOWN]
    assert colour_alone(race_report.figure(runs)) == []


# -- the grids of equal seconds --------------------------------------------------------------


@pytest.mark.parametrize("seconds", [30, 60, 120])
def test_schedules_are_stretched_by_measured_seconds(seconds: int) -> None:
    """Steps times the seconds of a step of the larger model's races at 100 Mbit/s."""
    names = {"DDP": "DDP", "fp16": "DDP, fp16 hook"}
    names |= {x: x for x in ("4 bits", "rank 4", "every 8", "4 bits every 8")}
    lines = [x for x in race.read("race-lm-460k") if x["stage"] == "race" and x["link"] == 100]
    for name, entrant in names.items():
        (step,) = {race_report.step_seconds(x) for x in lines if x["entrant"] == entrant}
        steps = get_grid(f"equal-seconds-{seconds}")[name].steps
        assert steps * step == pytest.approx(seconds, rel=0.01), name
