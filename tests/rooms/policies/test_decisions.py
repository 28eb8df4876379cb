"""Decisions from a history that grows: the same as from all past epochs at once, and at a cost that
does not grow (oracles: the rules over whole lists, written out; a count of instructions)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.plugins.detectors import MsdrFall, TraceCusum
from regimes.policies import (
    Accordion,
    AdaQS,
    ByLayer,
    Decision,
    LevelCost,
    PastEpoch,
    Policy,
    controller,
    make_policy,
)
from regimes.policies.controller import Controller, ModelController
from regimes.policies.detected import FollowsDetector, signal_values
from regimes.policies.detectors import (
    NormChange,
    RelativeChange,
    RelativeFall,
    Verdict,
    make_detector,
)
from regimes.policies.detectors.statistics import Statistic
from regimes.policies.history import History, read_history, whole_history
from regimes.policies.replay.compare import compare_rules
from regimes.records import Record

Row = dict[str, Any]
LEVELS = ("high", "mid", "low")
LAYERS, COMPRESSED = ("a", "bias", "b", "c"), (0, 2, 3)
COSTS = {
    name: LevelCost([n, 2.0 * n, 3.0 * n], 6.0 * n)
    for n, name in enumerate((*LEVELS, "dense"), start=1)
}


@dataclass(frozen=True)
class Mine:
    """A policy that is not in the tree, which looks at all that it is given."""

    needs: tuple[str, ...] = field(default=("norm",), init=False)
    names: tuple[str, ...] = field(default=("low", "high"), init=False)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        known = [past.statistics.get("norm", [None] * len(layers)) for past in history[-3:]]
        level = self.names[(len(history) + sum(x is None for row in known for x in row)) % 2]
        return [Decision(level, {"last": history[-1].levels if history else []})] * len(layers)


TABLES: list[Row] = [
    {"name": "static"},
    {"name": "windows", "windows": [[0, 2], [5, 6]]},
    *({"name": "accordion", "interval": n, "decay_rule": n != 2} for n in (1, 2, 3)),
    *(
        {"name": "detected", "detector": {"name": name, **more}, "decay_rule": len(name) > 10}
        for name, more in {
            "norm-change": {"interval": 2, "statistic": "norm*lr"},
            "change": {"interval": 1, "statistic": "msdr", "per_layer": False},
            "eigenvalue-change": {"interval": 2},
            "first-share": {"epochs": 9},
            "fixed-windows": {"windows": [[1, 3]]},
            "random-windows": {"epochs": 9},
            "trace-cusum": {"statistic": "norm", "warmup": 2, "h": 1.0},
            "msdr-fall": {"per_layer": True, "statistic": "error:high"},
        }.items()
    ),
    {"name": "detected", "detector": {"name": "msdr-fall", "latch": False, "fall": 0.2}},
    {"name": "detected", "detector": {"name": "norm-change", "interval": 1, "per_layer": False}},
    {
        "name": "detected",
        "detector": {
            "name": "trace-cusum",
            "statistic": "eigenvalue*lr",
            "per_layer": False,
            "warmup": 3,
            "h": 0.5,
        },
    },
    *({"name": "accordion-batch", "interval": 1, "grow_only": grow} for grow in (True, False)),
    {"name": "smith"},
    {
        "name": "by-layer",
        "groups": {"a": {"name": "accordion", "interval": 1}, "c": {"name": "static"}},
        "otherwise": {"name": "adaqs", "fall": 0.2},
    },
    {"name": "adaqs", "fall": 0.2},
    {"name": "error-ladder"},
    {"name": "rate-ladder"},
    {"name": "accordion-ladder", "interval": 1},
    {"name": "l-greco", "base": {"name": "accordion-ladder", "interval": 1}, "interval": 2},
    {"name": "l-greco", "base": {"name": "adaqs"}},
    {"name": "gravac", "gain": 0.5},
    {"name": "gravac", "interval": 3, "smoothing": 0.3},
    {"name": "post-local"},
    {"name": "qsr", "alpha": 0.2},
    {"name": "adacomm"},
]


@pytest.fixture(autouse=True, scope="module")
def any_level() -> Iterator[None]:
    """Rows are drawn, so a policy that keeps a level may keep one that is none of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "check_decisions", lambda policy, found, layers, **_: found)
        yield


