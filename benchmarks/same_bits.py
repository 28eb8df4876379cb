"""Two versions of the code held against each other: the same records, byte for byte?

``python -m benchmarks.same_bits [--base COMMIT] [--only NAME ...]`` trains the configurations below
with the code of a commit and with the present tree, on this machine, and compares what they
recorded. A rebuilt house must not change a number. What changes on purpose moves ``BASE``, and the
fields are listed in ``ON_PURPOSE`` with the reason. About 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BASE = "372c93a"  # the commit that records are compared with
ON_PURPOSE = {  # field of a row, dotted -> why it differs from the base
    "bytes": "what instruments send is counted apart",
    "collectives.calls.mean": "likewise",
    "collectives.bytes.mean": "likewise",
}
FILES = ("epochs.jsonl", "instruments.jsonl")

TOPK = ("compressor=topk", "levels.low=50", "levels.high=2")
TEXT = (
    "data.name=wikitext-2",
    "data.path=TEXT",
    "data.sequence=10",
    "data.train_size=none",
    "data.drop_last=false",
    "model.width=8",
    "batch_size=3",
    "optimizer.lr=1.0",
)
ALL = (
    "union_pass=false",
    'instruments.norms.readings=["update","global","local-mean","worker0"]',
    "instruments.curvature.probes=2",
    "instruments.curvature.images=40",
    "instruments.curvature.batch=20",
    'instruments.curvature.modes=["eval","batch-statistics"]',
    "instruments.sharpness.images=40",
    "instruments.sharpness.batch=20",
    "instruments.fisher.images=40",
    "instruments.fisher.batch=20",
    "instruments.overlap.count=2",
    "instruments.overlap.batches=[16,32]",
    "instruments.noise.stride=1",
    "instruments.msdr={}",
    "instruments.error.stride=8",
    "instruments.moments.stride=4",
    "instruments.moments-frozen.count=6",
)


@dataclass(frozen=True)
class Case:
    """One configuration: ``smoke`` cut short, and changed.

    Attributes:
        processes: real gloo processes that share the 4 workers.
        resumed: the run loses its last epoch and checkpoint, and is continued.
    """

    name: str
    settings: tuple[str, ...] = ()
    processes: int = 1
    resumed: bool = False


def _batch(policy: str, *more: str) -> tuple[str, ...]:
    return (
        "batch_levels={low=8,high=16,x1=8,x5=16,x25=24}",
        f"batch_policy={policy}",
        "policy=static",
        *more,
    )


CASES = [
    # compressors
    Case("powersgd"),
    Case("powersgd-forgets", ("compressor.reset_on_change=true",)),
    Case("topk", TOPK),
    Case(
        "topk-sum",
        (
            *TOPK,
            "compressor.reduction=sum",
            "compressor.error_feedback=false",
            "signal=worker0",
            "data.reshuffle=false",
            "optimizer.lr=0.1",
        ),
    ),
    Case("randomk", ("compressor=randomk", "levels.low=50", "levels.high=10")),
    Case(
        "sign",
        (
            "compressor=sign",
            "levels={only=1}",
            "policy=static",
            "policy.level=only",
            "optimizer.lr=0.02",
        ),
    ),
    Case("quantise", ("compressor=quantise", "levels.low=8", "levels.high=4")),
    Case("cast", ("compressor=cast", 'levels.low="fp16"', 'levels.high="bf16"')),
    Case("dense", ("compressor=dense", "levels={}", "policy=static", "policy.level=dense")),
    Case("low-pass", ("compressor=low-pass", "levels.low=0.5", "levels.high=0.1")),
    Case("acp-sgd", ("compressor=acp-sgd",)),
    Case("acp-sgd-twice", ("compressor=acp-sgd", "compressor.iterations=2")),
    Case("dct-topk", ("compressor=dct-topk", "levels.low=20", "levels.high=2")),
    Case("fading", (*TOPK, "compressor.error_feedback=0.9")),
    # policies
    Case("windows", ("policy=windows", "policy.windows=[[0,1]]", "policy.outside=dense")),
    Case(
        "detected",
        (
            "policy=detected",
            'policy.detector={name="eigenvalue-change",interval=1}',
            "instruments.curvature.images=40",
            "instruments.curvature.batch=20",
        ),
    ),
    Case("adaqs", ("policy=adaqs", "policy.fall=0.1", "levels.mid=2")),
    Case("error-ladder", ("policy=error-ladder", "policy.error=0.3", "levels.mid=2")),
    Case("accordion-ladder", ("policy=accordion-ladder", "policy.interval=1", "levels.mid=2")),
    Case("l-greco", ("policy=l-greco", 'policy.base={name="static",level="mid"}', "levels.mid=2")),
    Case("gravac", ("policy=gravac", "policy.gain=0.5", "levels.mid=2")),
    Case("accordion-batch", _batch('{name="accordion-batch",interval=1}')),
    Case("smith", _batch('{name="smith"}', "optimizer.decay_epochs=[1,2]")),
    Case("joint", ("batch_levels={low=8,high=16}", 'batch_policy={name="accordion-batch"}')),
    Case("budget", ('budget={level="high",epochs=2}', "epochs=6")),
    # signals, instruments
    *(Case(f"signal-{s}", (f"signal={s}",)) for s in ("global", "local-mean", "worker0")),
    Case("instruments", ALL),
    Case("instruments-float64", (*ALL, "dtype=float64", *TOPK)),
    # passes
    Case("worker-by-worker", ("union_pass=false",)),
    Case("clipped", ("optimizer.clip=0.5",)),
    Case("channels-last", ("channels_last=true",)),
    Case("bfloat16", ("autocast=bfloat16",)),
    Case("float64", ("dtype=float64",)),
    # deficits
    *(
        Case(f"deficit-{d}", (f'deficit={{name="{d}",windows=[[0,2]]}}',))
        for d in ("blur", "flip", "noise", "labels", "gradient-noise")
    ),
    # models and texts
    Case("resnet8", ('model={name="resnet8",width=4}', "epochs=2")),
    Case("lstm", (*TEXT, 'model={name="lstm",width=8,depth=2,dropout=0.2}')),
    Case("transformer", (*TEXT, 'model={name="transformer",width=8,depth=1}', *TOPK)),
    # resumed, and on several processes
    Case("resumed", (), resumed=True),
    Case("resumed-topk", TOPK, resumed=True),
    Case("two-processes", (), 2),
    Case("two-processes-buckets", ("parcel_mb=0.02",), 2),
    Case("two-processes-topk-float64", (*TOPK, "dtype=float64", "parcel_mb=0.02"), 2),
    Case("two-processes-instruments", (*ALL, "dtype=float64"), 2),
    Case("two-processes-resumed", ("parcel_mb=0.02",), 2, resumed=True),
]


# -- in a process of its own, with the code of one tree -----------------------------------------


def train(cases: list[str], out: Path, text: Path) -> None:
    """Train the named cases into folders of their names."""
    import regimes

    print("code:", Path(regimes.__file__).parents[1], flush=True)
    assert Path(regimes.__file__).parents[1] == Path.cwd(), "the code of another tree"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for case in CASES:
        if case.name not in cases:
            continue
        short = [
            "epochs=3",
            "data.train_size=120",
            "data.test_size=100",
            "policy.interval=1",
            "optimizer.decay_epochs=[2]",
            "device=cpu",
        ]
        given = [setting.replace("TEXT", str(text)) for setting in case.settings]
        config = regimes.override(regimes.get_preset("smoke"), [*short, *given])
        folder = out / case.name
        _run(config, folder, case.processes, resume=False)
        if case.resumed:
            last = sorted((folder / "checkpoints").glob("epoch-*"))[-1]
            shutil.rmtree(last)
            _run(config, folder, case.processes, resume=True)


def _run(config: Any, folder: Path, processes: int, resume: bool) -> None:
    import regimes

    if processes == 1:
        regimes.run(config, folder, resume=resume)
        return
    toml = folder.with_suffix(".toml")
    toml.write_text(regimes.to_toml(config))
    command = [
        sys.executable,
        "-m",
        "regimes",
        "run",
        str(toml),
        "--processes",
        str(processes),
        "--out",
        str(folder),
        "--quiet",
        *(["--resume"] if resume else []),
    ]
    subprocess.run(command, check=True)


# -- the comparison -----------------------------------------------------------------------------


def unpack(commit: str, place: Path) -> None:
    """The tree of a commit."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")


