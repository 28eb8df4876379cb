"""Measure and report: ``python -m benchmarks [CASE ...] [--report benchmarks/speed.json]``.

All cases take about 8 minutes on one core of an idle machine. A case that fails leaves its error
in the report, and the others go on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import importlib
import time
import traceback
from pathlib import Path

import torch

from benchmarks.harness import Row, limits, machine
from benchmarks.report import Report

CASES = (
    "powersgd",
    "hooks",
    "compressors",
    "topk",
    "simulated",
    "instruments",
    "throughput",
    "startup",
    "records",
    "memory",
    "growth",
    "language",
    "local",
    "policies",
    "islands",
)


def main() -> None:
    """Run the cases, print their tables, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--report", type=Path, help="JSON file; Markdown and plot go beside it")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a test of the suite")
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: expected of {', '.join(CASES)}")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, children included
    report = Report(machine(), limits())
    for name in chosen.cases or CASES:
        began = time.monotonic()
        module = importlib.import_module(f"benchmarks.cases.{name}")
        try:
            rows = module.measure(report.limits, quick=chosen.quick)
        except Exception as error:
            traceback.print_exc()
            rows = [Row("all", "", error=f"{type(error).__name__}: {error}")]
        report.add(name, module.__doc__ or "", rows, time.monotonic() - began)
        print(report.section(name), flush=True)
        if chosen.report:
            report.write(chosen.report)


if __name__ == "__main__":
    main()
