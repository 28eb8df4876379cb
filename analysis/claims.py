"""What holds at the scale of the records: every claim, its effect, interval and verdict.

::

    regimes figure campaign --scale cpu                # about 4 hours on two cores
    regimes figure claims runs
    regimes figure claims data/reference --out data/reference/claims.md    # the committed ones

An effect is one number per seed, its interval the 95 % t interval of their mean. A claim of *more*
holds if the interval lies above zero, and does not hold if it lies below the margin (an effect as
large as the margin is excluded). A claim of *no less* holds if the interval lies above minus the
margin, and does not hold if it lies below zero. All else is open: too few seeds to say. The margin
is one point of accuracy (1 % of the perplexity), chosen before the first interval was computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from regimes.errors import RecordError
from regimes.records import Record, load_all, write_output
from regimes.replay.agreement import interval

from .effects import Effect, fall_at_decay, minus, more_agreement, overlap

Outcome = Literal["holds", "does not hold", "open"]


@dataclass(frozen=True)
class Claim:
    """A sentence that records may support or not.

    Attributes:
        item: where it comes from: a figure or table of the paper, or a question of ours.
        says: the sentence.
        source: the grid's records.
        effect: one number per seed.
        expect: "more" or "no less" than zero (than ``base``).
        margin: the smallest effect that matters.
        name: of the effect, with its unit.
    """

    item: str
    says: str
    source: str
    effect: Effect
    name: str
    expect: Literal["more", "no less"] = "more"
    margin: float = 1.0
    base: float = 0.0

    def verdict(self, low: float, high: float) -> Outcome:
        low, high = low - self.base, high - self.base
        if math.isnan(low):
            return "open"
        if self.expect == "more":
            return "holds" if low > 0 else "does not hold" if high < self.margin else "open"
        return "holds" if low > -self.margin else "does not hold" if high < 0 else "open"


def _more(item: str, says: str, source: str, a: str, b: str, margin: float = 1.0) -> Claim:
    return Claim(item, says, source, minus(a, b), f"{a} - {b}", "more", margin)


def _enough(item: str, says: str, source: str, a: str, b: str, margin: float = 1.0) -> Claim:
    return Claim(item, says, source, minus(a, b), f"{a} - {b}", "no less", margin)


WHERE = "Where or how many?"
MOVED = {"first": "the first epochs", "last": "the last epochs", "random": "random windows",
         "layers": "another layer's schedule"}  # fmt: skip
SETTINGS = {"small-controls": "CIFAR-10", "smoke-controls": "digits",
            "smoke-long-controls": "digits, 48 epochs"}  # fmt: skip
PAPER = (
    _more("Figure 1, 2b", "high compression loses accuracy", "small", "low", "high"),
    _more("Figure 1, 2b", "low compression in the critical windows recovers it", "small",
          "low-in-critical", "high"),
    _enough("Figure 1, 2b", "... all of it", "small", "low-in-critical", "low"),
    _more("Figure 2b", "high compression in critical windows is not made up for", "small",
          "dense", "high-in-critical"),
    _more("Figure 2b", "... and is damage, not lost time", "small", "dense-deleted",
          "high-in-critical"),
    _more("Figure 2b", "when matters, not only how much", "small", "low-early", "low-late"),
    _more("Figure 2b", "the window after the decay is critical, too", "small", "low-in-critical",
          "low-early"),
    Claim("Figure 2a", "the norm falls at a decay", "small", fall_at_decay("low"),
          "halvings of the norm", "more", 0.2),
    Claim("Figure 3", "the norm finds the eigenvalue's regimes better than the first epochs do",
          "small-signals", more_agreement("low"), "difference of kappas", "more", 0.1),
    Claim("Figure 3", "... on digits", "smoke-signals", more_agreement("low"),
          "difference of kappas", "more", 0.1),
    Claim("Figure 4a", "more than 90 % of the top 10 % coordinates are common (batch 512)",
          "small-overlap", overlap(512), "overlap in %", "more", 1.0, 90.0),
    _enough("Figure 4b", "small batches in the critical windows are enough", "small-batch",
            "small-in-critical", "small-batch"),
    _more("Figure 4b", "large batches throughout lose", "small-batch", "small-batch",
          "large-batch"),
    _enough("Figures 5, 16, 17", "batch ACCORDION is as good as small batches", "small-batch",
            "accordion-batch", "small-batch"),
    _enough("Figures 5, 16, 17", "... and as Smith et al.", "small-batch", "accordion-batch",
            "smith"),
    _enough("Figures 6, 12, 13", "ACCORDION is as good as low (PowerSGD)", "small", "accordion",
            "low"),
    _enough("Figure 7", "ACCORDION is as good as AdaQS at its best threshold", "small-adaqs",
            "accordion", "adaqs-0.2"),
    _more("Figure 7", "... and better than at a fall of one half", "small-adaqs", "accordion",
          "adaqs"),
    _more("Figure 8", "ACCORDION beats high trained to low's budget", "small-budget", "accordion",
          "high-longer"),
    _more("Figure 8", "... with the decays stretched as well", "small-budget", "accordion",
          "high-stretched"),
    _more("Figure 9", "ACCORDION 4-1 beats static rank 2", "small-ladder", "accordion 4-1",
          "rank 2"),
    _enough("Figure 10", "ACCORDION survives batches 8 times as large", "small-batch",
            "accordion-batch-8x", "small-batch"),
    Claim("Figure 11", "TopK 2 % loses perplexity (LSTM)", "lstm-small", minus("high", "low"),
          "high - low, perplexity", "more", 0.6),
    _more("Figures 14, 15", "TopK 0.3 % loses against 10 % (digits)", "smoke-quirks-topk", "low",
          "high"),
    _enough("Figures 14, 15", "ACCORDION is as good as low (TopK, digits)", "smoke-quirks-topk",
            "accordion", "low"),
)  # fmt: skip
QUESTIONS = (
    *(_more(WHERE, f"ACCORDION beats as much in {words} ({data})", source, "accordion",
            f"yoked {order}")
      for source, data in SETTINGS.items() for order, words in MOVED.items()),
    *(_enough(WHERE, f"ACCORDION is as good as low ({data})", source, "accordion", "low")
      for source, data in SETTINGS.items()),
    _more("Budget", "digits: high loses in 24 epochs", "smoke-rules", "low", "high"),
    _more("Budget", "digits: high loses in 48 epochs", "smoke-long", "low", "high"),
    _more("Fixed windows", "24 epochs: low in epochs 0-5 loses against low", "smoke-rules", "low",
          "low-early"),
    _more("Fixed windows", "48 epochs: low in epochs 0-5 loses against low", "smoke-long", "low",
          "low-early"),
    _more("Fixed windows", "48 epochs: ACCORDION beats low in epochs 0-5", "smoke-long",
          "accordion", "low-early"),
    *(_enough("Interval", f"{epochs} epochs: interval {n} is as good as 3", source,
              f"interval {n}", "accordion")
      for source, epochs in (("smoke-rules", 24), ("smoke-long", 48)) for n in (1, 2, 4)),
    *(_enough("Decay rule", f"{epochs} epochs: without it as good", source, "no decay rule",
              "accordion")
      for source, epochs in (("smoke-rules", 24), ("smoke-long", 48))),
    *(_enough("Signal", f"{epochs} epochs: {name} is as good as update", source, name, "accordion")
      for source, epochs in (("smoke-rules", 24), ("smoke-long", 48))
      for name in ("signal global", "signal worker0", "norm x lr")),
    *(_enough("Authors' quirks", f"{name}: as good with them ({data})", source, f"{name}, authors",
              name)
      for source, data in (("small-quirks", "PowerSGD, CIFAR-10"),
                           ("smoke-quirks-topk", "TopK, digits"))
      for name in ("low", "high", "accordion")),
    *(claim for source, data in (("smoke-resnet8", "skip connections"),
                                 ("smoke-full", "1,200 digits"))
      for claim in (
          _more("Elsewhere", f"high loses ({data})", source, "low", "high"),
          _more("Elsewhere", f"high in critical windows is not made up for ({data})", source,
                "dense", "high-in-critical"))),
    _enough("Joint", "compression and batch together as good as low", "small-joint", "both", "low"),
    _more("Quantiser", "2 bits lose against 8 (digits)", "smoke-quantise", "low", "high"),
    _enough("Quantiser", "ACCORDION is as good as 8 bits", "smoke-quantise", "accordion", "low"),
)  # fmt: skip

# -- records to verdicts ---------------------------------------------------------------------


def find(folder: Path, source: str) -> list[Record]:
    """The records of a grid in a folder: a folder or an archive of its name; none if not there."""
    for path in (folder / source, folder / f"{source}.tar.xz"):
        if path.exists():
            return load_all(path)
    return []


def judge(folder: Path, claims: Sequence[Claim] = (*PAPER, *QUESTIONS)) -> pd.DataFrame:
    """One row per claim whose records are there: n, effect, 95 % t interval, verdict.

    Raises:
        RecordError: no records of any claim in the folder.
    """
    known: dict[str, list[Record]] = {}
    rows = []
    for claim in claims:
        runs = known.setdefault(claim.source, find(folder, claim.source))
        if not runs:
            continue
        values = claim.effect(runs)
        mean, low, high = interval(values)
        rows.append(
            {"item": claim.item, "claim": claim.says, "records": claim.source, "effect": claim.name,
             "n": len(values), "mean": mean, "ci_low": low, "ci_high": high,
             "verdict": claim.verdict(low, high)}
        )  # fmt: skip
    if not rows:
        raise RecordError(
            f"{folder} has no records that a claim is about: expected folders or archives named "
            "like grids, e.g. small or small.tar.xz"
        )
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per item: holds, holds in part, does not hold, or open; and how many of its claims hold."""
    found = []
    for item, group in rows.groupby("item", sort=False):
        count = group["verdict"].value_counts()
        held, refuted = int(count.get("holds", 0)), int(count.get("does not hold", 0))
        whole = "holds" if held == len(group) else "holds in part" if held else None
        word = whole or ("does not hold" if refuted else "open")
        found.append({"item": item, "verdict": word, "claims": len(group), "hold": held,
                      "do not": refuted})  # fmt: skip
    return pd.DataFrame(found)