def rules() -> list[Policy]:
    return [Mine(), *(make_policy(table) for table in TABLES)]


# -- the rules over whole lists --------------------------------------------------------------------


def values_of(past: Sequence[PastEpoch], rule: Any, layer: int) -> list[float | None]:
    if rule.statistic is None:
        return [None] * len(past)
    read, found = Statistic.parse(rule.statistic), []
    for epoch in past:
        layers = epoch.statistics.get(read.name, [])
        if rule.per_layer:
            value = layers[layer] if layers else None
        elif layers and read.is_norm:
            value = None if None in layers else math.hypot(*layers)  # type: ignore[arg-type]
        else:
            value = epoch.model.get(read.name)
        found.append(value * epoch.lr if read.times_lr and value is not None else value)
    return found


def cusum(rule: TraceCusum, values: Sequence[float | None]) -> Verdict:
    critical, old, new, score = True, None, None, None
    base: list[float] = []
    mean = sd = up = down = 0.0
    for new in values:
        if new is None:
            continue
        if not (new > 0 and math.isfinite(new)):
            base, critical, old, score = [], True, None, None
            continue
        z = math.log(new)
        if len(base) < rule.warmup:
            base.append(z)
            up, down, score, critical, old = 0.0, 0.0, None, True, None
            if len(base) == rule.warmup:
                mean = math.fsum(base) / len(base)
                square = math.fsum((v - mean) ** 2 for v in base) / (len(base) - 1)
                sd, critical, old = max(0.01, math.sqrt(square)), False, math.exp(mean)
            continue
        z = (z - mean) / sd
        up, down = max(0.0, up + z - rule.k), max(0.0, down - z - rule.k)
        score = max(up, down)
        critical, old = score > rule.h, math.exp(mean)
        if critical:
            base = [math.log(new)]
    if values and new is None:
        return Verdict(None)
    return Verdict(critical, old, new, score, rule.h)


def falls(rule: MsdrFall | RelativeFall, values: Sequence[float | None]) -> list[Verdict]:
    latch = isinstance(rule, MsdrFall) and rule.latch
    reference, fallen, found = None, False, [Verdict(False, threshold=rule.fall)]
    for value in values:
        if value is None:
            found.append(Verdict(None))
            continue
        score, finite = None, math.isfinite(value)
        if finite and reference is not None and reference > 0:
            score = 1 - value / reference
        now = score is not None and score >= rule.fall
        fallen |= now
        found.append(Verdict(now or (latch and fallen), reference, value, score, rule.fall))
        if now or (score is None and finite):
            reference = value
    return found


def change(rule: RelativeChange, values: Sequence[float | None]) -> Verdict:
    epoch = len(values) - 1
    if epoch < 0:
        return Verdict(True, threshold=rule.eta)
    known = [e for e, value in enumerate(values) if value is not None]
    before = [e for e in known if e <= epoch - rule.interval]
    if epoch % rule.interval or not known or before == known:
        return Verdict(None)
    new, old = values[known[-1]], values[before[-1]] if before else None
    if old is None or old == 0 or not math.isfinite(old):
        return Verdict(True, old, new, None, rule.eta)
    score = (old - new) / abs(old)  # type: ignore[operator]
    score = score if rule.direction == "decay" else abs(score)
    return Verdict(score >= rule.eta or math.isnan(score), old, new, score, rule.eta)


def verdict_of(rule: Any, values: Sequence[float | None]) -> Verdict:
    if isinstance(rule, TraceCusum):
        return cusum(rule, values)
    if isinstance(rule, MsdrFall | RelativeFall):
        return falls(rule, values)[-1]
    return change(rule, values) if isinstance(rule, RelativeChange) else rule(values)


