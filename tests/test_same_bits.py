"""The comparison of two trees sees what it must: numbers, weights, launches, memory (oracle: case
folders made by hand, steps counted by hand)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.same_bits import attached, exchanges, states, trainer
from benchmarks.same_bits.__main__ import kept
from benchmarks.same_bits.cases import CASES
from benchmarks.same_bits.compare import compare
from benchmarks.same_bits.local import ShardedSteps
from benchmarks.same_bits.meter import Meter
from regimes import compression, policies

COUNTS = {"launches": 10, "collectives": 2, "held": 1000, "peak": None}


def made(folder: Path) -> Path:
    """What a case leaves."""
    folder.mkdir()
    folder.with_name(f"{folder.name}.done").write_text("")
    (folder / "run").mkdir()
    (folder / "run" / "epochs.jsonl").write_text(
        '{"epoch":0,"lr":0.1,"layers":{"level":["low"]}}\n'
    )
    (folder / "run" / "run.json").write_text('{"units":1,"machine":{"cores":2}}')
    state = {"model": {"weight": torch.ones(2)}, "residual": {"weight": torch.zeros(2)}}
    states.write(folder, 0, state)
    (folder / "counts.json").write_text(json.dumps(COUNTS))
    return folder


def cost(**changes: int) -> Callable[[Path], object]:
    return lambda f: (f / "counts.json").write_text(json.dumps(COUNTS | changes))


def residual(value: torch.Tensor | None) -> Callable[[Path], object]:
    left = {} if value is None else {"residual": {"weight": value}}
    return lambda f: states.write(f, 0, {"model": {"weight": torch.ones(2)}, **left})


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda f: (f / "run" / name).write_text((f / "run" / name).read_text().replace(old, new))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a number": (edit("epochs.jsonl", "0.1", "0.2"), "DIFFERS: lr (run/epochs.jsonl line 1)"),
    "a level": (edit("epochs.jsonl", "low", "high"), "DIFFERS: layers.level (run/epochs.jsonl"),
    "a row more": (edit("epochs.jsonl", "}\n", "}\n{}\n"), "DIFFERS: (number of lines)"),
    "no record": (lambda f: (f / "run" / "epochs.jsonl").unlink(), "DIFFERS: (number of lines)"),
    "the header": (edit("run.json", '"units":1', '"units":2'), "DIFFERS: units (run/run.json)"),
    "a bit": (residual(torch.tensor([0.0, -0.0])), "DIFFERS: residual/weight (weights-0.json)"),
    "a type": (residual(torch.zeros(2).double()), "DIFFERS: residual/weight (weights-0.json)"),
    "nothing saved": (residual(None), "DIFFERS: residual/weight (weights-0.json)"),
    "an operator": (cost(launches=11), "MORE: launches 10 -> 11"),
    "a collective": (cost(collectives=3), "MORE: collectives 2 -> 3"),
    "memory": (cost(held=1011), "MORE: held 1000 -> 1011"),
    "an error": (
        lambda f: f.with_name(f"{f.name}.done").write_text("a\nb"),
        "FAILED in the present",
    ),
}
RIGHT: dict[str, Callable[[Path], object]] = {
    "nothing": lambda f: None,
    "another machine": edit("run.json", '"cores":2', '"cores":4'),
    "less": cost(launches=9, collectives=1, held=900),
    "a little memory": cost(held=1010),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_is_said(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    change(after := made(tmp_path / "after"))
    good, said = compare(made(tmp_path / "before"), after, {})
    assert not good
    assert said.startswith(words)


@pytest.mark.parametrize("name", RIGHT)
def test_what_may_differ_does_not_fail(name: str, tmp_path: Path) -> None:
    RIGHT[name](after := made(tmp_path / "after"))
    good, said = compare(made(tmp_path / "before"), after, {})
    assert good
    assert said.startswith("same, 2 values")


def test_a_field_that_differs_on_purpose_does_not_fail(tmp_path: Path) -> None:
    edit("epochs.jsonl", "0.1", "0.2")(after := made(tmp_path / "after"))
    assert compare(made(tmp_path / "before"), after, {"lr": "a reason"})[0]


def test_steps_are_counted_in_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second of three steps: an addition and a product, of which a thread does one."""
    monkeypatch.setattr(threading.Thread, "run", threading.Thread.run)
    meter, x = Meter(1, 1), torch.ones(1000)
    for _ in range(3):
        y = (x + x).view(10, 100).T
        thread = threading.Thread(target=lambda y=y: y * 2)
        thread.start()
        thread.join()
        meter.step()
    meter.write(tmp_path)
    assert meter.counts is not None
    assert (meter.launches, meter.collectives, meter.counts["peak"]) == (2, 0, None)


def test_memory_is_that_of_the_step_at_its_highest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """8,000 bytes at once, of which 4,000 stay; the third step takes more and does not count."""
    monkeypatch.setattr(threading.Thread, "run", threading.Thread.run)
    x, meter, kept = torch.ones(1000), Meter(1, 1), []
    for step in range(3):
        y = x + 1
        z = y + 1
        if step == 1:
            before = {t.untyped_storage()._cdata for t in (x, z)}
        del y
        kept.append(z)
        meter.step()
    assert len(before) == 2
    assert meter.counts is not None
    assert meter.counts["peak"] == 8000


def test_too_few_steps_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threading.Thread, "run", threading.Thread.run)
    meter = Meter(2, 1)
    meter.step()
    with pytest.raises(ValueError, match="1 steps, of which 2 to 3 count"):
        meter.write(tmp_path)


def test_every_compressor_and_policy_has_a_case() -> None:
    """In the trainer; every compressor under a hook, too."""
    settings = " ".join(setting for run in trainer.RUNS.values() for setting in run)
    words = {*re.findall(r"[\w-]+", settings), "powersgd", "accordion"}  # those of the preset
    assert {*compression.REGISTRY, *policies.REGISTRY} <= words
    assert {*compression.REGISTRY, "dct-topk", "low-pass", "threshold"} == exchanges.PAIRS.keys()


def test_quick_has_a_case_of_each_kind() -> None:
    quick = [case for case in CASES if case.quick]
    kinds = {type(case) for case in CASES} - {ShardedSteps}  # Sharded and Stepped are there
    assert {type(case) for case in quick} == kinds
    assert {count for case in quick for count in case.counts} >= {1, 2, 4}


def test_one_file_alone_calls_what_attaches() -> None:
    """A later signature is translated there, and the cases stay as they are."""
    named = re.compile(rf"regimes\.({'|'.join(attached.STARTERS)}|RecordOptions)\(")
    folder = Path(attached.__file__).parent
    found = {file.name for file in folder.glob("*.py") if named.search(file.read_text())}
    assert found == {"attached.py"}


def test_collectives_of_fsdp2_have_cases_of_both_numbers_of_bits() -> None:
    names = {case.name for case in CASES}
    for kind in ("own", "own-within"):
        for bits in (8, 4):
            assert {f"fsdp2-{kind}-{bits}", f"fsdp2-{kind}-{bits}-gather"} <= names


def test_a_kept_result_depends_on_its_case_alone(tmp_path: Path) -> None:
    places = {kept(tmp_path, "code", case) for case in CASES}
    assert len(places) == len(CASES)
    assert kept(tmp_path, "other code", CASES[0]) not in places
    copies = [replace(case) for case in CASES]
    assert {kept(tmp_path, "code", case) for case in copies} == places
