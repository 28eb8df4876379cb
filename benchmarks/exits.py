"""Do runs that have ended well exit well? One after the other, on an idle machine.

``python -m benchmarks.exits [--runs 300] [--log FILE]`` starts runs of the trainer on two gloo
processes, then scripts with the hook under torchrun. It counts those that end with another code
than 0 or say "terminate called": a process group that outlives its end may abort the process while
Python shuts down, as 4 of 90 runs did before the groups were let go of. A log is continued.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINER = [
    sys.executable,
    "-m",
    "regimes",
    "run",
    "smoke",
    "--seed",
    "3",
    "--set",
    "epochs=2",
    "--set",
    "dtype=float64",
    "--processes",
    "2",
    "--quiet",
    "--out",
]
HOOK = [
    str(Path(sys.executable).with_name("torchrun")),
    "--standalone",
    "--nproc-per-node",
    "2",
    str(ROOT / "tests" / "shared" / "ddp_scripts" / "ending.py"),
    "left in a function",
]


def run(kind: str, folder: Path) -> str:
    """One run: "well", or how else it ended."""
    words = [*TRAINER, str(folder / "run")] if kind == "trainer" else HOOK
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=folder, check=False)
    if done.returncode == 0 and "terminate called" not in done.stderr:
        return "well"
    return f"exit code {done.returncode}: {(done.stderr.splitlines() or ['silent'])[-1]}"


def main() -> None:
    """Run, log each end, say how many ended well; exit code 1 if any did not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="of each kind")
    parser.add_argument("--log", type=Path, default=Path("runs", "exits.log"))
    chosen = parser.parse_args()
    chosen.log.parent.mkdir(parents=True, exist_ok=True)
    good = True
    for kind in ("trainer", "hook"):
        before = chosen.log.read_text().splitlines() if chosen.log.exists() else []
        ends = [line.split("\t")[2] for line in before if line.startswith(f"{kind}\t")]
        while len(ends) < chosen.runs:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
                ends.append(run(kind, Path(scratch)))
            load = os.getloadavg()[0]
            with chosen.log.open("a") as log:
                log.write(
                    f"{kind}\t{time.monotonic() - began:.1f} s, load {load:.1f}\t{ends[-1]}\n"
                )
        well = ends.count("well")
        good &= well == len(ends)
        print(f"{kind}: {well} of {len(ends)} ended well", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
