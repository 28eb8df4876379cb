"""Strangers' configurations, records, folders and calls: one sentence or none, no traceback.

    python tests/shared/fuzz.py --seconds 600          # `make fuzz`; prints its seed
    python tests/shared/fuzz.py --seed 7               # the same examples again

`test_fuzz.py` tries a few of them. What fails is shrunk and printed as the call that fails again.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fuzz_hook
import fuzz_images
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from outcome import one_sentence, seen
from plain import record as make
from rich.console import Console

import regimes
from regimes.base.config import RunConfig, override
from regimes.cli.machine import judge_record
from regimes.cli.monitor import watch_runs
from regimes.policies.replay import detect
from regimes.records import load
from regimes.training.build import prepare_run
from regimes.training.quirks import resolve_quirks

BASE = ["epochs=2", "data.train_size=100", "data.test_size=100", "optimizer.decay_epochs=[]"]
ODD = [
    "-1",
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "-0.5",
    "1e-300",
    "1e300",
    "inf",
    "nan",
    "none",
    "true",
    "false",
    "''",
    "'x'",
    "'dense'",
    "'low'",
    "[]",
    "[0]",
    "[-1]",
    "[1, 1]",
    "[[0, 1]]",
    "[[1, 0]]",
    "{}",
    "{name = 'x'}",
    "{name = 3}",
    "'os:path'",
    "'no.such:Thing'",
    "regimes:Static",
    "regimes:PowerSGD",
    "torch.nn:Linear",
    "1979-05-27",
    "\u2603",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "[" * 50,
]
NAMES = {
    "model.name": ["vgg7", "resnet18", "gpt", "lstm"],
    "optimizer.name": ["sgd", "adamw", "muon", "torch.optim:Adam"],
    "optimizer.schedule": ["cosine", "linear", "wsd", "cyclic", "constant"],
    "compressor": ["powersgd", "topk", "randomk", "sign", "quantise", "cast", "dense", "low-pass"],
    "policy": ["static", "windows", "accordion", "adaqs", "smith", "detected"],
    "batch_policy": ["static", "accordion-batch"],
    "deficit": ["blur", "noise", "labels"],
}
SLOW = {
    "compile",
    "data.download",
    "data.name",
    "model.depth",
    "data.path",
}  # minutes, or a network
VALUES = [
    -1,
    0,
    1,
    3,
    2**63,
    10**30,
    0.5,
    -0.5,
    1e308,
    None,
    True,
    "",
    "x",
    "\x1b[2J",
    "[/b]",
    [],
    [1],
    ["low"],
    {},
    {"name": "x"},
    {"a": [[[]]]},
]


def fields(cls: Any = RunConfig, prefix: str = "") -> list[str]:
    """The paths of all fields of a configuration, and some that are none."""
    found = []
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        inner = fields(type(default), f"{prefix}{field.name}.") if _is_table(default) else []
        found += [prefix + field.name, *inner]
    return found


def _is_table(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


PATHS = sorted(
    {
        *fields(),
        "levels.low",
        "levels.high",
        "policy.eta",
        "policy.interval",
        "policy.windows",
        "batch_levels.low",
        "budget.epochs",
        "instruments.fisher.batch",
        "instruments.curvature.probes",
        "deficit.windows",
        "nothing",
        "epochs.x",
    }
    - SLOW
)


@st.composite
def setting(draw: Any) -> str:
    """``a.b=value``."""
    path = draw(st.sampled_from(PATHS))
    known = st.sampled_from(NAMES.get(path, ODD))
    return f"{path}={draw(st.one_of(known, st.sampled_from(ODD)))}"


def configurations(words: list[str]) -> None:
    """Checked and built, not trained."""

    def build() -> None:
        prepare_run(resolve_quirks(override(regimes.get_preset("smoke"), [*BASE, *words]))).close()

    one_sentence("configurations", build)


@st.composite
def edit(draw: Any) -> tuple[str, str, float, float, Any]:
    """(file, how, from where, to where, with what) of a record."""
    files = ("run.json", "epochs.jsonl", "seconds.jsonl", "events.jsonl", "chain.jsonl")
    how = draw(st.sampled_from(("cut", "double", "bytes", "value", "without")))
    share = st.floats(0, 1)
    what = draw(st.binary(max_size=6) if how == "bytes" else st.sampled_from(VALUES))
    return draw(st.sampled_from(files)), how, draw(share), draw(share), what


def apply(folder: Path, change: tuple[str, str, float, float, Any]) -> None:
    name, how, first, last, what = change
    file = folder / name
    content = file.read_bytes()
    start, stop = sorted((int(first * len(content)), int(last * len(content))))
    if how in ("cut", "double", "bytes"):
        middle = {"cut": b"", "double": content[start:stop] * 2, "bytes": what}[how]
        if how == "bytes":
            stop = start + len(what)
        file.write_bytes(content[:start] + middle + content[stop:])
        return
    try:
        rows = [json.loads(content)] if name == "run.json" else [*map(json.loads, _lines(content))]
    except ValueError:  # an edit before has broken it
        return
    if rows:
        _change(rows[int(first * (len(rows) - 1))], last, what, remove=how == "without")
        ends = "" if name == "run.json" else "\n"
        file.write_text("".join(json.dumps(row) + ends for row in rows))


def _lines(content: bytes) -> list[bytes]:
    return [line for line in content.split(b"\n") if line]


def _change(table: Any, place: float, what: Any, remove: bool) -> None:
    """One value of all that a table holds, at any depth."""
    slots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(pairs):
            slots.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    if isinstance(table, dict | list):
        walk(table)
    if slots:
        node, key = slots[int(place * (len(slots) - 1))]
        if remove:
            del node[key]
        else:
            node[key] = what


def records(changes: list[tuple[str, str, float, float, Any]]) -> None:
    """Read as the commands that only read do."""
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(_whole(), Path(place, "run"))
        for change in changes:
            apply(folder, change)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        quiet = Console(file=io.StringIO())
        for work in (
            lambda: load(folder),
            lambda: watch_runs(folder, once=True, console=quiet),
            lambda: judge_record(folder),
            lambda: detect.bench_detectors([load(folder)], ["first-share:share=0.5"]),
        ):
            one_sentence("records", work)
        assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


_made: list[tempfile.TemporaryDirectory] = []


def _whole() -> Path:
    """A record of three epochs, made once."""
    if not _made:
        _made.append(tempfile.TemporaryDirectory())
        make(Path(_made[0].name, "run"))
    return Path(_made[0].name, "run")


PROPERTIES: dict[str, tuple[Callable[..., None], list[Any], list[Any]]] = {
    # what is tried, with which arguments, and some that are always tried
    "configurations": (
        configurations,
        [st.lists(setting(), min_size=1, max_size=2)],
        [
            ["optimizer.lr=1e200"],
            ["policy.name=regimes:PowerSGD"],
            ["instruments.curvature.probes=1979-05-27"],
            ["epochs=9223372036854775807"],
            ["optimizer.decay_epochs=[1]", "optimizer.decay_factor=1e-300"],
        ],
    ),
    "records": (records, [st.lists(edit(), min_size=1, max_size=3)], []),
    "folders": (fuzz_images.folders, [fuzz_images.tree()], []),
    "hook": (fuzz_hook.hook, [fuzz_hook.arguments, fuzz_hook.calls], []),
}


def tried(name: str, examples: int, number: int) -> None:
    """So many examples of one property; the first that fails is raised, shrunk."""
    work, strategies, always = PROPERTIES[name]
    few = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )

    def fresh(what: tuple[Any, ...]) -> None:  # one property cannot be given settings twice
        work(*what)

    checked: Any = given(st.tuples(*strategies))(fresh)
    for what in always:
        checked = example((what,))(checked)
    seed(number)(few(checked))()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, help="of one round, as a failure has named it")
    parser.add_argument("--only", default="", help="properties whose name contains this")
    parser.add_argument("--examples", type=int, default=100, help="of a property in a round")
    chosen = parser.parse_args()
    end, failed, number = time.monotonic() + chosen.seconds, 0, chosen.seed
    while True:
        number = secrets.randbelow(10**9) if chosen.seed is None else chosen.seed
        for name in (name for name in PROPERTIES if chosen.only in name):
            try:
                tried(name, chosen.examples, number)
            except Exception as error:  # what was looked for
                for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
                    failed += 1
                    notes = "\n".join(getattr(one, "__notes__", []))
                    said = f"{type(one).__name__}: {one}\n{notes}"
                    print(f"seed {number}, {name}: {said}", flush=True)
        print(f"seed {number}: {dict(seen)}, {failed} failures", flush=True)
        if chosen.seed is not None or time.monotonic() > end:
            return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
