"""What a plan says: a table, a sentence, a figure, and the configuration to train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regimes.config import DENSE, RunConfig, to_toml
from regimes.cost.methods import Method
from regimes.errors import ConfigError
from regimes.launch.search import SearchBudget
from regimes.plans.curve import Probe
from regimes.plans.decide import FEWEST, SURE, PlanEvidence
from regimes.plans.probes import configure_probe
from regimes.plotting.looks import Metric

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from regimes.console.tables import Table

RESTLESS = 0.5  # from which on what steps take here is not sure
FAR = 2.0  # times the longest probe beyond which a loss is called far from what was measured
TOO_FAR = 16.0  # beyond which nothing is advised: four doublings, of a curve fitted to few


@dataclass(frozen=True, repr=False)
class Plan:
    """Which method reaches the lowest loss in some seconds, or a loss first.

    Attributes:
        known: prices, probes, and the curve fitted to them.
        methods: by name, dense first.
        left_out: methods that take as long a step as dense on the link, and were not tried.
        config: of the training, in steps.
        shown: how the metric is written.
        where: the link in words.
        own: the model and data are the user's: there is no file to train from.
        smaller: the probes are of a smaller model: losses are given as differences to dense's, and
            learning rates in proportion to the configuration's, taken as dense's best.
        more: the least budget that would train more probes; None if none would.
        unrest: how much longer than the fastest of the steps that were timed the median one took,
            as a share.
        out: the folder.
    """

    known: PlanEvidence
    methods: Mapping[str, Method]
    left_out: tuple[str, ...]
    config: RunConfig
    shown: Metric
    where: str
    own: bool = False
    smaller: bool = False
    more: SearchBudget | None = None
    unrest: float = 0.0
    out: Path | None = None

    @property
    def by_seconds(self) -> bool:
        """Is the aim a loss in the end, after some seconds?"""
        return self.known.aim.loss is None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method with a probe, the best first.

        Columns: method; ``best``, its probability to be the best; ``regret``, how much worse than
        the best it is expected to be; ``step``, seconds of a step on the link; ``steps`` and
        ``seconds`` of the training; ``mb``, megabytes that a node sends in it; ``loss`` in the end,
        with the ends of its 95 % interval, in the unit of figures (nan where the aim is a loss;
        above dense's where the probes are of a smaller model); ``low`` and ``high`` of the seconds
        where they are what differs; ``rate``, the learning rate; ``measured``, steps of its longest
        probe; ``times``, how many times as long the training is; ``n``, seeds.
        """
        import pandas as pd

        draws, best = self.known.draws, self.known.best
        regret = self.known.regret
        rows = []
        for i, method in enumerate(self.known.methods):
            if method in self.known.untried:
                continue
            middle, low, high = _quantiles(draws[i] - draws[0] if self.smaller else draws[i])
            price, mine = self.known.price(method), self._probes(method)
            steps: float = self.known.horizon(method)
            if self.by_seconds:
                seconds, loss = steps * price.seconds, self._sign * middle + 0.0
                ends = sorted((self._sign * low + 0.0, self._sign * high + 0.0))
            else:
                seconds, loss, ends = middle, math.nan, [low, high]
                steps = seconds / price.seconds
            longest = max(probe.steps for probe in mine)
            at = steps if math.isfinite(steps) else self.known.horizon(method)
            doublings = self.known.curve.best_rate(method, at)
            if self.smaller:
                dense = self.known.methods[0]
                doublings -= self.known.curve.best_rate(dense, self.known.horizon(dense))
            rate = self.config.optimizer.lr * 2**doublings
            rows.append(
                {
                    "method": method,
                    "best": best[method],
                    "regret": regret[method],
                    "step": price.seconds,
                    "steps": steps,
                    "seconds": seconds,
                    "mb": steps * price.bytes / 1e6,
                    "loss": loss,
                    "low": ends[0],
                    "high": ends[1],
                    "rate": rate,
                    "measured": longest,
                    "times": steps / longest,
                    "n": len({probe.seed for probe in mine}),
                }
            )
        frame = pd.DataFrame(rows)
        return frame.sort_values(["regret", "mb"], ignore_index=True)

    @property
    def _sign(self) -> int:
        return 1 if self.shown.lower else -1

    def _probes(self, method: str) -> list[Probe]:
        return [probe for probe in self.known.curve.losses if probe.method == method]

    # -- the answer --------------------------------------------------------------------------

    @property
    def best(self) -> str:
        """The method with the least expected regret."""
        return str(self.table["method"].iloc[0])

    @property
    def decided(self) -> bool:
        """Is it surely the best?"""
        return not self.known.untried and float(self.table["best"].iloc[0]) >= SURE

    @property
    def config_to_train(self) -> RunConfig:
        """The training that the plan advises, with its method, rate and number of steps."""
        rate = math.log2(self.table["rate"].iloc[0] / self.config.optimizer.lr)
        seed = max(probe.seed for probe in self.known.curve.losses) + 1
        return configure_probe(self.config, self.methods[self.best], self._steps, rate, seed)

    @property
    def _steps(self) -> int:
        """Steps of the training that the plan advises; a loss that none reaches has no number."""
        steps = self.table["steps"].iloc[0]
        return round(steps) if math.isfinite(steps) else self.known.horizon(self.best)

    def hook(self) -> str:
        """The lines of a training script of one's own."""
        row, method = self.table.iloc[0], self.methods[self.best]
        lines = [f"# {self._training(row['rate'])}"]
        sent = f"compressor={dict(method.table)!r}, level={method.level!r}"
        if method.period > 1:
            words = ["model", "optimizer", f"policy={method.period}"]
            words += [sent] * (method.level != DENSE)
            lines.append("# model: without DistributedDataParallel")
            lines.append(f"job = regimes.local_steps({', '.join(words)})")
            lines.append("# after each optimizer.step(): job.step()")
        elif method.level == DENSE:
            lines.append("# no compression: plain DistributedDataParallel")
        else:
            lines.append(f"hook = regimes.attach(model, {sent}, optimizer=optimizer)")
        return "\n".join(lines)

    def _training(self, rate: float) -> str:
        """What is trained, in words."""
        config, optimizer = self.config, self.config.optimizer
        own = [f"{key} {value}" for key, value in optimizer.options.items()]
        if optimizer.name == "sgd":
            own += [f"momentum {optimizer.momentum:g}{', nesterov' * optimizer.nesterov}"]
        own += [f"weight decay {optimizer.weight_decay:g}"]
        return (
            f"{optimizer.name}, learning rate {rate:.3g}, {', '.join(own)}; "
            f"{config.workers} workers x {config.batch_size}, {self._steps:,} steps"
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
        from regimes.console.tables import Table

        rows = [self._line(row) for row in self.table.to_dict("records")]
        aim = self.known.aim
        what = f"{self.shown.heading} in {_time(aim.seconds)}" if aim.seconds else "time"
        if self.smaller:
            what = f"{what}, minus dense's"
        heads = ("method", what, "best", "a step", "steps", "MB sent", "rate", "measured")
        note = (
            "95 % intervals of the fitted mean over seeds. best: the probability of being the "
            "best. measured: the steps of its longest probe"
        )
        return Table(heads, rows, note)

    def _line(self, row: dict) -> tuple[str, ...]:
        if self.by_seconds:
            digits = self.shown.digits + 1
            form = f"{'+' if self.smaller else ''}.{digits}f"
            what = f"{row['loss']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"
        elif math.isfinite(row["seconds"]):
            what = f"{_time(row['seconds'])} [{_time(row['low'])}, {_time(row['high'])}]"
        else:
            what = "never"
        return (
            row["method"],
            what,
            f"{row['best']:.0%}",
            _time(row["step"]),
            f"{row['steps']:,.0f}" if math.isfinite(row["steps"]) else "-",
            f"{row['mb']:,.0f}" if math.isfinite(row["mb"]) else "-",
            f"{row['rate']:.3g}",
            f"{row['measured']:,}",
        )

    def sentence(self) -> str:
        """The advice, its reason, and how far it reaches beyond what was measured."""
        first = self.table.iloc[0]
        names = list(self.table["method"])
        dense = self.table.iloc[names.index(self.known.methods[0])]
        if not math.isfinite(first["seconds"]):
            reach = f"{self.known.aim.loss:g} {self.shown.unit}"
            return f"No method is expected to reach {reach} in {_time(self.known.rungs[-1])}."
        if self.best == self.known.methods[0]:
            words = f"on {self.where} no method is expected to end better"
            advice = "Stay dense"
        else:
            words = (
                f"on {self.where} a step takes {_time(first['step'])} instead of dense's "
                f"{_time(dense['step'])}"
            )
            if self.by_seconds:
                words += (
                    f", so there are {first['steps']:,.0f} steps instead of {dense['steps']:,.0f}"
                )
            advice = f"Train with {self.best}"
        doubt = self._doubt()
        advice = advice[0].lower() + advice[1:] if doubt else advice
        words = f"{doubt}{advice}: {words}"
        if first["times"] > FAR:
            words += (
                f". The training is {first['times']:.0f} times as long as the longest probe: what "
                "it ends at is extrapolated"
            )
            if not self.smaller:
                words += ", and a smaller model (--probe, probe=) could be trained longer"
        words += self._own_schedule() + self._too_slow() + self._elsewhere()
        if self.smaller:
            words += (
                ". The short trainings were of a smaller model: trust the order of the methods "
                "more than their differences, whose intervals are of its size. Rates are in "
                "proportion to yours, which is taken as dense's best"
            )
        if self.left_out:
            words += f". Not faster than dense on this link: {'; '.join(self.left_out)}"
        if self.unrest > RESTLESS:
            words += (
                f". The steps that were timed for this differ by {self.unrest:.0%}, as beside "
                "another load: the same call at a quieter time renews what a step takes"
            )
        return words + "."

    def _doubt(self) -> str:
        """Why the advice is none, or not sure; ends where the advice begins."""
        first, others = self.table.iloc[0], self.table.iloc[1:]
        if first["times"] > TOO_FAR and not self.decided:
            return f"Too short for advice: {self._next()}. What was seen says at best: "
        if self.known.untried:
            untried = "; ".join(self.known.untried)
            return f"Not decided, the budget had no time for {untried}: {self._next()}. So far: "
        if self.decided:
            return ""
        near = [row["method"] for row in others.to_dict("records") if row["best"] >= 1 - SURE]
        beside = f" between {'; '.join([self.best, *near])}" if near else ""
        return f"Not decided{beside}: {self._next()}. So far: "

    def _next(self) -> str:
        """What would train more."""
        if self.more is None:
            return "nothing is left to try"
        if self.more.minutes is None:
            return f"{self.more.runs} runs have time for the next short trainings"
        minutes = self.more.minutes
        return f"{minutes:.{1 if minutes < 10 else 0}f} minutes have time for the next trainings"

    def _own_schedule(self) -> str:
        """That the configured schedule is cut or stretched, if it is."""
        seconds, steps = self.known.aim.seconds, self.config.steps or 0
        dense = self.known.price(self.known.methods[0]).seconds * steps
        if seconds is None or not steps or 1 / FAR < dense / seconds < FAR:
            return ""
        how = "stretched" if dense < seconds else "cut"
        return f". Your schedule of {steps:,} steps takes dense {_time(dense)} and is {how}"

    def _too_slow(self) -> str:
        """Methods that have no time for the fewest steps of a probe."""
        seconds, known = self.known.aim.seconds, self.known
        if seconds is None:
            return ""
        slow = [name for name in known.methods if FEWEST * known.price(name).seconds > seconds]
        fewest = f". {_time(seconds)} have no time for the {FEWEST} steps that are shown of "
        return f"{fewest}{'; '.join(slow)}" if slow else ""

    def _elsewhere(self) -> str:
        """What the table of measured losses has of the method; nothing of dense."""
        item = "token" if self.shown.lower else "sample"
        harm = self.methods[self.best].harm(item)
        if harm is None:
            return ""
        where = f"{harm.setting.name}, {harm.setting.parameters:,} parameters"
        return f". In another training ({where}) its loss minus dense's was {harm} in as many steps"

    def figure(self) -> Figure:
        """The loss in the end against the seconds of the training, for each method; one column."""
        from regimes.plans.figure import draw_plan

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


def _quantiles(draws: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % interval; some draws may be infinite."""
    ordered = np.sort(draws)
    middle, low, high = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.025, 0.975))
    return float(middle), float(low), float(high)


def _time(seconds: float) -> str:
    """A duration in three digits.

    >>> [_time(x) for x in (0.0123, 4.5, 3600.0, float("inf"))]
    ['12.3 ms', '4.5 s', '60 min', 'never']
    """
    if not math.isfinite(seconds):
        return "never"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"
