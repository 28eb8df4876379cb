"""What a plan says: a table, a sentence, a figure, and the configuration to train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.base.config import DENSE, RunConfig, to_toml
from regimes.cost.methods import Method
from regimes.job.spellings import spell_compressor
from regimes.plotting.looks import Metric
from regimes.search.plans.clock import DenseCurve
from regimes.search.plans.decide import PlanEvidence
from regimes.search.plans.probes import configure_probe
from regimes.search.rounds import SearchBudget

if TYPE_CHECKING:
    import pandas as pd

    from regimes.base.console.tables import Table
    from regimes.plotting.style import Shown

RESTLESS = 0.5  # from which on what steps take here is not sure
FAR = 2.0  # times the short runs beyond which a rate is called that of other lengths
TOO_FAR = 16.0  # beyond which nothing is advised: four doublings
HEADS = ("method", "× dense", "clock", "a step", "steps", "", "rate", "n")


@dataclass(frozen=True, repr=False)
class Plan:
    """Says how many times as fast as dense each method trains on a link, and which method to train
    with. Dense is training without compression. ``plan`` makes it.

    Attributes:
        known: The seconds of a step of each method, the short runs, and the clocks that they give.
        methods: The methods by name, with dense first.
        left_out: The methods whose step takes as long as dense's on the link. They were not tried.
        config: The configuration of the training. Its length is in steps.
        shown: How the metric is written.
        where: The link in words.
        curve: The losses of earlier trainings with dense, by their number of steps, in the unit of
            figures.
        own: Whether the model and the data are objects of a script. Then no file can name them.
        smaller: Whether the short runs train a smaller model.
        budget: The budget that was given.
        more: The least budget with which another short run would be trained. None: no budget would
            train more.
        unrest: How much longer the median of the timed steps took than the fastest, as a share.
        out: The folder of the plan.
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
    out: Path = Path()

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method with a clock, the fastest first.

        The columns are:

        - ``method``;
        - ``speed``: how many times as fast as dense (training without compression) the method
          reaches a loss, with the ends ``low`` and ``high`` of its 95 % interval;
        - ``clock``: how many steps of dense one of its steps is worth, with ``clock_low`` and
          ``clock_high``;
        - ``step``: the seconds of a step on the link;
        - ``steps``: for how many steps there is time, and ``mb``: the megabytes that a node sends
          in them;
        - ``loss``: the loss after these steps, in the unit that figures have (percent, or bits per
          byte), with ``loss_low`` and ``loss_high``; nan if no training with dense is known that
          is long enough;
        - ``rate``: the learning rate to train with;
        - ``n``: the number of seeds.
        """
        import pandas as pd

        rows = []
        for method, speed in self.known.speeds.items():
            clock, price = self.known.clocks[method], self.known.prices[method]
            steps = self.known.horizon(method)
            loss, *ends = (self._loss(k * steps) for k in (clock.mean, clock.low, clock.high))
            low, high = sorted(ends)
            row = {"method": method, "speed": speed.mean, "low": speed.low, "high": speed.high}
            row |= {"clock": clock.mean, "clock_low": clock.low, "clock_high": clock.high}
            row |= {"step": price.seconds, "steps": steps, "mb": steps * price.bytes / 1e6}
            row |= {"loss": loss if clock.known else math.nan, "loss_low": low, "loss_high": high}
            n = clock.n or len(self.known.best_ends(method, self.known.length))
            rows.append({**row, "rate": self.rate(method), "n": n})
        return pd.DataFrame(rows)

    @cached_property
    def _dense(self) -> DenseCurve | None:
        """Dense's curve, from earlier trainings and the short runs of the same model."""
        points = {steps: self.shown.sign * loss for steps, loss in self.curve.items()}
        short = None if self.smaller else self.known.dense_curve()
        if short is not None:
            points = {**dict(zip(short.steps, short.losses, strict=True)), **points}
        return DenseCurve.of(points) if points else None

    def _loss(self, steps: float) -> float:
        """Dense's after some steps, in the unit of figures; nan where it is not known."""
        if self._dense is None or not steps > 0:
            return math.nan
        return self.shown.sign * self._dense.loss(steps)

    def rate(self, method: str) -> float:
        """Return the learning rate to train a method with: the best one of its short runs. In two
        cases it is the rate of the configuration: if the short runs train a smaller model, and if
        the training is far longer than the short runs and a curve of such length was given."""
        lengths, horizon = self.known.lengths(method), self.known.horizon(method)
        given = max(self.curve, default=0.0) * FAR >= horizon
        if self.smaller or not lengths or (horizon > FAR * lengths[-1] and given):
            return self.config.optimizer.lr
        return self.config.optimizer.lr * 2.0 ** self.known.best_rate(method, lengths[-1])

    # -- the answer --------------------------------------------------------------------------

    @property
    def best(self) -> str:
        """Return the name of the fastest method."""
        return self.known.best

    @property
    def decided(self) -> bool:
        """Answer whether ``best`` is surely the fastest method: the interval of its speed lies
        above all others, with two seeds or more."""
        return self.known.decided

    @property
    def config_to_train(self) -> RunConfig:
        """Return the configuration that the plan advises: the best method, its learning rate and
        the number of steps for which there is time. Its seed is one that no short run had."""
        rate = math.log2(self.rate(self.best) / self.config.optimizer.lr)
        seed = max((probe.seed for probe in self.known.losses), default=self.config.seed) + 1
        steps = self.known.horizon(self.best)
        return configure_probe(self.config, self.methods[self.best], steps, rate, seed)

    def hook(self) -> str:
        """Return the lines for a training script of your own: they attach the hook, or start local
        steps, with the method that the plan advises."""
        method, optimizer = self.methods[self.best], self.config.optimizer
        own = [f"{key} {value}" for key, value in optimizer.options.items()]
        if optimizer.name == "sgd":
            own.append(f"momentum {optimizer.momentum:g}{', nesterov' * optimizer.nesterov}")
        own.append(f"weight decay {optimizer.weight_decay:g}")
        lines = [
            f"# {optimizer.name}, learning rate {self.rate(self.best):.3g}, {', '.join(own)}; "
            f"{self.config.workers} workers x {self.config.batch_size}, "
            f"{self.known.horizon(self.best):,} steps"
        ]
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

    def __str__(self) -> str:
        return f"{self.as_table().text()}\n{self.sentence()}"

    __repr__ = __str__

    def _repr_png_(self) -> bytes:
        return self.figure()._repr_png_()

    def as_table(self) -> Table:
        """Return ``table`` as text for a console, which fits into any width."""
        from regimes.base.console.tables import Table

        rows = []
        for row in self.table.to_dict("records"):
            method = row["method"]
            speed, clock = "1", "1"
            if method != self.known.dense:
                speed = f"{self.known.speeds[method]:.3g}"
                clock = f"{self.known.clocks[method]:.2f}"
            numbers = (f"{row['steps']:,}", self._shown_loss(row), f"{row['rate']:.3g}")
            rows.append((method, speed, clock, format_time(row["step"]), *numbers, str(row["n"])))
        loss = f"{self.shown.heading} in {format_time(self.known.seconds)}"
        note = (
            "dense: no compression. × dense: how many times as fast as dense a method comes to a "
            "loss: its clock (how many steps of dense one of its steps is worth, in short runs of "
            f"{self.known.length:,} steps with n seeds), times dense's seconds of a step over its "
            "own. In brackets: 95 % intervals"
        )
        return Table([head or loss for head in HEADS], rows, note)

    def _shown_loss(self, row: Mapping) -> str:
        if math.isnan(row["loss"]):
            return "-"
        loss, low, high = (
            f"{row[name]:.{self.shown.digits + 1}f}" for name in ("loss", "loss_low", "loss_high")
        )
        alone = row["method"] == self.known.dense or "nan" in low + high
        return loss if alone else f"{loss} [{low}, {high}]"

    # -- the advice in words -----------------------------------------------------------------

    def sentence(self) -> str:
        """Return the advice in words: the method, the reason, and how far it goes beyond what was
        measured."""
        doubt, dense = self._doubt(), self.known.dense
        advice = f"Stay dense: on {self.where} no method comes to a loss faster"
        if self.best != dense:
            step, before = (format_time(self.known.prices[m].seconds) for m in (self.best, dense))
            clock = self.known.clocks[self.best]
            advice = (
                f"Train with {self.best} at a learning rate of {self.rate(self.best):.3g}: on "
                f"{self.where} it is {self.known.speeds[self.best]:.3g} times as fast as dense. A "
                f"step takes {step} in place of {before}, and is worth "
                f"{'less than ' * (not clock.known)}{clock.mean:.2f} of dense's"
            )
        if doubt:
            advice = f"{doubt}{advice[0].lower()}{advice[1:]}"
        return " ".join(f"{words}." for words in (advice, self._losses(), *self._notes()) if words)

    def _doubt(self) -> str:
        """Why the advice is none, or not sure; ends where the advice begins."""
        if self.decided:
            return ""
        if self._too_short:
            far = f"the training is {self._times:,.0f} times as long as the short runs"
            return f"Too short for advice: {far}; {self._next()}. What was seen says at best: "
        if self.known.untried:
            untried = "; ".join(self.known.untried)
            return f"Not decided, the budget had no time for {untried}: {self._next()}. So far: "
        if len(near := self.known.rivals) > 1:
            overlap = f"between {'; '.join(near)}, whose intervals overlap"
            return f"Not decided {overlap}: {self._next()}. So far: "
        return f"Not decided by one seed alone: {self._next()}. So far: "

    @property
    def _times(self) -> float:
        """How many times as long as its short runs the training by the best method is."""
        return self.known.horizon(self.best) / max(self.known.lengths(self.best), default=1)

    @property
    def _too_short(self) -> bool:
        """Is the training so much longer that nothing is advised, and would more be trained?"""
        return not self.decided and self._times > TOO_FAR and self.more is not None

    def _next(self) -> str:
        """What would train more."""
        if self.more is None:
            return "nothing is left to try"
        minutes = self.more.minutes
        if minutes is None:
            return f"the same call with {self.more.runs} runs trains more"
        return f"the same call with {minutes:.{1 if minutes < 10 else 0}f} minutes trains more"

    def _losses(self) -> str:
        """The loss of the best method and of dense after the seconds."""
        rows = {row["method"]: row for row in self.table.to_dict("records")}
        span, dense, best = format_time(self.known.seconds), self.known.dense, rows[self.best]
        if math.isnan(best["loss"]) or math.isnan(rows[dense]["loss"]):
            needed = sorted({rows[dense]["steps"], round(best["clock"] * best["steps"])})
            known = () if self._dense is None else (self._dense.steps[0], self._dense.steps[-1])
            needs, has = (" to ".join(f"{n:,.0f}" for n in ends) for ends in (needed, known))
            return (
                f"What it ends at after {span} is not known: for that, give losses in the ends of "
                f"trainings without compression of {needs} steps (--curve, curve=); known are "
                + (f"those of {has}" if has else "none")
            )
        said = f"After {span} dense ends at {self._shown_loss(rows[dense])}"
        if self.best != dense:
            said += f", {self.best} at {self._shown_loss(best)}"
        return f"{said} ({self.shown.heading})"

    def _notes(self) -> Iterator[str]:
        """How far the training is from what was measured, and what the budget had no time for."""
        known, dense = self.known, self.known.dense
        if self._times > FAR and self.best != dense and not self._too_short:
            yours = self.rate(self.best) == self.config.optimizer.lr
            rate = "and the rate is that of your configuration"
            rate = rate if yours else "of which the rate is: the best one may have moved"
            yield f"The training is {self._times:.0f} times as long as the short runs, {rate}"
        if self.smaller:
            yield (
                "The short runs were of a smaller model: a clock hardly depends on the size, and "
                "the rate is that of your configuration, which is taken as dense's best"
            )
        steps = self.config.steps or 0
        configured = known.prices[dense].seconds * steps
        if steps and not 1 / FAR < configured / known.seconds < FAR:
            how = "stretched" if configured < known.seconds else "cut"
            length, span = format_time(configured), format_time(known.seconds)
            yield f"Your schedule of {steps:,} steps takes dense {length} and is {how} to {span}"
        if self.left_out:
            yield f"Not faster than dense on this link: {'; '.join(self.left_out)}"
        if self.more is not None and self.budget is not None and self.budget.minutes is not None:
            yield f"The {self.budget.minutes:g} minutes are over"
        if self.unrest > RESTLESS:
            yield (
                f"Half of the timed steps took {1 + self.unrest:.1f} times as long as the fastest "
                "or longer, as beside another load: the same call at a quieter time renews what a "
                "step takes"
            )

    def figure(self) -> Shown:
        """Draw how many times as fast as dense each method is, with its interval. Hollow marks are
        upper bounds."""
        from regimes.plotting import style

        table = self.table.iloc[::-1]
        with style.theme():
            fig = style.figure(1.4 + 0.28 * len(table), width=3.4)
            fig.data, ax = self.table, fig.subplots()
            ax.axvline(1.0, color="0.5", linewidth=0.8, linestyle=style.DOTTED)
            for at, row in enumerate(table.to_dict("records")):
                known = self.known.clocks[row["method"]].known
                ax.plot([row["low"], row["high"]], [at, at], color="0.3", linewidth=0.8)
                look = {"markersize": 4, "markerfacecolor": "black" if known else "white"}
                ax.plot(row["speed"], at, "o", color="black", **look)
            ax.set_yticks(range(len(table)), list(table["method"]), fontsize=7)
            ax.set(xlabel="times as fast as dense", ylim=(-0.5, len(table) - 0.5))
            ax.set_xlim(left=0.0)
            seeds = style.seeds_in_words([len(self.known.seeds)])
            caption = (
                f"On {self.where}: seconds of a step and clocks from short runs of "
                f"{self.known.length:,} steps ({seeds}); 95 % intervals, hollow: at most."
            )
            style.add_caption(fig, caption + " Short runs of a smaller model." * self.smaller)
        return fig

    def save(self) -> list[Path]:
        """Write the figure and the table into the folder, as ``plan.png``, ``.svg`` and ``.csv``.
        If the model and the data have names, also write ``plan.toml``, the configuration to train.
        Return the paths."""
        from regimes.plotting import style
        from regimes.records.files import write_output

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
