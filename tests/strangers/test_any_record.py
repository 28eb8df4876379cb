"""Any value at any place of a record: read by every reader, or refused in one sentence.

Oracles: what the record held before (a text where a number was is refused), and the readers
themselves, which end in a result or in a sentence of `RegimesError`.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import regimes
from regimes.base.errors import RecordError, RegimesError
from regimes.cli.machine import judge_record
from regimes.cli.monitor import watch_runs
from regimes.policies.replay import detect
from regimes.records import RecordWriter, load, load_all, read_lines, summary

MISSING = object()
NUMBERS = [-1, 0, 1, 2, 10**30, 10**400, 2**63, -0.5, 1e200, 1e308, float("inf"), float("nan")]
TEXTS = ["", "x", "low", "\x1b[2J", "a\nb", "[/nope]", "$\\frac{$", "x" * 2000]
LISTS: list[Any] = [[], [0], [-1], [None], ["low"], [[]], [1, 2, 3], [{}]]
TABLES: list[Any] = [{}, {"x": {}}, {"name": 3}, {"low": -1}, {"mean": 1e200}]
HOSTILE = [*NUMBERS, *TEXTS, *LISTS, *TABLES, None, True, False, MISSING]
FREE = (  # what the schema leaves to plug-ins, to machines and to later versions
    "config.compressor.",
    "config.data.deficit",
    "config.policy.",
    "config.levels.",
    "config.instruments",
    "config.reporters",
    "config.checkpoint",
    "config.optimizer.decay_epochs",
    "config.resume",
    "code",
    "machine",
    "data.classes",
    "data.loss",
    "data.metric",
    "layers.why.",
    "batch.why",
    "sync.why",
    "further",
)
ROW: dict[str, Any] = {
    "unit": {"first": 0, "stop": 2},
    "perplexity": 2.5,
    "batch": {"level": "low", "multiple": 1, "why": {"rule": "start"}},
    "skipped": 0,
    "sync": {"level": "low", "period": 2, "rounds": 1, "why": {"rule": "start"}},
    "churn": {"present": 4, "worker_steps": 8, "left": [{"worker": 1, "step": 1}]},
    "validation": {"loss": 1.2, "metric": 0.4},
    "model": {"eigenvalue": 3.0},
    "logged": {"mine": 1.0},
    "further": {"kept": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record with every table that the schema names."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = {"unit_steps": 2, "dtype": "float32", "warmup_steps": None, "epochs": 3}
    header = plain.header(
        {key: value for key, value in config.items() if value is not None},
        units=3,
        budget=30.0,
        code={"version": "0.4.0", "commit": None},
        machine={"gpus": ["none"], "torch": "2.13.0"},
    )
    writer = RecordWriter.create(folder, header)
    for epoch in range(3):
        changes = copy.deepcopy(ROW) | {"unit": {"first": 2 * epoch, "stop": 2 * epoch + 2}}
        writer.epoch(plain.row(epoch, **changes), {"compute": 1.0, "evaluate": 0.5})
    writer.event("end")
    writer.close()
    return folder


def find_paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_paths(inner, (*path, key))


def replace(table: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """What stood there."""
    for key in path[:-1]:
        table = table[key]
    before = table[path[-1]]
    if value is not MISSING:
        table[path[-1]] = copy.deepcopy(value)
    else:
        del table[path[-1]]
    return before


def must_refuse(path: tuple[str | int, ...], before: Any, value: Any) -> bool:
    """Is the value of another kind than the one that a run has written there?"""
    name = ".".join(str(key) for key in path if not isinstance(key, int))
    if value in (MISSING, None) or before is None or f"{name}.".startswith(FREE):
        return False
    if isinstance(value, float) and not math.isfinite(value):  # is read as null
        return False

    def kind(x: Any) -> type:
        return float if type(x) is int else type(x)

    return kind(before) is not kind(value)


def read_everything(folder: Path) -> None:
    """What the commands make of one record that `load` accepts."""
    run = load(folder)
    summary([run])
    regimes.frame(folder)
    regimes.frame(folder, layers=True)
    detect.main([folder], ["first-share:share=0.5"], None)
    watch_runs(folder, once=True)
    judge_record(folder)
    load_all(folder.parent)


FILES = ("run.json", "epochs.jsonl", "seconds.jsonl", "events.jsonl", "chain.jsonl")


NEEDED = {  # what a record cannot be read without
    "run.json": {
        *("schema", "config", "world", "data", "metric", "per_step", "layers", "steps_per_epoch"),
        *(f"config.{x}" for x in ("name", "seed", "epochs", "workers", "levels", "signal")),
        *(f"config.{x}" for x in ("compressor", "data", "model", "optimizer", "policy")),
        *(f"config.{x}.name" for x in ("compressor", "data", "model", "policy")),
        *("world.processes", "world.workers", "data.digest"),
        *("per_step.low.floats", "per_step.low.bytes"),
    },
    "epochs.jsonl": {
        *("epoch", "lr", "next_lr", "steps", "batch_size", "floats", "bytes", "statistics"),
        *("train_loss", "test_loss", "metric", "churn.present", "churn.worker_steps"),
        *("layers", *(f"layers.{x}" for x in ("level", "floats", "bytes", "why"))),
        *("unit", "unit.first", "unit.stop", "collectives"),
        *(f"collectives.{x}{of}" for x in ("bytes", "calls") for of in ("", ".mean", ".gather")),
    },
}


def read_json(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return [json.loads(x) for x in ([text] if file.suffix == ".json" else text.splitlines())]


def edit(file: Path, at: int, path: tuple[str | int, ...], value: Any) -> Any:
    """Put the value there; what stood there before."""
    lines = read_json(file)
    before = replace(lines[at], path, value)
    file.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return before


@pytest.mark.parametrize("name", ["run.json", "epochs.jsonl"])
def test_no_place_may_have_another_kind_of_value_or_none(
    name: str, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    text = (folder / name).read_text()
    needed = set()
    for path in find_paths(read_json(folder / name)[-1]):
        for value in (MISSING, 7, "x", [{}]):
            before, said = edit(folder / name, -1, path, value), ""
            try:
                load(folder)
            except RecordError as error:
                said = str(error)
            assert said or not must_refuse(path, before, value), (path, value)
            if value is MISSING and said:
                assert str(path[0]) in said, path
                needed.update([".".join(path)] if {*map(type, path)} == {str} else [])
            (folder / name).write_text(text)
    assert needed == NEEDED[name]


@settings(max_examples=80, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
@given(data=st.data(), name=st.sampled_from(FILES), value=st.sampled_from(HOSTILE))
def test_any_value_of_any_place_is_read_or_refused_in_one_sentence(
    whole: Path, data: st.DataObject, name: str, value: Any
) -> None:
    folder = whole.parent / "runs" / "run"
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(whole, folder)
    lines = read_json(folder / name)
    at = data.draw(st.integers(0, len(lines) - 1), label="line")
    path = data.draw(st.sampled_from(sorted(find_paths(lines[at]), key=str)), label="path")
    before = edit(folder / name, at, path, value)
    said = ""
    try:
        if name not in ("run.json", "epochs.jsonl"):
            read_lines(folder / name)
        load(folder)
    except RecordError as error:
        said = str(error)
    case = (name, at, path, value)
    if must_refuse(path, before, value):
        assert f"{name}" in said, case
        assert "is damaged: " in said, case
        assert str(path[0]) in said.partition("is damaged")[2], (case, said)
    assert "\n" not in said, (case, said)
    assert not set(said) & set(map(chr, range(32))), (case, said)
    try:
        read_everything(folder)
    except Exception as error:
        if not isinstance(error, RegimesError) or "\n" in str(error):
            raise AssertionError(case) from error