def followed(rule: Any, past: Sequence[PastEpoch], layers: int) -> list[str]:
    """The levels that a policy which follows a detector chooses."""
    if rule.decay_rule and decays(past)[-1:] == [len(past)]:
        return [rule.names[0]] * layers
    found = []
    for layer in range(layers):
        seen = verdict_of(rule.rule, values_of(past, rule.rule, layer)).critical
        before = past[-1].levels[layer] if past else rule.names[0]
        found.append(before if seen is None and past else rule.level_for(seen is not False, before))
    return found if past else [rule.names[-(level != rule.names[0])] for level in found]


def decays(past: Sequence[PastEpoch]) -> list[int]:
    peak = top = 0.0
    found = []
    for epoch, one in enumerate(past, start=1):
        peak, top = max(peak, one.lr), max(top, one.lr)
        step = one.next_lr < one.lr and 2 * one.next_lr <= one.lr * (1 + 1e-9)
        slow = 10 * one.next_lr <= top * (1 + 1e-9) and peak <= 100 * one.next_lr * (1 + 1e-9)
        if step or (slow and one.next_lr < one.lr):
            found.append(epoch)
            top = one.next_lr
    return found


# -- what a run may record -------------------------------------------------------------------------

NUMBERS = st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0.01, 10)
RATES = st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.01, 0.003])


@st.composite
def runs(draw: st.DrawFn) -> list[Row]:
    """Rows in which statistics are missing, undefined, or measured every so many units; layers that
    are measured from some unit on; decays, and batches that grow."""
    count, every = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    appears = [draw(st.integers(0, 3)) for _ in LAYERS]
    rates, rows = [draw(RATES) for _ in range(count + 1)], []
    for unit in range(count):
        values = {
            name: [draw(NUMBERS) if unit >= first else None for first in appears]
            for name in ("norm:update", "msdr", *(f"error:{level}" for level in LEVELS))
            if name.startswith("norm") != (unit % every > 0) or draw(st.booleans())
        }
        model = {name: draw(NUMBERS) for name in ("eigenvalue", "msdr") if draw(st.booleans())}
        levels = [draw(st.sampled_from(LEVELS)) if i in COMPRESSED else "dense" for i in range(4)]
        rows.append(
            {
                "lr": rates[unit],
                "next_lr": rates[unit + 1],
                "statistics": values,
                "model": model,
                "layers": {"level": levels},
                "train_loss": draw(NUMBERS),
                "batch": {
                    "level": draw(st.sampled_from(["low", "high"])),
                    "multiple": draw(st.sampled_from([1, 1, 3])),
                },
                "sync": {"level": draw(st.sampled_from(["4", "16"]))},
            }
        )
    return rows


def plain(rows: Sequence[Row]) -> list[PastEpoch]:
    return list(read_history(rows, COMPRESSED, "update", COSTS))


# -- the same as before ----------------------------------------------------------------------------


@settings(max_examples=40)
@given(runs())
def test_a_history_that_grows_decides_as_one_made_anew(rows: list[Row]) -> None:
    """Each policy through a controller as rows are appended, and over a list of all past epochs."""
    for rule in rules():
        controller, seen = Controller(rule, LAYERS, COMPRESSED, "update", COSTS), []
        for row in [*rows, None]:
            layers = [LAYERS[i] for i in COMPRESSED]
            found = list(controller.decide(seen).decisions.values())
            assert repr(found) == repr(rule.decide(plain(seen), layers)), rule
            seen += [] if row is None else [row]


@settings(max_examples=30)
@given(runs(), st.sampled_from(["batch", "sync"]))
def test_so_does_that_of_the_whole_model(rows: list[Row], table: Literal["batch", "sync"]) -> None:
    for rule in rules():
        if isinstance(rule, ByLayer) or any(need.startswith("error") for need in rule.needs):
            continue
        controller = ModelController(rule, "update", table)
        for count in range(len(rows) + 1):
            past = list(whole_history(rows[:count], "update", table))
            expected = rule.decide(past, [table])[0]
            assert repr(controller.decide(rows[:count])) == repr(expected), rule