def write_text(place: Path) -> Path:
    """A walk over ten words in the files of WikiText-2."""
    place.mkdir()
    words = ["cat", "dog", "bird", "the", "a", "saw", "heard", ".", ",", "and"]
    for name, count in (("train", 100), ("valid", 25), ("test", 25)):
        lines = [
            " ".join(words[(7 * i + i * i * j + 3 * j) % 10] for j in range(7))
            for i in range(count)
        ]
        (place / f"wiki.{name}.tokens").write_text("\n".join(f" {x} " for x in lines) + "\n")
    return place


def run_tree(tree: Path, cases: list[str], out: Path, text: Path) -> None:
    """Train with the code of ``tree``; what it says goes to ``out``.log."""
    code = (
        "import pathlib, runpy, sys; "
        "module = runpy.run_path(sys.argv[1], run_name='same_bits'); "
        "module['train'](sys.argv[4:], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))"
    )
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code, __file__, str(out), str(text), *cases]
    with out.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, env=env, cwd=tree, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {out.with_suffix('.log').read_text()[-2000:]}")


def differences(before: Path, after: Path) -> Iterator[tuple[str, str]]:
    """(dotted field, file and line) of everything that is not the same."""
    for name in FILES:
        texts = [(x / name).read_bytes() if (x / name).exists() else b"" for x in (before, after)]
        if texts[0] == texts[1]:
            continue
        old, new = (text.splitlines() for text in texts)
        if len(old) != len(new):
            yield "(number of lines)", f"{name}: {len(old)} and {len(new)}"
        for number, pair in enumerate(zip(old, new, strict=False), start=1):
            if pair[0] != pair[1]:
                fields = list(_fields(*map(json.loads, pair))) or ["(spelling)"]
                yield from ((field, f"{name} line {number}") for field in fields)


