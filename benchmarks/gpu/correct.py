"""Part 1: does the device compute what the CPU computes? Each check gives a sentence, or raises."""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.curvature import largest
from benchmarks.gpu.place import Place, ended, rows, short, start, trained
from regimes import compression
from regimes.base.errors import ConfigError, RegimesError
from regimes.compression.orthonormal import TINY

INSTRUMENTS = (
    'instruments.norms.readings=["update","global","local-mean","worker0"]',
    "instruments.curvature={probes=2, images=40, batch=20}",
    "instruments.fisher={images=40, batch=20}",
    "instruments.noise.stride=1",
    "instruments.msdr={}",
    "instruments.error.stride=2",
    "instruments.overlap={batches=[16], count=2}",
    "instruments.moments.stride=2",
    "instruments.moments-frozen={batch=8, count=4}",
)
# Limits of a relative difference after ten steps in float64. They do not diverge: the last bit of
# the momentum (2e-16) moves a row by 5e-15.
ROUNDED = 1e-10  # sums of up to 10,000 terms in another order: 10,000 times 5e-15, and twice that
# A GPU completes the bases of PowerSGD and ACP-SGD by TINY of a matrix's norm in each step, a CPU
# does not: ten steps, ten times (measured with a CPU's kernels on that path: 6 times TINY).
COMPLETED = dict.fromkeys(("powersgd", "acp-sgd"), 100 * TINY)
# Instruments of such a run: a trace or an unbiased estimate is the difference of sums that are up
# to a thousand times as large (measured: 7e-13 for the last bit of the momentum).
MEASURED = 1000 * COMPLETED["powersgd"]
ROUGH = 1e-6  # Adam divides by the gradient's own size, which for some coordinates is rounding
HALF_PRECISION = 5e-2  # torch's Muon orthogonalises in bfloat16, of which 4e-3 is the last bit
ALIKE = 2e-2  # two estimates of one eigenvalue in float32, each to a tolerance of 1e-3


class Difference(Exception):
    """A check has found one."""


def numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a row, with their places."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(part, f"{where}.{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from numbers(part, f"{where}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, float(value)


def apart(a: Any, b: Any) -> tuple[float, str]:
    """The largest relative difference of two rows' numbers, and where it is.

    Raises:
        Difference: one has a number that the other has not.
    """
    ours, theirs = dict(numbers(a)), dict(numbers(b))
    if ours.keys() != theirs.keys():
        raise Difference(f"only one has {sorted(ours.keys() ^ theirs.keys())[0]}")
    worst = (0.0, "")
    for place, x in ours.items():
        y = theirs[place]
        if x != y and not (math.isnan(x) and math.isnan(y)):
            gap = abs(x - y) / max(abs(x), abs(y)) if math.isfinite(x + y) else math.inf
            worst = max(worst, (gap, place))
    return worst


def within(limit: float, a: Any, b: Any) -> str:
    """A sentence about two records' rows.

    Raises:
        Difference: they are further apart.
    """
    gap, place = apart(a, b)
    if gap > limit:
        raise Difference(f"{place or 'it'} is {gap:.1e} apart, relative; the limit is {limit:.0e}")
    return f"at most {gap:.1e} apart, relative" if gap else "equal, bit for bit"


def fresh(place: Place, name: str) -> Path:
    """An empty folder of a check."""
    folder = place.out / "correct" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    return folder


# -- the checks ------------------------------------------------------------------------------


def versions(place: Place) -> str:
    words = [platform.python_version(), f"torch {torch.__version__}"]
    if place.gpu:
        words += [
            torch.cuda.get_device_name(),
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        ]
    return ", ".join(words)


def alone(place: Place) -> str:
    """A group of one process over the device's own backend, against the simulated workers."""
    config, folder = short(place.device, "dtype=float64"), fresh(place, "alone")
    ended(start("alone", str(folder / "group"), config=config))
    met, simulated = rows(folder / "group"), trained(config, folder / "simulated")
    return within(ROUNDED, without_calls(met), without_calls(simulated))


def without_calls(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the count of collectives, which depends on who does the work."""
    return [{k: v for k, v in row.items() if k != "collectives"} for row in found]


def compressor(name: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """Ten steps in float64, on the device and on the CPU."""
        usual = compression.make_compressor({"name": name}).usual
        level = json.dumps(usual.get("high", 0.001))  # a threshold has no usual level
        words = [
            f"compressor={name}",
            f"levels={{high={level}}}",
            "policy=static",
            "policy.level=high",
            "dtype=float64",
        ]
        folder = fresh(place, f"compressor {name}")
        here = trained(short(place.device, *words), folder / "here")
        limit = COMPLETED.get(name, ROUNDED)
        return within(limit, here, trained(short("cpu", *words), folder / "cpu"))

    return check


def decisions(place: Place) -> str:
    """ACCORDION's levels in three units of float32."""
    folder, words = fresh(place, "decisions"), ("steps=30", "policy=accordion", "policy.interval=1")
    here, there = (
        (trained(short(device, *words), folder / device) for device in (place.device, "cpu"))
        if place.gpu
        else (trained(short("cpu", *words), folder / x) for x in "ab")
    )
    levels = [[row["layers"]["level"] for row in found] for found in (here, there)]
    if levels[0] != levels[1]:
        raise Difference(f"the levels are {levels[0]} there and {levels[1]} on the CPU")
    return f"the same levels, {sum(map(len, levels[0]))} decisions"


def same_bits(place: Place) -> str:
    """The same run twice, deterministic, in float32."""
    folder, config = fresh(place, "bits"), short(place.device, "deterministic=true")
    for name in "ab":
        trained(config, folder / name)
    first, second = ((folder / name / "epochs.jsonl").read_bytes() for name in "ab")
    if first != second:
        return within(0, rows(folder / "a"), rows(folder / "b"))
    return "the same bytes"


def killed(place: Place) -> str:
    """kill -9 after two of four units, continued, against the unbroken run."""
    config = short(place.device, "deterministic=true", "steps=24", steps=6)
    folder = fresh(place, "killed")
    child = start("train", str(folder / "killed"), config=config)
    lines, began = folder / "killed" / "epochs.jsonl", time.monotonic()
    while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
        if child.over() or time.monotonic() - began > 60:
            ended(child, 0)  # says why
            break
        time.sleep(0.01)
    child.kill()
    had = lines.read_bytes().count(b"\n")
    ended(start("train", str(folder / "killed"), config=config))
    trained(config, folder / "whole")
    if lines.read_bytes() != (folder / "whole" / "epochs.jsonl").read_bytes():
        return within(0, rows(folder / "killed"), rows(folder / "whole"))
    return f"the same bytes, killed after unit {had}"


def processes(number: int, *words: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """So many processes that share the device through gloo, against the simulated workers."""
        folder = fresh(place, " ".join((f"{number} processes", *words)))
        config = short(place.device, "dtype=float64", *words)
        ended(start("train", str(folder / "real"), processes=number, config=config))
        simulated = trained(config, folder / "simulated")
        return within(ROUNDED, without_calls(rows(folder / "real")), without_calls(simulated))

    return check


def hook(number: int) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """Under DDP, with bucket views, a gradient scaler and clipping."""
        words = ended(start("hook", place.device, processes=number))
        return next(line for line in words.splitlines() if line.startswith("loss"))

    return check


def hook_graphs(place: Place) -> str:
    """The same script with the hook's CUDA graphs and without: the same bits."""
    if not place.gpu:
        return "not measured: a CPU has no graphs"
    words = ended(start("hook", place.device, "4", processes=1))
    return next(line for line in words.splitlines() if line.startswith("loss"))


def island(number: int, shards: int = 1) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """A model of FSDP2, in islands of so many shards."""
        words = ended(start("island", place.device, str(shards), processes=number))
        return next(line for line in words.splitlines() if line.startswith("loss"))

    return check


GPT = (  # it has hidden matrices, which Muon trains
    "data={name='stdlib', sequence=8, train_size=400, test_size=60}",
    "model={name='gpt', width=16, depth=1, heads=2}",
    "batch_size=2",
)


def optimizer(name: str, limit: float, *network: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """Ten steps in float64, on the device and on the CPU."""
        words = (f"optimizer={{name='{name}', lr=0.01}}", "dtype=float64", *network)
        folder = fresh(place, f"optimizer {name}")
        here = trained(short(place.device, *words), folder / "here")
        return within(limit, here, trained(short("cpu", *words), folder / "cpu"))

    return check


def local_steps(place: Place) -> str:
    """Rounds of two steps of each worker's own, in float64, on the device and on the CPU."""
    words = ("sync_policy={name='static', level='2'}", "sync_levels={'2'=2}", "dtype=float64")
    folder = fresh(place, "local steps")
    here = trained(short(place.device, *words), folder / "here")
    return within(COMPLETED["powersgd"], here, trained(short("cpu", *words), folder / "cpu"))


def not_finite(number: int, *words: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        """At a learning rate of 1e30 the run must end, with its reason."""
        rate = ("optimizer.lr=1e30", "optimizer.warmup_from=none")
        config = short(place.device, *rate, *words)
        folder = fresh(place, f"not finite, {number}")
        try:
            if number == 1:
                trained(config, folder)
            else:
                ended(start("train", str(folder), processes=number, config=config))
        except (RegimesError, RuntimeError) as error:
            if "is not finite in" in str(error):
                return "the run ended with its reason"
            raise
        raise Difference("the run ended without an error")

    return check


def graphs(place: Place) -> str:
    """Ranks that change from unit to unit, with and without CUDA graphs: the same numbers."""
    windows = "policy={name='windows', windows=[[0, 1], [2, 3]], inside='low', outside='high'}"
    words, folder = ("steps=40", windows), fresh(place, "graphs")
    plain = trained(short(place.device, *words), folder / "plain")
    try:
        captured = trained(short(place.device, *words, "graphs=2"), folder / "captured")
    except ConfigError as error:
        if place.gpu or "none on a CPU" not in str(error):
            raise
        return f"not measured: {error}"
    return within(0, plain, captured)


def curvature_of_lstm(place: Place) -> str:
    """Hessian eigenvalues of an LSTM, which cuDNN cannot differentiate twice, in float64."""
    words = (
        "data={name='stdlib', sequence=8, train_size=150, test_size=60}",
        "model={name='lstm', width=8, depth=1, dropout=0}",  # a GPU draws other masks
        "batch_size=2",
        "dtype=float64",
        "instruments={curvature={images=8, batch=4, max_products=12}}",
    )
    folder = fresh(place, "lstm")
    here = trained(short(place.device, *words), folder / "here")
    there = trained(short("cpu", *words), folder / "cpu")
    return within(MEASURED, *([row["model"] for row in found] for found in (here, there)))


def instruments(place: Place) -> str:
    """All of them, against the CPU's: in float64, so that both measure the same weights."""
    folder, words = fresh(place, "instruments"), ("dtype=float64", *INSTRUMENTS)
    here = trained(short(place.device, *words), folder / "here")
    there = trained(short("cpu", *words), folder / "cpu")
    keys = ("statistics", "model")
    return within(MEASURED, *([[row[k] for k in keys] for row in found] for found in (here, there)))


def eigenvalue(place: Place) -> str:
    """The largest Hessian eigenvalue in float32, against the CPU's and against PyHessian's."""

    def value(device: str, backend: str = "lanczos") -> float:
        return largest(device, backend, "resnet8", 4, 40, 8)["value"]

    here = value(place.device)
    said = [f"the CPU's: {within(ALIKE, here, value('cpu'))}"]
    try:
        said.append(f"PyHessian's: {within(ALIKE, here, value(place.device, 'pyhessian'))}")
    except ConfigError as error:
        said.append(f"not measured: {error}")
    return "; ".join(said)


def several(place: Place) -> dict[str, Callable[[Place], str]]:
    """Over NCCL, where this machine has several GPUs: one process each."""
    number = min(4, place.devices)
    if number < 2:
        return {}
    return {
        f"NCCL, {number} processes": processes(number),
        f"NCCL, {number} processes, in buckets": processes(number, "bucket_mb=0.02"),
        f"NCCL, hook on {number} GPUs": hook(number),
        f"NCCL, {number} islands of one shard": island(number),
        f"NCCL, an island of {number} shards": island(number, number),
    }


def checks(place: Place) -> dict[str, Callable[[Place], str]]:
    """All checks for this machine."""
    return {**CHECKS, **several(place)}


CHECKS: dict[str, Callable[[Place], str]] = {
    "versions": versions,
    "a process group of one": alone,
    **{f"compressor {name}": compressor(name) for name in sorted(compression.REGISTRY)},
    "decisions": decisions,
    "the same bits twice": same_bits,
    "killed and resumed": killed,
    "CUDA graphs": graphs,
    "CUDA graphs, hook": hook_graphs,
    "2 processes": processes(2),
    "4 processes": processes(4),
    "2 processes, in buckets": processes(2, "bucket_mb=0.02"),
    "not finite": not_finite(1),
    "not finite, 2 processes, in buckets": not_finite(2, "bucket_mb=0.02"),
    "optimizer adamw": optimizer("adamw", ROUGH),
    "optimizer muon": optimizer("muon", HALF_PRECISION, *GPT),
    "local steps": local_steps,
    "LSTM with curvature": curvature_of_lstm,
    "island of one shard": island(1),
    "hook": hook(1),
    "hook, 2 processes": hook(2),
    "instruments": instruments,
    "eigenvalue": eigenvalue,
}
