"""A plug-in that returns something wrong: one sentence at the first unit, with the plug-in's name.

Oracle: each is right but for one thing, and trains where that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from configs import smoke_constant_rate as config

import regimes
from regimes import Compressor, Decision, Traffic
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.compression.sparse import TopK
from regimes.instruments.base import EndOfEpochGauge, Reading
from regimes.records import RecordWriter, load, make_reporters, read_lines

SHORT = ["epochs=2", "data.train_size=80", "data.test_size=20"]


def unchecked(kind: type, **values: Any) -> Any:
    """An object with these fields, which no type check sees."""
    made = object.__new__(kind)
    made.__dict__.update(values)
    return made


def decision(level: Any, why: Any = None) -> Any:
    return unchecked(Decision, level=level, why=why)


def reading(layers: Any = None, model: Any = None, detail: Any = None) -> Any:
    return unchecked(Reading, layers=layers or {}, model=model or {}, detail=detail or {})


# -- compressors -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Half(Compressor):
    """Sends half of each number, and errs where it is told to."""

    wrong: str = ""

    def check(self, level: Any) -> None: ...

    def exchange(self, bucket: Any, comm: Any) -> Any:
        halves = [delta / 2 for delta in bucket.deltas]
        updates = comm.mean(halves)
        if self.wrong == "deltas are changed" or self.wrong == "more is taken out":
            for delta in bucket.deltas:
                delta.mul_(0.25)
        else:
            bucket.subtract(halves)
        if self.wrong == "updates of one worker more":
            updates = [torch.stack([update, update]) for update in updates]
        if self.wrong == "updates in half":
            updates = [update.half() for update in updates]
        if self.wrong == "one thing":
            return updates[0]
        if self.wrong == "one too few":
            return updates[1:]
        if self.wrong == "a generator":
            return (update for update in updates)
        return updates

    def traffic(self, layer: Any, level: Any, workers: int, itemsize: int = 4) -> Traffic:
        less = self.wrong == "traffic"
        return Traffic(layer.size - less, layer.size * itemsize - itemsize * less)


@dataclass(frozen=True, kw_only=True)
class TopKOfTheMean(TopK):
    linear = True  # which is untrue


COMPRESSORS = {
    "updates of one worker more": r"an update is float32 \[2, 8, 9\], expected float32 \[8, 9\]",
    "updates in half": "an update is float16 .*, expected float32",
    "one thing": "exchange returned Tensor, expected a list of . updates, one for each layer",
    "one too few": "exchange returned . of them, expected a list of . updates",
    "a generator": "exchange returned generator, expected a list of . updates",
    "traffic": "traffic says 71 floats and 284 bytes a step at level 1, exchange has passed on 72",
}


def compressing(wrong: str, *settings: str) -> Any:
    policy = "policy={name='static', level='high'}"
    table = f"compressor={{name='test_plug_ins:Half', wrong='{wrong}'}}"
    return config(*SHORT, policy, table, "levels={low=2, high=1}", *settings)


@pytest.mark.parametrize("wrong", COMPRESSORS)
def test_a_compressors_wrong_return(wrong: str, tmp_path: Path) -> None:
    sentence = "the compressor Half.*: " + COMPRESSORS[wrong]
    with pytest.raises(ConfigError, match=sentence):
        regimes.run(compressing(wrong), tmp_path)
    assert not read_lines(tmp_path / "epochs.jsonl")


def test_the_right_one_trains_and_conforms(tmp_path: Path) -> None:
    assert regimes.run(compressing(""), tmp_path / "right").finished
    for feedback in (True, False, 0.5):
        regimes.check_compressor(Half(error_feedback=feedback), 1)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (Half(wrong="more is taken out"), "layer0: the update is not the mean of what was taken"),
        (Half(wrong="deltas are changed", error_feedback=False), "exchange changed the gradients"),
        (Half(wrong="traffic"), "traffic says 59 floats .* exchange has passed on 60"),
        (Half(wrong="updates in half"), "an update is float16"),
        (TopKOfTheMean(), "linear, but the update depends on more than the mean"),
    ],
)
def test_one_that_breaks_its_contract_is_found_by_its_authors_test(
    made: Compressor, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        regimes.check_compressor(made, 1)


def test_a_generator_of_an_earlier_version_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Old has a generator `send`.*exchange\(bucket, comm\)"):

        class Old(Compressor):
            def send(self, delta: Any, state: Any, level: Any) -> Any: ...


def test_an_answer_is_apart_from_what_is_subtracted() -> None:
    """Within one process a mean of one worker, or what is gathered, could be the delta itself."""

    @dataclass(frozen=True, kw_only=True)
    class Whole(Half):
        gathers: bool = False

        def exchange(self, bucket: Any, comm: Any) -> Any:
            if self.gathers:
                everyone = comm.gather(bucket.deltas)
                bucket.subtract(bucket.deltas)
                return [of_layer.mean(0) for of_layer in everyone]
            means = comm.mean(bucket.deltas)
            bucket.subtract(bucket.deltas)
            return means

        def traffic(self, layer: Any, level: Any, workers: int, itemsize: int = 4) -> Traffic:
            times = workers if self.gathers else 1
            return Traffic(layer.size * times, layer.size * itemsize)

    for gathers in (False, True):
        regimes.check_compressor(Whole(gathers=gathers), 1, workers=[1, 2])


def test_a_gradient_of_nan_is_no_changed_delta() -> None:
    from regimes.collectives.layers import Layer
    from regimes.collectives.world import World
    from regimes.compression.reducer import Reducer

    reducer = Reducer(Half(), [Layer("w", (2, 3))], World(2), seed=0)
    stack = torch.full((2, 2, 3), torch.nan)
    assert reducer.reduce([0], [stack], [1], None)[0].isnan().all()


def test_steps_of_two_kinds_have_the_traffic_of_their_mean() -> None:
    """Those of ACP-SGD, which sends P, then Q; and a formula that forgets it."""
    from regimes.collectives.layers import Layer
    from regimes.collectives.world import World
    from regimes.compression.powersgd import ACPSGD
    from regimes.compression.reducer import Reducer

    class Forgets(ACPSGD):
        def traffic(self, *args: Any, **kwargs: Any) -> Traffic:
            half = super().traffic(*args, **kwargs)
            return half + half

    stack = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    for halves, steps in ((1, 2), (2, 1), (3, 2)):  # two halves are both kinds in one step
        for chosen, good in (
            (ACPSGD(iterations=halves), True),
            (Forgets(iterations=halves), False),
        ):
            reducer = Reducer(chosen, [Layer("w", (5, 9))], World(2), seed=0)
            for _ in range(steps - 1):
                reducer.reduce([0], [stack], [1], None)
            if good:
                reducer.reduce([0], [stack], [1], None)
                continue
            sentence = rf"traffic says {14 * halves} floats .* exchange has passed on {7 * halves}"
            with pytest.raises(ConfigError, match=sentence):
                reducer.reduce([0], [stack], [1], None)


# -- policies --------------------------------------------------------------------------------

Decide = Callable[[Sequence[str]], Any]
POLICIES: dict[str, tuple[Decide, str]] = {
    "nothing": (lambda layers: None, "returned None, expected a list of decisions"),
    "an odd level": (
        lambda layers: [decision("odd")] * len(layers),
        "returned the level 'odd' for .*, expected one of low, high",
    ),
    "a level that is no text": (
        lambda layers: [decision(2)] * len(layers),
        "returned the level 2 for .*, expected one of low, high",
    ),
    "too few": (lambda layers: [decision("low")], "returned 1 decisions, expected one for each of"),
    "texts": (lambda layers: ["low"] * len(layers), "returned 'low' for .*, expected a Decision"),
    "why is a text": (
        lambda layers: [decision("low", "so")] * len(layers),
        "returned the reason 'so' for .*, expected a table or None",
    ),
    "why is no JSON": (
        lambda layers: [decision("low", {"x": {1}})] * len(layers),
        r"returned a reason that is no JSON \(.*set.*\), expected plain types",
    ),
    "why is large": (
        lambda layers: [decision("low", {"x": "y" * 2**23})] * len(layers),
        "returned reasons of .* bytes, expected at most 8388608 for all layers",
    ),
}


@dataclass(frozen=True)
class Odd:
    """Decides as one of ``POLICIES``, from its second unit on."""

    kind: str = ""
    first: int = 0
    needs: tuple[str, ...] = field(default=(), init=False)
    names: tuple[str, ...] = field(default=("low", "high"), init=False)

    def decide(self, history: Sequence[Any], layers: Sequence[str]) -> Any:
        if len(history) < self.first or not self.kind:
            return [Decision("low", {"rule": "mine"})] * len(layers)
        return POLICIES[self.kind][0](layers)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policys_wrong_return(kind: str, tmp_path: Path) -> None:
    table = f"policy={{name='test_plug_ins:Odd', kind='{kind}', first=1}}"
    with pytest.raises(ConfigError, match="the policy Odd " + POLICIES[kind][1]):
        regimes.run(config(*SHORT, table), tmp_path)
    assert len(load(tmp_path).rows) == 1  # and what was trained can be read


@pytest.mark.parametrize("kind", ["nothing", "an odd level", "why is a text", "why is large"])
def test_a_batch_policys_wrong_return(kind: str, tmp_path: Path) -> None:
    tables = [
        f"batch_policy={{name='test_plug_ins:Odd', kind='{kind}'}}",
        "batch_levels={low=8, high=16}",
    ]
    with pytest.raises(ConfigError, match="the policy Odd returned"):
        regimes.run(config(*SHORT, *tables), tmp_path)


# -- instruments and reporters ---------------------------------------------------------------

READINGS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "got None, expected a Reading"),
    "too few": (reading(layers={"a": [1.0]}), r"got \[1.0\], expected .* values, one for each"),
    "a text": (reading(model={"a": "b"}), "got 'b', expected a number as 'a'"),
    "a tensor": (reading(model={"a": torch.ones(1)}), "expected a number as 'a'"),
    "no table": (reading(detail=[1]), r"got \[1\], expected a table"),
    "no JSON": (reading(detail={"a": {1}}), "a line of the instrument .*Gives to .*it is no JSON"),
    "large": (reading(detail={"a": "b" * 2**24}), "a line of the instrument .*Gives .*too long"),
}


class Gauge(EndOfEpochGauge):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def read(self, epoch: int) -> Reading:
        return READINGS[self.kind][0] if self.kind else Reading(model={"a": 1.0})


@dataclass(frozen=True)
class Gives:
    kind: str = ""
    every: int = 1

    def start(self, context: Any) -> Gauge:
        return Gauge(self.kind)


@pytest.mark.parametrize("kind", READINGS)
def test_an_instruments_wrong_reading(kind: str, tmp_path: Path) -> None:
    table = f"instruments={{'test_plug_ins:Gives'={{kind='{kind}'}}}}"
    with pytest.raises(RegimesError, match=READINGS[kind][1]) as error:
        regimes.run(config(*SHORT, table), tmp_path)
    assert "test_plug_ins:Gives" in str(error.value)
    assert not read_lines(tmp_path / "epochs.jsonl")


class Raises:
    def __init__(self, folder: Path) -> None:
        raise KeyError("no key")


class Lacks:
    def __init__(self, folder: Path) -> None: ...

    def start(self, header: Any, rows: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", "cannot be made: KeyError 'no key'"),
        ("Lacks", "has no step: it needs start, step, epoch, stop"),
    ],
)
def test_a_reporter_that_is_none(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the reporter test_plug_ins:{name} {says}"):
        make_reporters([f"test_plug_ins:{name}"], tmp_path)


# -- rows ------------------------------------------------------------------------------------

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"metric": "good"}, "metric is 'good', expected a finite number"),
    "3000 %": ({"metric": 30.0}, "metric is 30.0, expected an accuracy from 0 to 1"),
    "no layer": ({"statistics": {"norm": [1.0, 2.0]}}, "statistics.norm has no 1 layers"),
    "half a letter": ({"logged": {"\udcff": 1.0}}, "it has half of a letter"),
    "no JSON": ({"model": {"a": {1}}}, "it is no JSON"),
    "too long": ({"note": "x" * 2**24}, "it is too long"),
    "too deep": ({"note": json.loads("[" * 20 + "]" * 20)}, "tables deep"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_could_not_be_read_is_not_written(kind: str, tmp_path: Path) -> None:
    folder, (changes, says) = tmp_path / "run", ROWS[kind]
    writer = RecordWriter.create(folder, plain.header())
    writer.epoch(plain.row(0), {"compute": 1.0})
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RecordError, match=f"cannot write a line to .*epochs.jsonl: .*{says}"):
        writer.epoch(plain.row(1, **changes), {"compute": 1.0})
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    writer.close()
    again = RecordWriter.resume(folder, 1)
    with pytest.raises(RecordError, match=says):
        again.epoch(plain.row(1, **changes), {"compute": 1.0})
    again.epoch(plain.row(1), {"compute": 1.0})
    again.close()
    assert len(load(folder).rows) == 2


def test_a_name_that_is_not_utf_8_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RegimesError, match="a text in it is not UTF-8"):
        regimes.run(config(*SHORT, "name=\udcff"), tmp_path / "run")
    assert not (tmp_path / "run/run.json").exists()
