"""What a plan says: a table, a sentence, a figure, and the configuration to train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.base.config import DENSE, RunConfig, to_toml
from regimes.base.errors import ConfigError
from regimes.cost.methods import Method
from regimes.job.spellings import spell_compressor
from regimes.plotting.looks import Metric
from regimes.search.plans.clock import DenseCurve
from regimes.search.plans.decide import PlanEvidence
from regimes.search.plans.probes import configure_probe
from regimes.search.rounds import SearchBudget

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from regimes.base.console.tables import Table

RESTLESS = 0.5  # from which on what steps take here is not sure
FAR = 2.0  # times the short runs beyond which a rate is called that of other lengths
TOO_FAR = 16.0  # beyond which nothing is advised: four doublings


@dataclass(frozen=True, repr=False)
class Plan:
    """Says how many times as fast as dense each method trains on a link, and which to train with.

    Attributes:
        known: the prices, the short runs, and the clocks that they give.
        methods: the methods by name, with dense first.
        left_out: methods whose step takes as long as dense's on the link. They were not tried.
        config: the configuration of the training, in steps.
        shown: how the metric is written.
        where: the link in words.
        curve: what dense ended at in earlier trainings, by steps, in the unit of figures.
        own: whether the model and the data are the user's, so that there is no file to train from.
        smaller: whether the short runs are of a smaller model than the training.
        budget: the budget that was given.
        more: the least budget that would train more, or None if none would.
        unrest: how much longer than the fastest of the timed steps the median one took, as a share.
        out: the folder.
    """

    known: PlanEvidence
    methods: Mapping[str, Method]
    left_out: tuple[str, ...]
    config: RunConfig
    shown: Metric
    where: str
    curve: Mapping[float, float] = field(default_factory=dict)
    own: bool = False
    smaller: bool = False
    budget: SearchBudget | None = None
    more: SearchBudget | None = None
    unrest: float = 0.0
    out: Path | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method with a clock, the fastest first.

        Columns: method; ``speed``, how many times as fast as dense it comes to a loss, with the
        ends ``low`` and ``high`` of its 95 % interval; ``clock`` with ``clock_low`` and
        ``clock_high``; ``step``, seconds of a step on the link; ``steps`` of the training in
        question, and ``mb``, megabytes that a node sends in it; ``loss`` in its end, in the unit of
        figures, with ``loss_low`` and ``loss_high``, nan where dense's curve does not reach so far;
        ``rate``, the learning rate to train with; ``n``, seeds.
        """
        import pandas as pd

        rows = []
        for method, speed in self.known.speeds.items():
            clock, price = self.known.clocks[method], self.known.price(method)
            steps = self.known.horizon(method)
            loss, worst, least = (
                self._loss(k * steps) for k in (clock.mean, clock.low, clock.high)
            )
            low, high = sorted((worst, least))
            rows.append(
                {
                    "method": method,
                    "speed": speed.mean,
                    "low": speed.low,
                    "high": speed.high,
                    "clock": clock.mean,
                    "clock_low": clock.low,
                    "clock_high": clock.high,
                    "step": price.seconds,
                    "steps": steps,
                    "mb": steps * price.bytes / 1e6,
                    "loss": loss if clock.known else math.nan,
                    "loss_low": low,
                    "loss_high": high,
                    "rate": self.rate(method),
                    "n": clock.n or len(self.known.best_ends(method, self.known.length)),
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def _dense(self) -> DenseCurve | None:
        """Dense's curve, from earlier trainings and the short runs of the same model."""
        sign = 1 if self.shown.lower else -1
        points = {steps: sign * loss for steps, loss in self.curve.items()}
        short = None if self.smaller else self.known.dense_curve()
        if short is not None:
            points = {**dict(zip(short.steps, short.losses, strict=True)), **points}
        return DenseCurve.of(points) if points else None

    def _loss(self, steps: float) -> float:
        """Dense's after some steps, in the unit of figures; nan where it is not known."""
        if self._dense is None or not steps > 0:
            return math.nan
        return (1 if self.shown.lower else -1) * self._dense.loss(steps)

    def rate(self, method: str) -> float:
        """The learning rate to train with: the best one of the short runs. Where the training is
        far longer than these, and dense's curve of that length was given, the configuration's, with
        which it was trained; for another model than that of the short runs, too."""
        lengths, horizon = self.known.lengths(method), self.known.horizon(method)
        given = max(self.curve, default=0.0) * FAR >= horizon
        if self.smaller or not lengths or (horizon > FAR * lengths[-1] and given):
            return self.config.optimizer.lr
        return self.config.optimizer.lr * 2.0 ** self.known.best_rate(method, lengths[-1])

    # -- the answer --------------------------------------------------------------------------

    @property
    def best(self) -> str:
        """The fastest method."""
        return self.known.best

    @property
    def decided(self) -> bool:
        """Is it surely the fastest?"""
        return self.known.decided

    @property
    def config_to_train(self) -> RunConfig:
        """The training that the plan advises, with its method, rate and number of steps."""
        rate = math.log2(self.rate(self.best) / self.config.optimizer.lr)
        seed = max((probe.seed for probe in self.known.losses), default=self.config.seed) + 1
        steps = self.known.horizon(self.best)
        return configure_probe(self.config, self.methods[self.best], steps, rate, seed)

    def hook(self) -> str:
        """The lines of a training script of one's own."""
        method = self.methods[self.best]
        lines = [f"# {self._training()}"]
        sent = f"compressor={spell_compressor({**method.table, 'level': method.level}, 'regimes.')}"
        if method.period > 1:
            words = ["model", "optimizer", f"policy={method.period}"]
            words += [sent] * (method.level != DENSE)
            lines.append("# model: without DistributedDataParallel")
            lines.append(f"job = regimes.local_steps({', '.join(words)})")
            lines.append("# after each optimizer.step(): job.step()")
        elif method.level == DENSE:
            lines.append("# no compression: plain DistributedDataParallel")
        else:
            lines.append(f"hook = regimes.attach(model, optimizer, {sent})")
        return "\n".join(lines)

    def _training(self) -> str:
        """What is trained, in words."""
        config, optimizer = self.config, self.config.optimizer
        own = [f"{key} {value}" for key, value in optimizer.options.items()]
        if optimizer.name == "sgd":
            own += [f"momentum {optimizer.momentum:g}{', nesterov' * optimizer.nesterov}"]
        own += [f"weight decay {optimizer.weight_decay:g}"]
        return (
            f"{optimizer.name}, learning rate {self.rate(self.best):.3g}, {', '.join(own)}; "
            f"{config.workers} workers x {config.batch_size}, "
            f"{self.known.horizon(self.best):,} steps"
        )

    def __str__(self) -> str:
        return f"{self.lines()}\n{self.sentence()}"

    __repr__ = __str__

    def _repr_png_(self) -> bytes:
        from regimes.plotting import style

        with style.theme():
            return style.render_figure(self.figure(), "png")

    def lines(self) -> str:
        """The table in words."""
        return self.as_table().text()

    def as_table(self) -> Table:
        """The table, for any width."""
        from regimes.base.console.tables import Table

        rows = []
        for row in self.table.to_dict("records"):
            method = row["method"]
            rows.append(
                (
                    method,
                    str(self.known.speeds[method]) if method != self.known.dense else "1",
                    str(self.known.clocks[method]) if method != self.known.dense else "1",
                    format_time(row["step"]),
                    f"{row['steps']:,}",
                    self._shown_loss(row),
                    f"{row['rate']:.3g}",
                    str(row["n"]),
                )
            )
        loss = f"{self.shown.heading} in {format_time(self.known.seconds)}"
        heads = ("method", "× dense", "clock", "a step", "steps", loss, "rate", "n")
        note = (
            "× dense: how many times as fast it comes to a loss: its clock, the steps of dense "
            "that one of its steps is worth, times dense's seconds of a step over its own. 95 % "
            f"intervals; short runs of {self.known.length:,} steps with n seeds"
        )
        return Table(heads, rows, note)

    def _shown_loss(self, row: dict) -> str:
        if math.isnan(row["loss"]):
            return "-"
        digits = self.shown.digits + 1
        ends = (row["loss_low"], row["loss_high"])
        if row["method"] == self.known.dense or any(map(math.isnan, ends)):
            return f"{row['loss']:.{digits}f}"
        return f"{row['loss']:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"

    def sentence(self) -> str:
        """The advice, its reason, and how far it reaches beyond what was measured."""
        doubt, dense = self._doubt(), self.known.dense
        if self.best == dense:
            advice = f"Stay dense: on {self.where} no method comes to a loss faster"
        else:
            first = self.table.iloc[0]
            advice = (
                f"Train with {self.best} at a learning rate of {first['rate']:.3g}: on "
                f"{self.where} it is {self.known.speeds[self.best]} times as fast as dense. A step "
                f"takes {format_time(first['step'])} in place of "
                f"{format_time(self.known.price(dense).seconds)}, and is worth "
                f"{first['clock']:.2f} of dense's"
            )
        advice = advice[0].lower() + advice[1:] if doubt else advice
        said = [doubt + advice, self._losses(), self._far(), self._smaller(), self._slow()]
        if self.left_out:
            said.append(f"Not faster than dense on this link: {'; '.join(self.left_out)}")
        if self.more is not None and self.budget is not None and self.budget.minutes is not None:
            said.append(f"The {self.budget.minutes:g} minutes are over")
        if self.unrest > RESTLESS:
            said.append(
                f"The steps that were timed for this differ by {self.unrest:.0%}, as beside "
                "another load: the same call at a quieter time renews what a step takes"
            )
        return " ".join(f"{words}." for words in said if words)

    def _doubt(self) -> str:
        """Why the advice is none, or not sure; ends where the advice begins."""
        if self.decided:
            return ""
        if self.known.horizon(self.best) > TOO_FAR * self.known.length and self.more is not None:
            return f"Too short for advice: {self._next()}. What was seen says at best: "
        if self.known.untried:
            untried = "; ".join(self.known.untried)
            return f"Not decided, the budget had no time for {untried}: {self._next()}. So far: "
        near = self.known.rivals
        beside = f" between {'; '.join(near)}" if len(near) > 1 else ""
        return f"Not decided{beside}, whose intervals overlap: {self._next()}. So far: "

    def _next(self) -> str:
        """What would train more."""
        if self.more is None:
            return "nothing is left to try"
        if self.more.minutes is None:
            return f"{self.more.runs} runs have the next short trainings"
        minutes = self.more.minutes
        return f"{minutes:.{1 if minutes < 10 else 0}f} minutes have the next short trainings"

    def _losses(self) -> str:
        """The loss of the best method and of dense after the seconds."""
        rows = {row["method"]: row for row in self.table.to_dict("records")}
        span, dense = format_time(self.known.seconds), rows[self.known.dense]
        if math.isnan(rows[self.best]["loss"]) or math.isnan(dense["loss"]):
            lengths = sorted({self.known.horizon(m) for m in (self.known.dense, self.best)})
            return (
                f"What it ends at after {span} is not said: that needs dense's losses in the ends "
                f"of trainings of {' to '.join(f'{n:,}' for n in lengths)} steps (--curve, curve=)"
            )
        ends = f"After {span} dense ends at {self._shown_loss(dense)} {self.shown.unit}"
        if self.best == self.known.dense:
            return ends
        return f"{ends}, {self.best} at {self._shown_loss(rows[self.best])}"

    def _far(self) -> str:
        """That the training is longer than what was measured."""
        times = self.known.horizon(self.best) / max(self.known.lengths(self.best), default=1)
        if times <= FAR or self.best == self.known.dense:
            return ""
        words = f"The training is {times:.0f} times as long as the short runs"
        if self.rate(self.best) == self.config.optimizer.lr:
            return f"{words}, and the rate is that of your configuration"
        return f"{words}, of which the rate is: the best one may have moved"

    def _smaller(self) -> str:
        if not self.smaller:
            return ""
        return (
            "The short runs were of a smaller model: a clock hardly depends on the size, and the "
            "rate is that of your configuration, which is taken as dense's best"
        )

    def _slow(self) -> str:
        """That the configured schedule is cut or stretched, if it is."""
        steps = self.config.steps or 0
        dense = self.known.price(self.known.dense).seconds * steps
        if not steps or 1 / FAR < dense / self.known.seconds < FAR:
            return ""
        how = "stretched" if dense < self.known.seconds else "cut"
        return f"Your schedule of {steps:,} steps takes dense {format_time(dense)} and is {how}"

    def figure(self) -> Figure:
        """How many times as fast as dense each method is, with its interval; one column."""
        from regimes.search.plans.figure import draw_plan

        fig = draw_plan(self)
        fig.data = self.table
        return fig

    def save(self) -> list[Path]:
        """Write ``plan.png``, ``.svg`` and ``.csv`` into the folder, and ``plan.toml``, the
        configuration to train, where the model and data have names."""
        from regimes.plotting import style
        from regimes.records.files import write_output

        if self.out is None:
            raise ConfigError("out: expected a folder to save into")
        paths = style.save(self.figure(), self.out / "plan", self.table)
        if not self.own:
            write_output(self.out / "plan.toml", to_toml(self.config_to_train))
            paths.append(self.out / "plan.toml")
        return paths


def format_time(seconds: float) -> str:
    """A duration in three digits.

    >>> [format_time(x) for x in (0.0123, 4.5, 3600.0)]
    ['12.3 ms', '4.5 s', '60 min']
    """
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"
