"""The report: JSON with every number, Markdown with a table per case, a plot of the growth."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases.growth import plot
from benchmarks.harness import Limits, Row
from regimes.records import write_output

HEAD = (
    "| setting | ours | against | theirs | unit | ratio (middle half) | target | | floor | × |",
    "|---|---:|---|---:|---|---|---:|---|---:|---:|",
)
WORDS = """\
This page compares the speed of Regimes (*ours*) with other libraries (*theirs*). A ratio is that of
the medians, ours / theirs, over alternating rounds; brackets have the middle half of the rounds'
ratios. Times are CPU time of one thread unless a case says otherwise. *Floor* is the least that
this machine allows (each case defines it), and × how many times longer ours takes. Rows without a
target are for information."""


@dataclass
class Report:
    """All that was measured."""

    machine: dict[str, Any]
    limits: Limits
    rows: dict[str, list[Row]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, case: str, words: str, rows: list[Row], seconds: float) -> None:
        """One case's rows and what it did, in words."""
        self.rows[case], self.words[case], self.seconds[case] = rows, words.strip(), seconds

    def section(self, case: str) -> str:
        """The Markdown of one case."""
        title, _, rest = self.words[case].partition("\n")
        lines = [f"## {case}: {title}", rest.strip(), "", *HEAD]
        lines += [_line(row) for row in self.rows[case]]
        notes = dict.fromkeys(row.note for row in self.rows[case] if row.note)
        lines += ["", *notes] if notes else []
        return "\n".join([*lines, "", f"{self.seconds[case]:.0f} s.", ""])

    def write(self, path: Path) -> None:
        """``path`` and, beside it, the same name with .md and, for the growth, .png."""
        numbers = {
            "machine": self.machine | {"system": platform.platform()},
            "limits": asdict(self.limits),
            "seconds": self.seconds,
            "cases": {
                case: [asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in rows]
                for case, rows in self.rows.items()
            },
        }
        write_output(path, json.dumps(numbers, indent=1) + "\n")
        write_output(path.with_suffix(".md"), self._markdown(path))
        curves = [row for rows in self.rows.values() for row in rows if row.curve]
        if curves:
            plot(curves, _figure(path))

    def _markdown(self, path: Path) -> str:
        where = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        missed = [
            f"- {case}, {row.setting}, against {row.against}: {row.verdict}"
            for case, rows in self.rows.items()
            for row in rows
            if row.verdict not in ("", "reached")
        ]
        counted = [row for rows in self.rows.values() for row in rows if row.target is not None]
        reached = sum(row.verdict == "reached" for row in counted)
        lines = [
            "# Speed",
            "",
            f"`python -m benchmarks {' '.join(self.rows)} --report {path.name}`",
            "",
            f"{where}. Memory bandwidth {self.limits.bandwidth / 1e9:.1f} GB/s, products "
            f"{self.limits.flops / 1e9:.0f} GFLOP/s. No GPU: nothing here is measured on one.",
            "",
            WORDS,
            "",
            f"**{reached} of {len(counted)} targets reached.**" + (" Missed:" if missed else ""),
            "",
            *missed,
            "",
            *(self.section(case) for case in self.rows),
            *([f"![Cost against size]({_figure(path).name})", ""] if "growth" in self.rows else []),
        ]
        return "\n".join(lines)


def _figure(path: Path) -> Path:
    return path.with_name(f"{path.stem}-growth.png")


def _line(row: Row) -> str:
    ratio = "" if math.isnan(row.ratio) else f"{row.ratio:.3g}"
    if row.spread:
        ratio += f" ({row.spread[0]:.3g} to {row.spread[1]:.3g}, n = {row.rounds})"
    elif row.rounds:
        ratio += f" (n = {row.rounds})"
    floor = ("", "") if row.floor is None else (f"{row.floor:.3g}", f"{row.ours / row.floor:.1f}")
    ours, theirs = ("" if math.isnan(x) else f"{x:.4g}" for x in (row.ours, row.theirs))
    target = "" if row.target is None else f"{row.target:g}"
    cells = (row.setting, ours, row.against, theirs, row.unit, ratio, target, row.verdict, *floor)
    return f"| {' | '.join(cells)} |"