def _fields(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _fields(a.get(key), b.get(key), f"{where}.{key}".lstrip("."))
    elif json.dumps(a) != json.dumps(b):
        yield where


def compare(case: Case, before: Path, after: Path) -> tuple[bool, str]:
    """(as expected?, one line)."""
    found: dict[str, str] = {}
    for field, place in differences(before / case.name, after / case.name):
        found.setdefault(field, place)
    if not found:
        return True, "same bytes"
    wrong = {field: place for field, place in found.items() if field not in ON_PURPOSE}
    words = "; ".join(f"{field} ({place})" for field, place in (wrong or found).items())
    return not wrong, f"{'DIFFERS' if wrong else 'same but'}: {words}"


def main() -> None:
    """Train, compare, say what differs; exit code 1 if anything does that is not listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default=BASE, help="the commit to compare with")
    parser.add_argument("--only", nargs="+", default=[c.name for c in CASES], metavar="NAME")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        place = Path(scratch)
        unpack(chosen.base, place / "tree")
        text = write_text(place / "text")
        outs = place / "before", place / "after"
        for out in outs:
            out.mkdir()
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(run_tree, tree, chosen.only, out, text)
                for tree, out in zip((place / "tree", ROOT), outs, strict=True)
            ]
            for job in jobs:
                job.result()
        good = True
        for case in CASES:
            if case.name in chosen.only:
                same, words = compare(case, *outs)
                good &= same
                print(f"{case.name:32} {words}", flush=True)
    for field, why in ON_PURPOSE.items():
        print(f"on purpose: {field}: {why}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
