"""A recorded run under another detector, threshold or network, by replay.

`notebook.explorer` shows it; nothing here draws or trains::

    study = PricedRuns(load_all("data/reference/small.tar.xz"))
    study.answer(Settings("low", 1000, "accordion", eta=0.3)).numbers

Traffic is priced by what each layer sends in one exchange, of which a round of local steps has one;
`regimes.cost` predicts seconds from their measured compute and compression. The replay
reads the statistics of the run as it was trained, so there is no accuracy for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.config import DENSE
from regimes.base.errors import RecordError
from regimes.cost.cases import Case, make_cases
from regimes.cost.network import Network, Work
from regimes.policies.replay import detect
from regimes.policies.replay.replay import Rule, has_statistics, replay_rule, signal_cost
from regimes.records import Record, count_exchanges, separate_experiments

DETECTORS = (
    "accordion",
    "norm-change",
    "eigenvalue-change",
    "fisher-change",
    "trace-cusum",
    "msdr-fall",
    "first-share",
    "random-windows",
)
KNOBS = ("eta", "interval", "share")  # settings that are fields of a detector
RECORDED = "as trained"


@dataclass(frozen=True)
class Settings:
    """One position of all the knobs.

    Attributes:
        schedule, seed: the run that is replayed over.
        eta, interval, share: of those detectors that have such a field.
        bandwidth: bits per second of each worker's link; latency: seconds.
    """

    schedule: str
    seed: int
    detector: str = "accordion"
    eta: float = 0.5
    interval: int = 3
    share: float = 0.4
    bandwidth: float = 1e9
    latency: float = 50e-6


@dataclass(frozen=True)
class Answer:
    """What one position of the knobs gives.

    Attributes:
        bands: a row per detector that the run can answer for, the chosen one first and then
            what was trained; a column per epoch: share of layers at low compression.
        levels: a row per compressed layer, a column per epoch: the chosen detector's level.
        numbers: a row each for the chosen detector, what was trained, and single levels
            throughout: low (share of epochs and layers), floats, of_low, seconds, speed_up over
            dense, signal (share of training time that measuring takes).
    """

    bands: pd.DataFrame
    levels: pd.DataFrame
    numbers: pd.DataFrame


class PricedRuns:
    """Runs of one setting, and what each layer costs at each level.

    Raises:
        RecordError: no run, runs of different settings, or none with compressed layers at two
            levels.
    """

    def __init__(self, runs: Sequence[Record]) -> None:
        runs = separate_experiments(runs)
        for run in runs:
            if not {"low", "high"} <= run.header["per_step"].keys():
                raise RecordError(
                    f"{run.name}, seed {run.seed}, has no two levels of compression to choose "
                    "between: explore a grid that has, e.g. small"
                )
        levels = (case for case in make_cases(runs) if not case.runs)
        self.works: dict[str, Case] = {case.name.partition(" (")[0]: case for case in levels}
        self.runs = {(run.name, run.seed): run for run in runs}
        self.header = runs[0].header
        self.layers = [i for i, layer in enumerate(self.header["layers"]) if layer["compressed"]]

    @cached_property
    def prices(self) -> dict[tuple[int, str], tuple[float, float]]:
        """(floats, bytes) per exchange of each layer (its index) at each level. The header has the
        floats, and the bytes of all layers together: those of a float are a layer's own where a run
        has used the level."""
        known: dict[tuple[int, str], float] = {}
        used: dict[tuple[int, str], float] = {}
        width: dict[str, float] = {}
        for run in self.runs.values():
            for level, cost in run.header["per_step"].items():
                width.setdefault(level, cost["bytes"] / cost["floats"])
                for i, floats in enumerate(cost.get("layers", ())):
                    known.setdefault((i, level), floats)
        for run in self.runs.values():
            for row in run.rows:
                counts = count_exchanges(run.header, row)
                if counts.dense or not counts.chosen:
                    continue
                parts = (row["layers"][key] for key in ("level", "floats", "bytes"))
                for i, (level, floats, size) in enumerate(zip(*parts, strict=True)):
                    known.setdefault((i, level), floats / counts.chosen)
                    if floats:
                        used.setdefault((i, level), size / floats)
        return {(i, x): (n, n * used.get((i, x), width.get(x, 0))) for (i, x), n in known.items()}

    @cached_property
    def extra_bytes(self) -> float:
        """Bytes per step besides the layers' (the loss)."""
        level, case = next(iter(self.works.items()))
        levels = dict.fromkeys(range(len(self.header["layers"])), DENSE)
        levels.update(dict.fromkeys(self.layers, level))
        layers = sum(self._price(*pair)[1] for pair in levels.items())
        return case.work.bytes["mean"] + case.work.bytes["gather"] - layers

    def detectors(self, run: Record) -> list[str]:
        """The detectors with a signal that the run recorded."""
        return [name for name in DETECTORS if has_statistics(run, detect.make_rule(name, run))]

    def knobs(self, run: Record, detector: str) -> list[str]:
        """The settings that are fields of a detector."""
        rule = detect.make_rule(detector, run)
        return [name for name in KNOBS if hasattr(rule, name)]

    def rule(self, settings: Settings, detector: str) -> Rule:
        """A detector with the values of the settings in its fields."""
        run = self.runs[settings.schedule, settings.seed]
        known = self.knobs(run, detector)
        given = ",".join(f"{name}={getattr(settings, name)}" for name in known)
        return detect.make_rule(f"{detector}:{given}" if given else detector, run)

    def answer(self, settings: Settings) -> Answer:
        """Everything that follows from one position of the knobs.

        Raises:
            ConfigError: a field that the detector rejects.
            RecordError: the run has not recorded what the detector reads.
        """
        run = self.runs[settings.schedule, settings.seed]
        names = [settings.detector, *(n for n in self.detectors(run) if n != settings.detector)]
        rules = {name: self.rule(settings, name) for name in names}
        tables = {name: _wide(replay_rule(run, rule)) for name, rule in rules.items()}
        trained = _wide(run.layers[run.layers["layer"].isin(tables[names[0]].index)])
        order = {names[0]: tables[names[0]], RECORDED: trained, **tables}
        bands = pd.DataFrame({name: (t == "low").mean() for name, t in order.items()}).T
        constant = {
            f"{level} throughout": trained.mask(trained.notna(), level)
            for level in ("low", "high", DENSE)
        }
        chosen = {names[0]: order[names[0]], RECORDED: trained, **constant}
        network = Network.parse(f"{settings.bandwidth:.17g}bit/s,{settings.latency:.17g}s")
        costs = {x: self._cost(run, t, network, x not in constant) for x, t in chosen.items()}
        numbers = pd.DataFrame(costs).T
        numbers["of_low"] = numbers["floats"] / numbers["floats"]["low throughout"]
        numbers["speed_up"] = numbers["seconds"][f"{DENSE} throughout"] / numbers["seconds"]
        numbers["signal"] = np.nan
        numbers.loc[names[0], "signal"] = signal_cost(run, rules[names[0]])[1]
        columns = ["low", "floats", "of_low", "seconds", "speed_up", "signal"]
        return Answer(bands, order[names[0]], numbers[columns])

    # -- what decisions cost -----------------------------------------------------------------

    def _cost(
        self, run: Record, table: pd.DataFrame, network: Network, begins_dense: bool
    ) -> dict[str, float]:
        """Share at low, floats, and predicted seconds of a whole run at these levels.

        Args:
            begins_dense: after the uncompressed steps with which the run began.
        """
        floats = seconds = 0.0
        workers = run.config["workers"]
        dense = dict.fromkeys(range(len(self.header["layers"])), DENSE)
        for row, epoch in zip(run.rows, table, strict=True):
            levels = dense | dict(zip(self.layers, table[epoch], strict=True))
            counts = count_exchanges(run.header, row)
            begun = counts.dense if begins_dense else 0
            steps, exchanges = row["steps"], sum(counts)
            if not exchanges:  # local steps of a round that ends later
                seconds += steps * self.work(dense).compute
            for count, at in ((begun, dense), (exchanges - begun, levels)):
                if count:
                    work = self.work(at).every(steps / exchanges)
                    floats += count * sum(self._price(*pair)[0] for pair in at.items())
                    seconds += steps * count / exchanges * float(work.seconds(network, workers))
        return {
            "low": float((table == "low").to_numpy().mean()),
            "floats": floats,
            "seconds": seconds,
        }

    def _price(self, layer: int, level: str) -> tuple[float, float]:
        if (layer, level) not in self.prices:
            raise RecordError(
                f"no run of the study knows what {self.header['layers'][layer]['name']} sends at "
                f"level {level!r}: add a run that uses it"
            )
        return self.prices[layer, level]

    def work(self, levels: Mapping[int, str]) -> Work:
        """One worker's step with a level of its own for each layer (its index).

        The requests of all layers in a round travel as one collective, so a step has as many
        collectives as the level that needs most. The time to compress at a level is taken from a
        step with all layers at this level, times the share of elements of the layers that have it.
        """
        works = {level: self._uniform(level) for level in {levels[i] for i in self.layers}}
        share = {i: _elements(self.header["layers"][i]) for i in self.layers}
        compress = sum(share[i] * works[levels[i]].compress for i in share) / sum(share.values())
        one = next(iter(works.values()))
        calls = {kind: max(work.calls[kind] for work in works.values()) for kind in one.calls}
        size = {**one.bytes, "mean": self.extra_bytes, "gather": 0.0}
        for i, level in levels.items():
            gathers = i in share and works[level].calls["gather"] > 0
            size["gather" if gathers else "mean"] += self._price(i, level)[1]
        return Work(one.compute, compress, calls, size)

    def _uniform(self, level: str) -> Work:
        """The mean step with all layers at one level; where no run has it, the step at another
        level of the same compressor, which asks for as many collectives."""
        known = self.works.get(level)
        compressed = (case for name, case in self.works.items() if name != DENSE)
        return (known or next(compressed, self.works[DENSE])).work


def _elements(layer: Mapping[str, Any]) -> float:
    return float(np.prod(layer["shape"]))


def _wide(rows: pd.DataFrame) -> pd.DataFrame:
    """Levels by layer (network order) and epoch."""
    order = list(dict.fromkeys(rows["layer"]))
    return rows.pivot(index="layer", columns="epoch", values="level").loc[order]
