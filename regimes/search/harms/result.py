"""What a search for harm has found: a frame, sentences, and rate ladders. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.base.errors import ConfigError
from regimes.base.statistics import LEAST, interval_names
from regimes.plotting.looks import Metric
from regimes.search.harms.evidence import HarmEvidence, Pulse
from regimes.search.harms.judge import MOST_SEEDS, WORDS, Comparison, LostTime, PulseVerdict
from regimes.search.harms.kinds import PulseKind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COMPARED: dict[Comparison, str] = {"more": "more", "less": "less", "open": "not decided"}


def _columns_of(beside: LostTime | None) -> dict[str, Any]:
    """What a row of the table has of lost time."""
    nan = math.nan
    lost = beside.lost if beside else PulseVerdict("open", nan, nan, nan, 0, None)
    row: dict[str, Any] = {"lost": lost.harm, "lost_ci_low": lost.low, "lost_ci_high": lost.high}
    times = (beside.times, beside.low, beside.high) if beside else (nan, nan, nan)
    row |= {"lost_n": lost.n, **dict(zip(("times", *interval_names("times")), times, strict=True))}
    return row | {"beside": COMPARED[beside.call if beside else "open"]}


@dataclass(frozen=True)
class Ladder:
    """Holds a policy of the pulse's level and the trunk's.

    Attributes:
        policy: its table.
        bytes: that a run with it sends, as a share of the trunk's.
    """

    policy: dict[str, Any]
    bytes: float


@dataclass(frozen=True, repr=False)
class Harm:
    """Says where in a training more may be compressed. ``harm`` makes it.

    An arm is one kind of change, for instance to high compression, and a pulse is this change in
    some units of a run. The trunk is the run without a pulse.

    Attributes:
        known: All harms, by pulse and seed, and what they say.
        kinds: What pulses change, by arm.
        shown: How the metric is written.
        unit: What a unit is, for instance "epoch".
        saved: By pulse, the share of the trunk's bytes that a run with it does not send. It is
            empty if bytes are not known.
        rates: The learning rate of each unit, as a share of the highest. It is empty if rates are
            not known.
        minutes: The minutes that training one unit takes, with all processes at work; nan if this
            is not known.
        ladders: The rate ladder of each arm that has one.
        grid: The trunk and the ladders as a grid's TOML file, or "" if there is none.
        out: The folder of the search.
    """

    known: HarmEvidence
    kinds: Mapping[str, PulseKind]
    shown: Metric
    unit: str
    saved: Mapping[Pulse, float] = field(default_factory=dict)
    rates: Sequence[float] = ()
    minutes: float = math.nan
    ladders: Mapping[str, Ladder] = field(default_factory=dict)
    grid: str = ""
    out: Path | None = None

    @property
    def table(self) -> pd.DataFrame:
        """Return a table with one row per phase, in order. Its columns:

        - ``arm``, and ``first`` and ``last``, the first and the last unit of the phase;
        - ``call``: whether the phase is safe, harmful or not decided;
        - ``harm``, with its interval, in the metric's unit; positive is worse; ``n`` seeds;
        - ``needed``: the seeds that would decide, and ``minutes``: how long these would take;
        - ``saved``: the share of the trunk's bytes that the pulse saves;
        - ``lost``: the harm of leaving the same units out, with its interval; ``lost_n`` seeds;
        - ``times``: ``harm`` as a multiple of ``lost``, with its interval;
        - ``beside``: whether ``harm`` is "more" or "less" than ``lost``, or "not decided".
        """
        import pandas as pd

        rows = []
        for arm in self.known.rules.arms:
            for pulse in self.known.phases(arm):
                verdict = self.known.of(pulse)
                ((first, stop),) = pulse.spans
                row = {"arm": arm, "first": first, "last": stop - 1, "call": WORDS[verdict.call]}
                row |= {"harm": verdict.harm, "ci_low": verdict.low, "ci_high": verdict.high}
                row |= {"n": verdict.n, "needed": verdict.needed, "minutes": self._minutes(pulse)}
                row["saved"] = self.saved.get(pulse, math.nan)
                rows.append(row | _columns_of(self.known.lost_time(pulse)))
        return pd.DataFrame(rows)

    def _minutes(self, pulse: Pulse) -> float:
        """Until a pulse is decided; 0 where it is."""
        verdict = self.known.of(pulse)
        if verdict.call != "open":
            return 0.0
        needed = verdict.needed or (LEAST if verdict.n < LEAST else None)
        if needed is None:
            return math.inf
        return self.known.cost(self.known.missing(pulse, needed)) * self.minutes

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    __repr__ = __str__

    def _repr_png_(self) -> bytes:
        from regimes.plotting import style

        with style.theme():
            return style.render_figure(self.figure(), "png")

    def figure(self) -> Figure:
        """Draw the harm of each phase with its interval, and the learning rate. The figure is one
        column of a paper wide."""
        from regimes.search.harms.figure import draw_harm

        texts = {arm: self.kinds[arm].text for arm in self.known.rules.arms}
        fig = draw_harm(self.known, texts, self.shown, self.unit, self.rates)
        fig.data = self.table
        return fig

    def save(self) -> list[Path]:
        """Write the figure and the table into the folder ``out``, as ``harm.png``, ``.svg`` and
        ``.csv``, and ``harm.toml`` if there is a rate ladder. Return the paths.

        Raises:
            ConfigError: there is no folder.
        """
        from regimes.plotting import style
        from regimes.records.files import write_output

        if self.out is None:
            raise ConfigError("out: expected a folder to save into")
        paths = style.save(self.figure(), self.out / "harm", self.table)
        if self.grid:
            write_output(self.out / "harm.toml", self.grid)
            paths.append(self.out / "harm.toml")
        return paths

    # -- in words ----------------------------------------------------------------------------

    def sentences(self) -> list[str]:
        """Return the result in words: a line for each phase, and a line that says what the pulse
        saves in the safe phases."""
        lines: list[str] = []
        for arm in self.known.rules.arms:
            if len(self.known.rules.arms) > 1:
                lines.append(f"{self.kinds[arm].text}:")
            windows = self.known.phases(arm)
            names = [self.units(pulse.spans[0]) for pulse in windows]
            for name, pulse in zip(names, windows, strict=True):
                call = WORDS[self.known.of(pulse).call]
                width = max(map(len, names))
                lines.append(f"{name:{width}}  {call:10}  {self._said(pulse)}")
                beside = self.known.lost_time(pulse)
                if beside and self.known.of(pulse).n:
                    lines.append(
                        f"{'':{width}}  lost time   {self._said_of_lost_time(beside, pulse)}"
                    )
            lines.append(self._saving(arm))
        return lines

    def units(self, span: tuple[int, int]) -> str:
        """Return the units of a span in words, such as "epochs 3-7" for the span (3, 8)."""
        first, last = span[0], span[1] - 1
        word = "epoch" if self.unit == "epoch" else "unit"
        return f"{word} {first}" if first == last else f"{word}s {first}-{last}"

    def _said(self, pulse: Pulse) -> str:
        verdict, margin = self.known.of(pulse), self.known.rules.margin
        unit, interval = self.shown.unit, self._interval(verdict)
        if verdict.harm == math.inf:
            return "the training breaks: a loss is not finite"
        if verdict.call == "safe":
            return f"harm < {self.number(margin)} {unit} (95 %): {interval}"
        if verdict.call == "harmful":
            return interval
        if not verdict.n:
            words = f"not tried: {self._time(pulse)} for {LEAST} seeds"
            if (whole := self.known.divided(pulse)) is None:
                return words
            return f"{words}; {self.units(whole.spans[0])}: {self._interval(self.known.of(whole))}"
        time = self._time(pulse)
        if verdict.n < LEAST:
            seeds = f"{verdict.n} seed{'s' * (verdict.n > 1)}"
            return f"{self.number(verdict.harm)} {unit}, {seeds}; {LEAST} at least, {time}"
        if verdict.needed is None:
            return f"{interval}; if the mean stayed, {MOST_SEEDS} seeds would not decide"
        return f"{interval}; {verdict.needed} seeds would decide, {time}"

    def _said_of_lost_time(self, beside: LostTime, pulse: Pulse) -> str:
        n = beside.lost.n
        if n < LEAST:
            return f"{n} seed{'s' * (n > 1)}; {LEAST} at least" if n else "not tried"
        words = self._interval(beside.lost, seeds=n != self.known.of(pulse).n)
        if math.isinf(beside.lost.harm):
            words = "leaving them out breaks the training"
        elif beside.lost.high < 0:
            words += ", the end is better without them"
        elif math.isnan(beside.times):
            words += ", which may be nothing"
        else:
            times, low, high = map(beside.spell, (beside.times, beside.low, beside.high))
            words += f", harm is {times} [{low}, {high}] times that"
        return f"{words}: {COMPARED[beside.call]}"

    def number(self, value: float) -> str:
        """Return a number as text, with the digits of the metric and one more if it is below 1."""
        return f"{value:z.{self.shown.digits + (abs(value) < 1)}f}"  # no -0.0

    def _interval(self, verdict: PulseVerdict, seeds: bool = True) -> str:
        ends = f"[{self.number(verdict.low)}, {self.number(verdict.high)}]"
        words = f"{self.number(verdict.harm)} {ends} {self.shown.unit}"
        return f"{words}, {verdict.n} seeds" if seeds else words

    def _time(self, pulse: Pulse) -> str:
        minutes = self._minutes(pulse)
        if math.isnan(minutes):
            count = len(self.known.missing(pulse, self.known.of(pulse).needed or LEAST))
            return f"{count} run{'s' * (count > 1)}"
        return f"{minutes:.0f} minutes" if minutes >= 1.5 else f"{max(1, 60 * minutes):.0f} seconds"

    def _saving(self, arm: str) -> str:
        best, kind = self.known.best(arm), self.kinds[arm]
        if best is None:
            return f"{kind.text}: no phase is shown to be safe"
        spans = " and ".join(self.units(span) for span in best.spans)
        verdict = self.known.of(best)
        words = f"{kind.text} in {spans}"
        share = self.saved.get(best)
        if share is not None and abs(share) >= 0.005:
            words += f" saves {share:.0%} of the bytes" if share > 0 else " saves no bytes"
        every = next(iter(self.known.unions(arm)), None)
        if best in self.known.unions(arm):
            words += f" (tried as a whole: {self._interval(verdict)})"
        if every is not None and every != best:
            harm = self.known.of(every)
            tried = self._interval(harm) if harm.n else "not tried"
            words += f"; all safe phases together: {tried}"
        return words
