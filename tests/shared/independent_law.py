"""The law of harm, from the files of records by plain JSON and linear algebra on whole matrices: no
module of regimes or of its study.

    python tests/shared/independent_law.py runs/harm-cyclic     # exponents of each arm
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


class Pulse(NamedTuple):
    """A pulse of a tree; its rate is the share of the peak, its harm in the unit of the metric."""

    tree: str
    seed: int
    onset: int
    rate: float
    harm: float


class Fit(NamedTuple):
    exponent: float
    low: float
    high: float
    level: float


# -- files -----------------------------------------------------------------------------------


def files(path: Path) -> Iterator[tuple[str, io.BufferedIOBase]]:
    """The files of a folder or an archive of records, with their names inside it."""
    if path.is_dir():
        for found in sorted(path.rglob("*")):
            if found.name in ("run.json", "epochs.jsonl"):
                with found.open("rb") as file:
                    yield str(found.relative_to(path)), file
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None and Path(member.name).name in ("run.json", "epochs.jsonl"):
                    yield member.name, file  # type: ignore[misc]


def rate_of_step(optimizer: dict[str, Any], step: int, steps: int) -> float:
    """The share of the peak at a step, by the schedules of these trees."""
    ramp = optimizer["warmup_steps"] or 0
    if step < ramp:
        return step / ramp
    kind, after = optimizer["schedule"], step - ramp
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * after / (steps - ramp)))
    if kind == "cyclic":
        length = optimizer["cycle_steps"]
        return 0.5 * (1 + math.cos(math.pi * (after % length) / length))
    if kind == "wsd":
        return min(1.0, (steps - step) / (optimizer["decay_share"] * steps))
    assert kind == "step", kind
    fallen = sum(step >= first for first in optimizer["decay_steps"])
    return float(optimizer["decay_factor"] ** -fallen)


def pulses(path: Path, tree: str = "") -> dict[str, list[Pulse]]:
    """All finished pulses by arm, in order of seed and onset."""
    configs: dict[str, dict[str, Any]] = {}
    ends: dict[str, tuple[int, float]] = {}
    for name, file in files(path):
        folder = os.path.dirname(name)
        if name.endswith("run.json"):
            configs[folder] = json.loads(file.read())
        elif lines := file.read().splitlines():
            row = json.loads(lines[-1])
            ends[folder] = row["epoch"] + 1, row["metric"]
    found: dict[str, list[Pulse]] = {}
    for folder, header in configs.items():
        config = header["config"]
        branch = config.get("branch")
        if not branch or ends.get(folder, (0, 0.0))[0] < (header.get("units") or 24):
            continue
        trunk = os.path.normpath(os.path.join(folder, branch["of"]))
        every, steps = config["unit_steps"], header["steps_per_epoch"] * config["epochs"]
        steps = config.get("steps") or steps
        each = [rate_of_step(config["optimizer"], step, steps) for step in range(steps)]
        highest = max(sum(each[i : i + every]) / every for i in range(0, steps, every))
        first, stop = branch["at"] * every, (branch["at"] + branch["length"]) * every
        rate = sum(each[first:stop]) / (stop - first) / highest
        arm = os.path.basename(os.path.dirname(folder)).replace(f" from {branch['at']}", "", 1)
        harm = ends[folder][1] - ends[trunk][1]
        pulse = Pulse(tree or path.name.split(".")[0], config["seed"], branch["at"], rate, harm)
        found.setdefault(arm, []).append(pulse)
    return {arm: sorted(each) for arm, each in found.items()}


# -- fits ------------------------------------------------------------------------------------


def mixed(found: list[Pulse]) -> tuple[float, float]:
    """(exponent, level) of the mixed model of log harm by restricted maximum likelihood, with the
    whole covariance matrix and a search on a grid that becomes finer."""
    found = [pulse for pulse in found if pulse.harm > 0]
    harms = np.log([pulse.harm for pulse in found])
    rates = np.log([pulse.rate for pulse in found])
    trunks = [(pulse.tree, pulse.seed) for pulse in found]
    same = np.array([[a == b for b in trunks] for a in trunks], float)
    x = np.column_stack([np.ones(len(found)), rates])

    def solved(ratio: float) -> tuple[float, float, float]:
        """(-2 x restricted log likelihood, exponent, log level)."""
        covariance = np.eye(len(found)) + ratio * same
        root = np.linalg.inv(np.linalg.cholesky(covariance))
        solution, squares, *_ = np.linalg.lstsq(root @ x, root @ harms, rcond=None)
        of_x = x.T @ np.linalg.solve(covariance, x)
        terms = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(of_x)[1]
        value = (len(found) - 2) * math.log(squares[0]) + terms
        return value, float(solution[1]), float(solution[0])

    low, high = -12.0, 12.0
    for _ in range(5):
        grid = np.linspace(low, high, 25)
        best = int(np.argmin([solved(math.exp(g))[0] for g in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    _, exponent, level = solved(math.exp((low + high) / 2))
    return exponent, math.exp(level)


def least_squares(found: list[Pulse]) -> float:
    """The exponent of least squares on harm itself, with a level for each trunk, on a grid."""
    trunks = sorted({pulse[:2] for pulse in found})
    harms = np.array([pulse.harm for pulse in found])
    member = np.array([[pulse[:2] == trunk for trunk in trunks] for pulse in found], float)
    rates = np.array([pulse.rate for pulse in found])

    def squares(p: float) -> float:
        x = member * rates[:, None] ** p
        levels = (x * harms[:, None]).sum(0) / (x**2).sum(0)
        return float(((harms - x @ levels) ** 2).sum())

    low, high = -3.0, 7.0
    for _ in range(6):
        grid = np.linspace(low, high, 41)
        best = int(np.argmin([squares(p) for p in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return float((low + high) / 2)


def fit(found: list[Pulse], logs: bool = True) -> Fit:
    """With the interval of a jackknife over trunks."""

    def exponent(some: list[Pulse]) -> float:
        return mixed(some)[0] if logs else least_squares(some)

    used = [pulse for pulse in found if pulse.harm > 0] if logs else found
    trunks = sorted({pulse[:2] for pulse in used})
    without = np.array([exponent([p for p in used if p[:2] != trunk]) for trunk in trunks])
    k = len(trunks)
    error = math.sqrt((k - 1) / k * ((without - without.mean()) ** 2).sum())
    half, middle = float(stats.t.ppf(0.975, k - 1)) * error, exponent(used)
    return Fit(middle, middle - half, middle + half, mixed(used)[1])


def slopes(found: list[Pulse]) -> dict[tuple[str, int], float]:
    """The exponent of each trunk alone."""
    made = {}
    for trunk in sorted({pulse[:2] for pulse in found}):
        own = [pulse for pulse in found if pulse[:2] == trunk and pulse.harm > 0]
        x = np.column_stack([np.ones(len(own)), np.log([pulse.rate for pulse in own])])
        y = np.log([pulse.harm for pulse in own])
        made[trunk] = float(np.linalg.lstsq(x, y, rcond=None)[0][1])
    return made


def lasting(found: list[Pulse], first: int = 6, last: int = 18) -> list[Pulse]:
    """Those that start in these units."""
    return [pulse for pulse in found if first <= pulse.onset <= last]


def main(path: Path) -> None:
    for arm, each in pulses(path).items():
        some = lasting(each, last=20)
        trunks = {pulse[:2] for pulse in some}
        if len(trunks) < 3 or len({pulse.rate for pulse in some}) < 2:
            print(f"{arm}: {len(trunks)} trunks, too few")
            continue
        found = fit(some)
        least = fit(some, logs=False)
        print(
            f"{arm}: {len(trunks)} trunks, {len(some)} pulses, "
            f"log {found.exponent:.2f} [{found.low:.2f}, {found.high:.2f}], "
            f"harm {least.exponent:.2f} [{least.low:.2f}, {least.high:.2f}], "
            f"level {found.level:.3f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