@given(runs())
def test_policies_follow_detectors_as_the_rules_say(rows: list[Row]) -> None:
    past = plain(rows)
    for rule in rules():
        if isinstance(rule, FollowsDetector) and not getattr(rule, "grow_only", False):
            levels = [decision.level for decision in rule.decide(past, ["x"] * len(COMPRESSED))]
            assert levels == followed(rule, past, len(COMPRESSED)), rule
        if isinstance(rule, FollowsDetector | AdaQS):
            for layer in range(len(COMPRESSED)):
                expected = values_of(past, rule.rule, layer)
                assert signal_values(past, rule.rule, layer) == expected


@given(st.lists(NUMBERS | st.sampled_from([math.nan, math.inf, -1.0])), st.integers(1, 4))
def test_detectors_answer_as_over_the_whole_list(values: list[float | None], few: int) -> None:
    for rule in (
        TraceCusum(warmup=few + 1, h=0.5),
        MsdrFall(0.3),
        MsdrFall(0.1, latch=False),
        RelativeFall(0.1),
        NormChange(0.3, few),
    ):
        assert repr(rule(values)) == repr(verdict_of(rule, values))
    each = [MsdrFall(0.3)(values[:count]) for count in range(len(values) + 1)]
    assert list(map(repr, each)) == list(map(repr, falls(MsdrFall(0.3), values)))


@pytest.mark.slow
@given(runs())
def test_what_policies_sum_up_is_that_of_the_whole_list(rows: list[Row]) -> None:
    """Of the others: `test_sparse_measurements`, `test_periods`."""
    past, layers = plain(rows), ["a", "b", "c"]
    smith: Any = make_policy({"name": "smith"})
    assert [epoch for epoch, *_ in smith.decays(past)] == decays(past)
    greco: Any = make_policy(
        {"name": "l-greco", "base": {"name": "accordion-ladder", "interval": 1}}
    )
    steered: list[PastEpoch] = []
    for epoch in past:
        levels = [decision.level for decision in greco.rule.decide(steered, layers)]
        steered.append(replace(epoch, levels=levels))
    assert greco._decide_base(past, layers) == greco.rule.decide(steered, layers)


# -- rows that are not merely appended to ----------------------------------------------------------


def reads(controller: Controller, rows: list[Row]) -> None:
    """The controller decides after rows as one that has never seen others."""
    fresh = replace(controller)
    assert controller.decide(rows) == fresh.decide(rows)


def filled(count: int, norm: Callable[[int], float] = lambda unit: 1.0 + unit % 3) -> list[Row]:
    errors = {f"error:{level}": [0.1, 0.2, 0.3, 0.4] for level in LEVELS}
    return [
        {
            "lr": 0.1,
            "next_lr": 0.1,
            "train_loss": 2.0,
            "statistics": {"norm:update": [norm(unit)] * 4, "msdr": [1.0 + unit % 2] * 4, **errors},
            "model": {"eigenvalue": 1.0 + unit % 5, "msdr": 1.0 + unit % 2},
            "layers": {"level": ["high", "dense", "high", "high"]},
        }
        for unit in range(count)
    ]


def test_another_list_of_rows_is_another_history() -> None:
    controller = Controller(make_policy(TABLES[2]), LAYERS, COMPRESSED, "update", COSTS)
    rows = filled(5)
    for other in (rows, rows[:3], filled(4, lambda unit: 9.0**unit), [], rows, filled(5)):
        reads(controller, other)


def test_the_last_row_may_be_completed_later() -> None:
    """A unit's loss is logged after its end, when the next period has been decided already."""
    rule = make_policy({"name": "adacomm", "base": 16})
    controller, rows = ModelController(rule, "update", "sync"), filled(3)
    rows[-1]["train_loss"] = None
    assert controller.decide(rows).level == "low"  # kept: that of the row, which names none
    rows[-1]["train_loss"] = 0.5
    assert controller.decide(rows).level == "8"  # 16 * root(0.5 / 2)


