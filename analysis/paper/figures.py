"""Every figure of the paper: what it shows, the grids to run, the module that draws it.

::

    regimes figure                                     # the list
    regimes ablate small-budget --seeds 5 --jobs 2     # a grid that it names
    regimes figure 8 runs/small-budget                 # the figure from its records

``python -m analysis figures`` in a checkout, with the module that draws each.

Each figure has a grid at CPU scale and those at the paper's; both are drawn by the same code.
Figures 12-17 are one grid per network: give several folders, or one at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.errors import ConfigError, suggest_nearest
from regimes.plotting.needs import Needs
from regimes.records import load_all

from ..common.command import by_name
from ..common.names import FIGURE2

THREE = ("low", "high", "accordion")
BATCHES = ("small-batch", "large-batch", "accordion-batch")
CHOOSING = ("curves", "batch")  # modules that draw the schedules that they are given
TIMED = {"x": ("epoch", "floats", "seconds")}


@dataclass(frozen=True)
class Drawn:
    """How one figure is drawn.

    Attributes:
        shows: one sentence.
        module: of this room, has ``main(records, out, ...)``.
        small, paper: the grids to run at CPU scale and at the paper's; any of them is enough.
        schedules: those that it needs, where the module can choose; none: all that were run.
        fixed: those that it needs, where the module cannot.
        also: further ones, drawn where they were run.
        instead: by schedule, another one that takes its part where it was not run.
        statistics: that it needs, of ``schedules`` and ``fixed``, or else of any one schedule.
        options: other arguments of ``main``.
    """

    shows: str
    module: str
    small: tuple[str, ...]
    paper: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> Needs | None:
        schedules, like = self.schedules + self.fixed, self.small[0]
        known = Needs(schedules, self.also, self.statistics, like, self.instead)
        return known if known.schedules or known.also or known.statistics else None

    @property
    def grids(self) -> tuple[str, ...]:
        return self.small + self.paper


def _rows(table: int, *networks: str) -> tuple[str, ...]:
    return tuple(f"paper-table{table}-{network}" for network in networks)


def _curves(
    shows: str,
    small: str,
    paper: tuple[str, ...],
    schedules: tuple[str, ...],
    *,
    also: tuple[str, ...] = (),
    **options: Any,
) -> Drawn:
    return Drawn(shows, "curves", (small,), paper, schedules, also, options)


def _batch(
    shows: str, paper: tuple[str, ...], *schedules: str, also: tuple[str, ...] = ()
) -> Drawn:
    return Drawn(shows, "batch", ("small-batch",), paper, schedules, also)


FIGURES = {
    "1": _curves(
        "Low compression in the critical windows alone is enough.",
        "small",
        ("paper-figure2",),
        ("low", "high", "low-in-critical"),
    ),
    "2": Drawn(
        "The gradient norm per layer; low compression in critical windows is enough, high "
        "compression in them is not made up for.",
        "figure2",
        ("small", "smoke"),
        ("paper-figure2",),
        fixed=FIGURE2,
        also=(
            *("dense", "low-in-critical", "high-in-critical", "accordion"),
            *("low-early", "low-late", "dense-deleted"),
        ),
    ),
    "3": Drawn(
        "Top Hessian eigenvalue and gradient norm, and the epochs that each marks critical.",
        "figure3",
        ("small-signals", "smoke-signals"),
        ("paper-figure3",),
        fixed=("low",),
        statistics=("norm", "eigenvalue", "eigenvalue:batch"),
    ),
    "4a": Drawn(
        "How many of their largest coordinates two stochastic gradients share.",
        "figure4a",
        ("small-overlap", "smoke-overlap"),
        ("paper-figure4a",),
        statistics=("overlap",),
    ),
    "4b": _batch(
        "Small batches in the critical windows alone are enough.",
        ("paper-batch-cifar10",),
        "small-batch",
        "large-batch",
        "small-in-critical",
        also=("large-in-critical",),
    ),
    "5": _batch(
        "Batch-size ACCORDION against Smith et al. (2017).",
        ("paper-batch-cifar10", "paper-batch-cifar100"),
        "small-batch",
        "accordion-batch",
        "smith",
    ),
    "6": _curves(
        "ACCORDION bridges the gap that rank 1 leaves without skip connections.",
        "small",
        ("paper-table1-vgg19bn",),
        THREE,
    ),
    "7": _curves(
        "ACCORDION against AdaQS (Guo et al., 2020).",
        "small-adaqs",
        ("paper-adaqs",),
        (*THREE, "adaqs"),
        also=("adaqs-0.2",),
    ),
    "8": Drawn(
        "High compression trained until it has sent as many floats as low.",
        "curves",
        ("small-budget",),
        ("paper-budget",),
        ("low", "high", "high-longer", "accordion"),
        ("high-stretched",),
        instead={"high-longer": "high-stretched"},
    ),
    "9": _curves(
        "The limit: how good ACCORDION gets depends on the two levels it is given.",
        "small-ladder",
        ("paper-ladder",),
        ("rank 4", "rank 2", "rank 1", "accordion 4-1", "accordion 4-2"),
        also=("error-ladder", "accordion-ladder"),
    ),
    "10": _batch(
        "Extremely large batches.",
        ("paper-batch-16384",),
        *BATCHES,
        also=("large-batch-8x", "accordion-batch-8x"),
    ),
    "11": _curves(
        "LSTM on WikiText-2 with TopK: perplexity.", "lstm-small", ("paper-lstm",), THREE, **TIMED
    ),
    "12": _curves(
        "Table 1 as curves: PowerSGD, CIFAR-10.",
        "small",
        _rows(1, "resnet18", "vgg19bn", "senet"),
        THREE,
        **TIMED,
    ),
    "13": _curves(
        "Table 2 as curves: PowerSGD, CIFAR-100.",
        "small",
        _rows(2, "resnet18", "densenet", "senet"),
        THREE,
        **TIMED,
    ),
    "14": _curves(
        "Table 3 as curves: TopK, CIFAR-10.",
        "small-topk",
        _rows(3, "resnet18", "googlenet", "senet"),
        THREE,
        **TIMED,
    ),
    "15": _curves(
        "Table 4 as curves: TopK, CIFAR-100.",
        "small-topk",
        _rows(4, "resnet18", "googlenet", "senet"),
        THREE,
        **TIMED,
    ),
    "16": _curves(
        "Table 5 as curves: batch size, CIFAR-10.",
        "small-batch",
        ("paper-batch-cifar10", *_rows(5, "googlenet", "densenet")),
        BATCHES,
        **TIMED,
    ),
    "17": _curves(
        "Table 6 as curves: batch size, CIFAR-100.",
        "small-batch",
        ("paper-batch-cifar100", *_rows(6, "googlenet", "densenet")),
        BATCHES,
        **TIMED,
    ),
    **{
        number: Drawn(
            "The rank that ACCORDION chose, per layer and epoch (18-20 are one map here).",
            "figure18_20",
            ("small",),
            ("paper-figure2",),
            fixed=("accordion",),
        )
        for number in ("18", "19", "20")
    },
    "deficit": _curves(
        "Not in the paper: deficits in the data, early against late (Achille et al., 2019).",
        "small-deficit",
        (),
        (),
        x=("epoch",),
    ),
    "joint": _curves(
        "Not in the paper (its future work): compression and batch size together.",
        "small-joint",
        (),
        (),
    ),
}


def draw(number: str, records: Path, out: Path) -> list[Path]:
    """Draw one figure from its records; returns the files.

    Raises:
        RecordError: no records, or not those that it needs.
    """
    figure, options = FIGURES[number], dict(FIGURES[number].options)
    if figure.module in ("curves", "batch", "figure18_20"):
        options["name"] = f"figure{number}" if number[0].isdigit() else number
    if figure.schedules:
        from regimes.plotting.groups import in_roles  # pandas, so late

        there = {run.name for run in in_roles(load_all(records), figure.schedules)}
        instead = {x: other for x, other in figure.instead.items() if other in there}
        needed = [x if x in there else instead.get(x, x) for x in figure.schedules]
        also = [name for name in figure.also if name in there]
        options["schedules"] = tuple(dict.fromkeys([*needed, *also]))
    return importlib.import_module(f".{figure.module}", __package__).main(records, out, **options)


def main(
    number: Annotated[str | None, tyro.conf.Positional] = None,
    records: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    out: Path = Path("figures"),
) -> list[Path]:
    """List the figures of the paper, or draw one from its records.

    Args:
        number: of the figure, as the paper has it; default the list.
        records: folders of runs, or archives of them.
        out: folder for the figures; each of RECORDS has its own in it.
    """
    if number is None:
        _list()
        return []
    if number not in FIGURES:
        raise ConfigError(f"no figure {number!r}: {suggest_nearest(number, FIGURES)}")
    if not records:
        grid, *more_grids = FIGURES[number].grids
        also = f" (or {', '.join(more_grids)})" if more_grids else ""
        raise ConfigError(
            f"figure {number} needs records of the grid {grid}{also}: first `regimes "
            f"ablate {grid} --seeds 5`, then `regimes figure {number} runs/{grid}`"
        )
    paths = []
    for name, path in by_name(records).items():  # a folder each
        paths += draw(number, path, out / name)
    return paths


def _list() -> None:
    heads = ("figure", "shows", "grids: small", "grids: paper's scale", "module")
    rows = [
        (number, f.shows, "\n".join(f.small), "\n".join(f.paper), f.module)
        for number, f in FIGURES.items()
    ]
    stdout.make_console(highlight=False).print(Table(heads, rows, texts=5).drawn())
