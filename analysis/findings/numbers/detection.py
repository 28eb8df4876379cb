"""What detectors call critical, and how far they agree: numbers for templates."""

from __future__ import annotations

import itertools

import pandas as pd

from regimes.plotting.groups import compressed_layers
from regimes.policies.detectors import NormChange
from regimes.policies.replay.detect import bench_detectors

from ...common.estimates import Cell, Row, as_table, word
from ...detection import agreement, norm_hessian, unforced
from ...detection.unforced import RELATIVE, Change
from ..sources import number, records, row_of
from ..values import Interval, mean_of

SETTINGS = {  # of the table of norm and Hessian
    "detection-signals-smoke": "digits, rank 2's own rate",
    "smoke-signals": "digits, one rate for all",
    "small-signals": "3,000 images, one rate for all",
    "small-signals-own": "3,000 images, rank 4's own rate",
    "cifar10-resnet20": "all of CIFAR-10, ResNet-20",
    "cifar10-fast-signals": "all of CIFAR-10, three blocks",
    "detection-signals-lm": "a text, rank 2's own rate",
}
TOP, SIGNALS = unforced.REFERENCE, "detection-signals-smoke"


def _change(how: str) -> Change:
    return {"": RELATIVE, "absolute": Change(absolute=True), "3 epochs": Change(back=3)}[how]


def _scores(source: str, how: str, schedule: str) -> dict[int, pd.DataFrame]:
    runs = [run for run in records(source) if run.name == schedule]
    return unforced.scored(runs, _change(how))


@number
def kappa(source: str, a: str, b: str, how: str = "", schedule: str = "signals") -> Interval:
    """Agreement of two detectors beyond chance; ``how``: "absolute" changes, or over "3 epochs"."""
    rows = unforced.pairs(_scores(source, how, schedule))
    kept = rows[((rows["a"] == a) & (rows["b"] == b)) | ((rows["a"] == b) & (rows["b"] == a))]
    return mean_of(kept["kappa"].to_list())


@number
def kappa_apart(source: str, name: str, how: str = "", schedule: str = "signals") -> float:
    """A detector's agreement with the eigenvalue of runs of other seeds."""
    return float(unforced.other_runs(_scores(source, how, schedule), TOP)["with"][name])


@number
def instrument_cost(source: str, name: str) -> float:
    """Share of the training time."""
    return float(unforced.costs(records(source))[name])


@number
def agreement_table() -> str:
    """Every detector compared with the eigenvalue."""
    runs = records(SIGNALS)
    tables = unforced.scored(runs)
    rows, others = unforced.over_seeds(unforced.pairs(tables)), unforced.other_runs(tables, TOP)
    return agreement.as_text(rows, others, unforced.costs(runs), TOP).markdown()


@number
def calls_of(source: str) -> list[int]:
    """How many epochs each detector calls, and of how many."""
    called = unforced.calls(unforced.scores(records(source)[0]))
    return [int(called["norm"].sum()), len(called)]


@number
def called_before(source: str, name: str, epoch: int) -> float:
    """Share of a detector's calls that lie before an epoch."""
    called = pd.concat(map(unforced.calls, unforced.scored(records(source)).values()))
    return float(called.loc[called.index < epoch, name].sum() / called[name].sum())


# -- by the paper's rules --------------------------------------------------------------------


@number
def rule_kappa(a: str, b: str, granularity: str = "epoch") -> dict[str, float]:
    """Kappa of two of the paper's rules on `small-signals`: mean, half its interval, extremes."""
    runs = [run for run in records("small-signals") if run.name == "low"]
    pairs = bench_detectors(runs, (a, b)).pairs
    kept = pairs[(pairs["a"] == a) & (pairs["b"] == b) & (pairs["granularity"] == granularity)]
    values = kept["kappa"].to_list()
    kappa = mean_of(values)
    half = kappa.mean - kappa.low
    return {"value": kappa.mean, "half": half, "least": min(values), "most": max(values)}


@number
def low_from_start(source: str, arm: str, interval: int) -> int:
    """For how many epochs from the start the paper's rule, replayed on the norms of an arm's runs,
    sends low compression in every compressed layer; of the run in which it departs first. Up to
    there a run by this rule is one of ``arm``, if that sends low throughout."""
    rule = NormChange(interval=interval)
    counts = []
    for run in records(source):
        if run.name == arm:
            norms = run.layers.pivot(index="epoch", columns="layer", values=run.statistic)
            for layer in compressed_layers(run):
                values = norms[layer["name"]].to_list()
                epochs = range(len(values) - 1)  # a verdict decides the next one
                verdicts = (rule(values[: epoch + 1]).critical for epoch in epochs)
                kept = itertools.takewhile(lambda critical: critical is not False, verdicts)
                counts.append(1 + sum(1 for _ in kept))
    return min(counts)


# -- by every rule ---------------------------------------------------------------------------


def _by_rules() -> pd.DataFrame:
    return norm_hessian.table({name: records(name) for name in SETTINGS})


@number
def norm_hessian_counts() -> dict[str, int]:
    """Of how many pairs of a setting and a rule the norm's kappa is above 0, and above that of a
    control that reads nothing."""
    rows = _by_rules()
    chance, control = norm_hessian.count_above(rows)
    return {"rows": len(rows), "chance": chance, "control": control}


@number
def norm_hessian_table() -> str:
    """Kappa of norm and eigenvalue by setting and rule, with the control's in each second
    column."""
    rows = _by_rules()

    def cell(rule: str, column: str) -> Cell:
        def text(row: Row) -> str:
            found = row_of(rows, records=row["records"], rule=rule)
            return norm_hessian.CELLS[column](found)

        return text

    columns: dict[str, Cell] = {"setting": lambda row: SETTINGS[row["records"]], "n": word("n")}
    for rule in norm_hessian.RULES:
        columns |= {
            rule: cell(rule, "kappa"),
            f"control{' ' * len(columns)}": cell(rule, "control"),
        }
    return as_table(rows.drop_duplicates("records"), columns).markdown()
