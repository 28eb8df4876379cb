"""What each figure should show: rows of its table as lines, bars, bands and cells of its axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from drawn import Image, Panel, Shown
from matplotlib.figure import Figure

from analysis.common.names import spoken
from analysis.detection import signals
from analysis.lasso import lasso
from analysis.paper import figure2
from analysis.paper.figure3 import BATCH, EVAL, NORM
from analysis.rates import quadratic, usable_figure
from analysis.tournament import error_per_float, events, tournament_figure, yoked
from regimes.plotting import looks, style, words
from regimes.records import Record, unit_name

CI = ("ci_low", "ci_high")
Frame = pd.DataFrame


@dataclass
class Made:
    """What a command has left.

    Attributes:
        name, figure, table: of the figure.
        tables: the others, by name.
        one: a run of those that it was made from; None: of none.
        configs: theirs, by schedule.
    """

    name: str
    figure: Figure
    table: Frame
    tables: dict[str, Frame] = field(default_factory=dict)
    one: Record = None  # type: ignore[assignment]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def shown(self, panels: list[Panel | Image], **more: Any) -> Shown:
        """The figure, with what its caption says."""
        told = {"words": self.figure.get_supxlabel(), "says": ["n = [1-9]"]}
        if self.one:
            config = self.one.config
            known = self.one.header["data"]["train"]
            data = config["data"].get("path") or config["data"]["name"]
            told["says"] += [rf"Setting: {Path(data).name}, {known:,} training"]
            told |= {"unit": unit_name(config), "decays": fallen(self.one)}
        return Shown(self.figure, self.table, panels, **{**told, **more})


def fallen(run: Record) -> list[int]:
    """The units that are the first at a lower rate, by the rates of its rows after the warm-up."""
    rates = [row["lr"] for row in run.rows]
    return [i for i in range(1, len(rates)) if rates[i] < 0.9 * rates[i - 1]]


# -- curves ----------------------------------------------------------------------------------

Case = tuple[str, str | None, tuple[str, ...], Callable[[Made], Shown]]


def where(**wanted: Any) -> Callable[[Frame], Frame]:
    """The rows that have these values."""
    return lambda table: table[np.logical_and.reduce([table[k] == v for k, v in wanted.items()])]


def of_curves(made: Made, *against: str, **more: Any) -> Shown:
    several = len(against) > 1
    panels = curve_panels(made.table, against, names=spoken_by(made), several=several)
    return made.shown(panels, windows=windows(made), cut=range(len(against)), **more)


def spoken_by(made: Made) -> dict[str, str]:
    """What each schedule is called; of a longer run with its share of the floats of `low`."""
    names = {name: words.spoken_name(name, config) for name, config in made.configs.items()}
    sent = made.table[made.table["part"] == "end"].set_index("schedule")["floats"]
    for name in {*words.LONGER} & {*sent.index}:
        share = sent[name] / sent["low"]
        as_many = abs(share - 1) < 0.05
        names[name] += ", as many floats as low" if as_many else f", {share:.2f} of low's floats"
    return names


def curve_panels(
    table: Frame,
    against: tuple[str, ...],
    first: int = 0,
    only: set[str] | None = None,
    names: dict[str, str] | None = None,
    several: bool = False,
) -> list[Panel]:
    """Curves, and their ends; beside others a panel against epochs has no ends."""
    metric = str(table.columns[3])
    only = only or {*table["schedule"]}
    band = CI if len({*table["schedule"]} & only) <= style.MANY else None
    label = (names or {}).get if names else lambda name: looks.style_of(name).label
    found = []
    for at, x in enumerate(against, first):
        for part, of_y, of_x in (
            ("curve", band if x == "epoch" else None, None),
            ("end", CI, (f"{x}_ci_low", f"{x}_ci_high")),
        ):
            if part == "end" and x == "epoch" and several:
                continue
            rows = lambda t, p=part: t[(t["part"] == p) & t["schedule"].isin(only)]  # noqa: E731
            more: Any = {"ends": of_y, "xends": of_x, "bands": part == "curve"}
            found.append(Panel(at, x, metric, rows, ("schedule",), label, **more))
    return found


def windows(made: Made) -> list[list[int]]:
    """The hand-made ones of the schedules that are drawn."""
    shown = {*made.table["schedule"]}
    asked = (
        made.configs[name][table]
        for name, table in (
            ("low-in-critical", "policy"),
            ("high-in-critical", "policy"),
            ("small-in-critical", "batch_policy"),
        )
        if name in shown
    )
    return next((table["windows"] for table in asked if table), [])


def norms(made: Made) -> Shown:
    names = {layer["name"]: words for layer, words in layers_of(made.one)}
    panel = Panel(0, "epoch", "norm", lambda t: t[t["norm"] > 0], ("layer",), names.__getitem__)
    return made.shown([panel], windows=made.configs["low-in-critical"]["policy"]["windows"])


def layers_of(run: Record) -> list[tuple[dict[str, Any], str]]:
    return [
        (layer, f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}")
        for layer in run.header["layers"]
        if layer["compressed"]
    ]


def halves(made: Made) -> Shown:
    panels: list[Panel] = []
    for first, names in zip((0, 2), figure2.PANELS.values(), strict=True):
        axes = ("epoch", "floats")
        panels += curve_panels(made.table, axes, first, {*names}, spoken_by(made), several=True)
    return made.shown(panels, windows=windows(made), cut=range(4))


def level_map(made: Made, **more: Any) -> Shown:
    table, names = made.table, {layer["name"]: words for layer, words in layers_of(made.one)}
    seed = min(table["seed"])
    ranks, sent = made.one.config["levels"], made.one.header["per_step"]
    words = {
        level: f"{level} compression" if level in ("low", "high") else level
        for level in sorted({*ranks, *table["level"]}, key=lambda k: sent[k]["floats"])
    }
    words |= {level: f"{words[level]} (rank {rank})" for level, rank in ranks.items()}

    def cells(t: pd.DataFrame) -> pd.DataFrame:
        of_seed = t[t["seed"] == seed]
        return of_seed.pivot(index="layer", columns="epoch", values="level").loc[[*names]]

    shares = pd.concat(
        [
            table.assign(of=level, share=100.0 * (table["level"] == level))
            .groupby(["of", "seed", "epoch"], as_index=False)["share"]
            .mean()
            for level in [*words][1:]
        ]
    )
    mean = shares.groupby(["of", "epoch"], as_index=False)["share"].mean()
    return made.shown(
        [
            Image(0, cells, names.__getitem__, words.__getitem__),
            Panel(1, "epoch", "share", lambda _: mean, ("of",), words.__getitem__, steps="mid"),
            Panel(1, "epoch", "share", lambda _: shares, ("of", "seed"), None, steps="mid"),
        ],
        **more,
    )


def eigenvalues(made: Made) -> Shown:
    return made.shown(
        [
            Panel(
                0,
                "epoch",
                "mean",
                lambda t: t[t["signal"] != NORM],
                ("signal",),
                str,
                CI,
                bands=True,
            ),
            Panel(1, "epoch", "mean", where(signal=NORM), ("signal",), None, CI, bands=True),
            Image(
                2,
                lambda t: t.pivot(index="signal", columns="epoch", values="critical").loc[
                    [EVAL, BATCH, NORM]
                ],
                lambda name: name.removesuffix(" statistics"),
            ),
        ]
    )


def overlaps(made: Made) -> Shown:
    epochs = sorted({*made.table["epoch"]})
    middle = min(epochs, key=lambda e: (abs(e - made.one.config["epochs"] // 2), e))
    when = dict(zip((epochs[0], middle, epochs[-1]), ("early", "middle", "late"), strict=True))
    return made.shown(
        [
            Panel(
                0,
                "epoch",
                "overlap",
                lambda t: t[t["batch"].isin([32, 128, 512])],
                ("batch",),
                str,
                CI,
                bands=True,
            ),
            Panel(
                1,
                "batch",
                "overlap",
                lambda t: t[t["epoch"].isin(when)],
                ("epoch",),
                lambda epoch: f"{when[epoch]} ({epoch})",
                CI,
                bands=True,
            ),
        ]
    )


def batches(made: Made) -> Shown:
    (steps,) = (rows for name, rows in made.tables.items() if name.endswith("-decided"))
    name = spoken_by(made)
    panels = curve_panels(made.table, ("epoch", "floats"), names=name, several=True)
    for at, column in ((2, "batch"), (3, "lr")):
        median = steps.groupby(["schedule", "epoch"], as_index=False)[column].median()
        panels.append(
            Panel(
                at,
                "epoch",
                column,
                lambda _, rows=median: rows,
                ("schedule",),
                name.__getitem__,
                steps="mid",
            )
        )
        panels.append(
            Panel(
                at,
                "epoch",
                column,
                lambda _: steps,
                ("schedule", "seed"),
                name.__getitem__,
                thin=True,
                steps="mid",
            )
        )
    return made.shown(panels, windows=windows(made), cut=(0, 1))


def calls_and_kappa(made: Made) -> Shown:
    order = [*made.table["detector"].unique()]
    forest = made.table.assign(place=made.table["detector"].map(order.index)).dropna(subset="kappa")
    share = (
        made.table.dropna(subset="called")
        .pivot(index="detector", columns="epoch", values="called")
        .loc[order]
    )
    share.columns = share.columns.astype(int)
    return made.shown(
        [
            Image(
                0,
                lambda _: share.reindex(columns=range(int(share.columns.max()) + 1)),
                lambda name: name.replace(" ", "\n", 1),
            ),
            Panel(
                1,
                "kappa",
                "place",
                lambda _: forest,
                ("detector",),
                None,
                xends=("kappa_low", "kappa_high"),
            ),
        ]
    )


def yoked_controls(made: Made) -> Shown:
    metric, others = str(made.table.columns[1]), lambda t: t[t["schedule"] != "accordion"]
    ticks = lambda row: yoked.LABELS[row["schedule"]]  # noqa: E731
    bar = (f"{metric}_low", f"{metric}_high")
    return made.shown(
        [
            Panel(0, metric, "place", xends=bar, ticks=ticks),
            Panel(1, "difference", "place", others, xends=CI),
            Panel(2, "traffic_ratio", "place"),
        ]
    )


def speed_up(made: Made) -> Shown:
    return made.shown(
        [
            Panel(0, "x", "speed_up", where(panel="bandwidth"), ("case",), ends=CI, bands=True),
            Panel(0, "x", "speed_up", where(panel="break-even"), ("case",), thin=True),
            Panel(1, "x", "seconds", where(panel="workers"), ("case",)),
        ]
    )


def deficits(made: Made) -> Shown:
    harm = made.table.dropna(subset="harm").assign(length=lambda t: t["stop"] - t["first"])
    several = harm[harm.groupby("length")["length"].transform("size") > 1]
    names = [*made.table.columns[made.table.columns.get_loc("unit") + 1 :]]
    called = made.table.dropna(subset="unit").set_index("unit")[names].T
    called.columns = called.columns.astype(int)
    length = lambda n: f"{n:,.0f} steps long"  # noqa: E731
    return made.shown(
        [
            Panel(0, "stop", "harm", lambda _: harm[harm["first"] == 0], ends=CI),
            Panel(1, "first", "harm", lambda _: several, ("length",), length, CI),
            Image(2, lambda _: called, lambda name: name.replace(" ", "\n", 1)),
        ]
    )


def detector_bands(made: Made, **more: Any) -> Shown:
    schedules = [*dict.fromkeys(made.table["schedule"])]
    order = [*dict.fromkeys(made.table["detector"])]
    return made.shown(
        [
            Image(
                at,
                lambda t, name=name: (
                    t[t["schedule"] == name]
                    .pivot(index="detector", columns="epoch", values="critical")
                    .loc[order]
                ),
                lambda name: name.replace(" ", "\n", 1),
            )
            for at, name in enumerate(schedules)
        ],
        **more,
    )


def products(made: Made) -> Shown:
    rates, panels = sorted({*made.table["rate"]}), []
    for at, rate in enumerate(rates):
        rows = made.table[made.table["rate"] == rate]
        mean = rows.groupby(["arm", "epoch"], as_index=False)["product"].mean()
        panels += [
            Panel(at, "epoch", "product", lambda _, r=rows: r, ("arm", "seed"), thin=True),
            Panel(at, "epoch", "product", lambda _, r=mean: r, ("arm",)),
        ]
    return made.shown(panels, cut=range(len(rates)))


def lemma(made: Made) -> Shown:
    parts = [lasso.SPARSITY, lasso.CHANCES]
    says = [r"mean of \d+ data sets", r"\d+ draws per point"]
    more: dict[str, Any] = {"says": says}
    if made.one:  # a network below
        parts += [lasso.SHARES, lasso.PLACES]
        more = {}
    panels = []
    for at, series in enumerate(parts):
        rows = lambda t, s=series: t[t["series"].isin(s)]  # noqa: E731
        panels.append(
            Panel(
                at,
                "x",
                "mean",
                rows,
                ("series",),
                lambda k, s=series: s[k][0],
                CI,
                bands=True,
                own=True,
            )
        )
    return made.shown(panels, **more)


def usable(made: Made) -> Shown:
    known = usable_figure._looks(made.table.assign(momentum=math.nan))
    name = lambda arm: known[arm].label  # noqa: E731
    ranges = made.tables["ranges"]
    first = ranges[(ranges["rule"] == ranges["rule"].iloc[0]) & (ranges["n"] > 0)]
    first = first.assign(place=range(len(first)))
    wide = first.melt(
        ["arm", "place", "of_dense"], ["usable_min", "best", "usable_max"], value_name="rate"
    )
    metric, loss = dict.fromkeys(made.table["panel"])
    return made.shown(
        [
            Panel(0, "rate", "mean", where(panel=metric), ("arm",), name, CI),
            Panel(1, "rate", "mean", where(panel=loss), ("arm",), name, CI),
            Panel(
                2,
                "rate",
                "place",
                lambda _: wide,
                ("arm",),
                name,
                ticks=lambda row: usable_figure._with_share(row, name(row["arm"])),
            ),
            *(
                Panel(
                    2,
                    side,
                    "place",
                    lambda _: first,
                    ("arm",),
                    None,
                    xends=(f"{side}_low", f"{side}_high"),
                )
                for side in ("usable_min", "usable_max")
            ),
        ],
        cut=(0, 1),
    )


def by_window(made: Made) -> Shown:
    places = dict.fromkeys(made.table["window"])
    return made.shown(
        [
            Panel(at, "rate", "mean", where(window=name), ("run",), ends=CI)
            for at, name in enumerate(places)
        ]
    )


def stable(made: Made) -> Shown:
    simulated = (quadratic.WITH, quadratic.WITHOUT)
    name = lambda how: f"{how}, {'simulated' if how in simulated else 'computed'}"  # noqa: E731
    momenta = dict.fromkeys(made.table["momentum"])
    return made.shown(
        [
            Panel(at, "share", "of_dense", where(momentum=m), ("how",), name)
            for at, m in enumerate(momenta)
        ],
        says=["one worker"],
    )


def logs(made: Made) -> Shown:
    keys = ["data", "model", "compressor"]
    table = made.table.assign(
        shown=made.table["value"] * np.where(made.table["metric"] == "accuracy", 100.0, 1.0)
    )
    logs = [rows for _, rows in table.groupby(keys)]
    name = lambda level: "ACCORDION" if level == "accordion" else level  # noqa: E731
    return made.shown(
        [
            Panel(at, "epoch", "shown", lambda _, rows=rows: rows, ("level",), name, own=True)
            for at, rows in enumerate(logs)
        ],
        says=["57 published logs", "n = 1"],
        cut=range(len(logs)),
    )


def errors(made: Made) -> Shown:
    return made.shown(
        [
            Panel(
                at,
                "bytes",
                error,
                by=("compressor",),
                label=lambda name: error_per_float.NAMES.get(name, name),
                ends=(f"{error}_low", f"{error}_high"),
            )
            for at, error in enumerate(error_per_float.ERRORS)
        ]
    )


def lines_of_arms(made: Made) -> Shown:
    """Controls and others have looks of their own; each has its floats and its bytes."""
    names = [*dict.fromkeys(made.table["panel"])]
    metric, network = names[0], names[-1]
    control = made.table["arm"].isin(tournament_figure.CONTROLS)
    ticks = lambda row: spoken(row["arm"])  # noqa: E731
    of_metric = where(panel=metric)
    return made.shown(
        [
            *(
                Panel(
                    0,
                    "value",
                    "place",
                    lambda t, c=kind: of_metric(t[control == c]),
                    xends=CI,
                    ticks=ticks,
                )
                for kind in (False, True)
            ),
            Panel(1, "value", "place", where(panel="difference"), ("arm",), None, xends=CI),
            Panel(2, "value", "place", where(panel="bytes")),
            Panel(2, "value", "place", where(panel="floats")),
            Panel(3, "value", "place", where(panel=network)),
        ]
    )


def forests(made: Made) -> Shown:
    panels = []
    for at, name in enumerate(dict.fromkeys(made.table["setting"])):
        rows = where(setting=name)(made.table).assign(place=range(len(events.PAIRS)))
        ticks = None if at else lambda row: spoken(row["arm"])
        panels.append(
            Panel(
                at,
                "difference",
                "place",
                lambda _, r=rows: r,
                ("arm", "control"),
                None,
                xends=CI,
                ticks=ticks,
            )
        )
    return made.shown(panels)


def of_one_run(made: Made) -> Shown:
    panels = []
    titles = {t: c for t, c in signals.PANELS.items() if {*c} & {*made.table}}
    for at, columns in enumerate(titles.values()):
        panels += [
            Panel(
                at,
                "epoch",
                column,
                lambda t, w=words: t.assign(words=w),
                ("words",),
                str if words in signals.WORDS else None,
            )
            for column, words in columns.items()
            if column in made.table
        ]
    return made.shown(panels, says=[rf"One run \(low, seed {made.one.seed}\)"])


SMALL = ("--dimension", "30", "--nonzero", "3", "--train", "200", "--draws", "3", "--trials", "50")


def pulses(made: Made) -> Shown:
    """The recovery of two arms, whose lines begin at their onsets: the third is null."""
    harms = made.table[made.table["panel"] == "harm"].groupby("arm")["harm"]
    null = {str(arm) for arm, harm in harms if harm.abs().max() < 1e-9}
    name = lambda arm: f"nothing changed ({arm})" if arm in null else str(arm)  # noqa: E731
    part = {name: where(panel=name) for name in ("harm", "signals", "scores")}
    score = {"y": "place", "rows": part["scores"], "by": ("arm",), "label": str}
    panels = [
        Panel(0, "onset", "harm", part["harm"], ("arm",), name, ends=CI),
        *(
            Panel(1 + i, "unit", "harm", where(panel="recovery", arm=arm), ("onset",), None)
            for i, arm in enumerate(("rank 1", "rank 1, no feedback"))
        ),
        Image(3, lambda t: _cells(part["signals"](t))),
        Panel(4, "rank", xends=("rank_low", "rank_high"), **score),
        Panel(5, "auc", xends=("auc_low", "auc_high"), **score),
    ]
    return made.shown(panels)


def onsets(made: Made) -> Shown:
    return made.shown(
        [
            Panel(0, "onset", "harm", where(panel="harm"), ("arm",), str, ends=CI),
            Panel(1, "onset", "share", where(panel="rate"), label=None, steps="mid"),
        ]
    )


def law(made: Made) -> Shown:
    """Points stand beside their rate, and lines end at it."""

    def label(arm: str) -> str:
        row = where(part="law", arm=arm)(made.table).iloc[0]
        low, high = row["exponent_low"], row["exponent_high"]
        return f"{arm}: rate^{row['exponent']:.1f} [{low:.1f}, {high:.1f}]"

    ends = ("harm_low", "harm_high")
    return made.shown(
        [
            Panel(0, "x", "harm", where(part="pulses"), ("arm",), label, ends=ends),
            Panel(0, "rate", "harm", where(part="law"), ("arm",), label),
        ],
        decays=[],
    )


def _cells(table: Frame) -> Frame:
    wide = table.pivot(index="signal", columns="unit", values="value")
    return wide.loc[[*dict.fromkeys(table["signal"])]]


CASES: dict[str, Case] = {  # name of the figure: command, records, other words, what it shows
    "figure2a": ("2", "small", (), norms),
    "figure2b": ("2", "small", (), halves),
    "levels": ("levels", "small", (), level_map),
    "figure3-low": ("3", "small-signals", (), eigenvalues),
    "figure4a-dense": ("4a", "small-overlap", (), overlaps),
    "figure5": ("5", "small-batch", (), batches),
    "figure8": ("8", "small-budget", (), lambda m: of_curves(m, "epoch", "floats")),
    "figure11": (
        "11",
        "lstm-small",
        (),
        lambda m: of_curves(m, "epoch", "floats", "seconds"),
    ),
    "agreement": ("agreement", "detection-signals-smoke", (), calls_and_kappa),
    "controls": ("controls", "smoke-controls", (), yoked_controls),
    "cost": ("cost", "small", (), speed_up),
    "criticality": ("criticality", "harm-lm", (), pulses),
    "curves": ("curves", "lm-demo", (), lambda m: of_curves(m, "epoch", "floats")),
    "deep-linear": ("deep_linear", "deep-linear", (), deficits),
    "bands": ("detectors", "small-signals", (), detector_bands),
    "edge": ("edge", "rates-edge", (), products),
    "lasso": ("lasso", None, SMALL, lemma),
    "law": ("law", "harm-lm", (), law),
    "mechanism": ("mechanism", "rates-lm", (), usable),
    "narrowing": ("narrowing", "rates-when", (), by_window),
    "quadratic": ("quadratic", None, (), stable),
    "onset": ("onset", "harm-lm", (), onsets),
    "published": ("published", None, (), logs),
    "rivals": ("rivals", "smoke-rivals", (), errors),
    "tournament": ("tournament", "falling-lm", (), lines_of_arms),
    "events": ("events", "shift-smoke", (), forests),
    "signals": ("signals", "small-signals/low/seed-1000", (), of_one_run),
}