def test_a_policy_that_changes_its_history_changes_no_later_decision() -> None:
    class Spoils(Mine):
        def decide(self, history: Any, layers: Sequence[str]) -> list[Decision]:
            count = len(history)
            history.clear()
            return [Decision("low", {"count": count})] * len(layers)

    rows, controller = filled(4), Controller(Spoils(), LAYERS, COMPRESSED, "update", COSTS)
    for count in (2, 3, 4, 4):
        decided = controller.decide(rows[:count]).decisions[0]
        assert decided.why == {"count": count}


def test_what_was_computed_is_kept_by_key() -> None:
    past = History(plain(filled(3)))
    read: list[int] = []

    def extend(total: int, epochs: Sequence[PastEpoch]) -> int:
        read.append(len(epochs))
        return total + len(epochs)

    assert [past.accumulate(key, int, extend) for key in "aab"] == [3, 3, 3]
    past.append(past[0])
    assert past.accumulate("a", int, extend) == 4
    assert read == [3, 3, 1]


# -- what it costs ---------------------------------------------------------------------------------


def instructions(act: Callable[[], Any]) -> int:
    """How many instructions of Python it takes, in whichever function."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("rule", rules()[1:], ids=lambda rule: type(rule).__name__)
def test_a_decision_costs_the_same_after_each_unit(rule: Policy) -> None:
    """All but the rows' reading is the policy's; 30 and 120 units are evaluated alike."""
    rows, seen, spent = filled(121), [], {}
    controller = Controller(rule, LAYERS, COMPRESSED, "update", COSTS)
    for row in rows:
        seen.append(row)
        if len(seen) in (31, 121):
            spent[len(seen)] = instructions(lambda: controller.decide(seen))
        else:
            controller.decide(seen)
    assert spent[121] <= 1.1 * spent[31]


@pytest.mark.parametrize("table", ["batch", "sync"])
def test_so_does_one_of_the_whole_model(table: Literal["batch", "sync"]) -> None:
    controller, rows = ModelController(Mine(), "update", table), filled(121)
    _, early, _, late = (
        instructions(lambda count=count: controller.decide(rows[:count]))
        for count in (30, 31, 120, 121)
    )
    assert late <= 1.1 * early


def test_a_list_of_past_epochs_is_read_once_for_all_layers() -> None:
    rule = Accordion(interval=1)

    def spent(epochs: int, layers: int) -> int:
        past = [PastEpoch(0.1, 0.1, {"norm": [1.0] * layers}, ["low"] * layers)] * epochs
        return instructions(lambda: rule.decide(past, ["x"] * layers))

    early, late = (spent(epochs, 40) - spent(epochs, 10) for epochs in (50, 200))
    assert late <= 1.1 * early


def test_a_comparison_costs_as_much_for_each_unit() -> None:
    """Detectors replayed over a record, what they would have sent, and how they agree."""

    def record(count: int) -> Record:
        rows = [
            {**row, "epoch": unit, "steps": 10, "floats": 1.0, "bytes": 4}
            for unit, row in enumerate(filled(count))
        ]
        each = {
            name: {"floats": 6.0, "bytes": 24, "layers": [1.0, 2.0, 3.0, 4.0]}
            for name in ("low", "high", "dense")
        }
        for row in rows:
            row["layers"]["floats"] = [1.0] * 4
        layers = [{"name": x, "compressed": i in COMPRESSED} for i, x in enumerate(LAYERS)]
        header = {"config": {"signal": "update"}, "layers": layers, "per_step": each}
        return Record(Path("record"), header, rows, [])

    chosen = {
        name: make_detector({"name": name, **more})
        for name, more in {
            "norm-change": {"interval": 1},
            "trace-cusum": {"statistic": "norm"},
            "msdr-fall": {},
        }.items()
    }
    compare_rules(record(10), chosen)  # what is imported late
    records = [record(count) for count in (60, 240)]
    short, long = (instructions(lambda one=one: compare_rules(one, chosen)) for one in records)
    assert long <= 4.2 * short
