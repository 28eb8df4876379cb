"""What a tree of branches costs, compared with whole runs: units trained, and seconds.

``python -m benchmarks.branches [--onsets N] [--units N]`` trains a small language model as a trunk
with a pulse of three units from each onset, in one process, and one whole run to compare with. A
branch trains its own units alone, so N onsets cost N (N + 1) / 2 units and the trunk N.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import regimes
from regimes.records import read_lines

SMALL = ["data.train_size=20000", "data.test_size=2000", "optimizer.decay_epochs=[]"]


def main() -> None:
    """Print one line of units and one of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--onsets", type=int, default=24)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10, help="of a unit")
    given = parser.parse_args()
    length = [f"steps={given.units * given.steps}", f"unit_steps={given.steps}"]
    config = regimes.override(regimes.get_preset("lm-small"), [*SMALL, *length])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        seconds = [_timed(lambda: regimes.run(config, out / "warm-up"))]
        seconds[0] = _timed(lambda: regimes.run(config, out / "whole"))
        onsets = range(0, given.units, max(1, given.units // given.onsets))
        kept = regimes.override(config, [f"checkpoint_keep={[*onsets]}"])
        seconds.append(_timed(lambda: regimes.run(kept, out / "trunk")))
        high = ["policy=static", "policy.level=high"]
        for at in onsets:
            branch = out / f"{at}"
            seconds.append(
                _timed(lambda: regimes.branch(out / "trunk", at=at, length=3, set=high, out=branch))  # noqa: B023
            )
        rows = [len(read_lines(path)) for path in out.glob("*/epochs.jsonl")]
        units = sum(rows) - 2 * given.units  # without the two whole runs
    many = len(onsets)
    whole = many * given.units
    print(f"units: {units} of {whole} in {many} whole runs, {units / whole:.3f}")
    spent, alone = sum(seconds[1:]), many * seconds[0]
    print(f"seconds: {spent:.1f} of {alone:.1f}, {spent / alone:.3f}")


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