def markdown(rows: pd.DataFrame) -> str:
    """The claims as a Markdown table, the paper's first."""
    text = ["| | claim | effect | n | mean [95 % interval] | verdict | records |",
            "|---|---|---|---:|---|---|---|"]  # fmt: skip
    before = None
    for row in rows.to_dict("records"):
        item = "" if row["item"] == before else row["item"]
        before = row["item"]
        ends = f"{row['mean']:+.1f} [{row['ci_low']:+.1f}, {row['ci_high']:+.1f}]"
        text.append(f"| {item} | {row['claim']} | {row['effect']} | {row['n']} | {ends} | "
                    f"{row['verdict']} | `{row['records']}` |")  # fmt: skip
    return "\n".join(text) + "\n"


def main(folder: Path, out: Path | None = None, paper: bool = False) -> pd.DataFrame:
    """Print the verdict on every claim whose records are in FOLDER.

    Args:
        folder: of grids' records, each a folder or an archive of the grid's name.
        out: file for the same as Markdown.
        paper: only the paper's claims.
    """
    from rich.console import Console
    from rich.table import Table

    rows = judge(folder, PAPER if paper else (*PAPER, *QUESTIONS))
    if out:
        write_output(out, markdown(rows))
    console = Console(highlight=False)
    for frame in (rows, summary(rows)):
        table = Table(*map(str, frame.columns), box=None, header_style="bold", pad_edge=False)
        for row in frame.to_dict("records"):
            table.add_row(*(f"{v:+.2f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table, "")
    return rows


if __name__ == "__main__":
    from .command import start

    start(main)
