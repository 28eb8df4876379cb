"""A policy and a detector of a user."""

from collections.abc import Sequence
from dataclasses import dataclass

import regimes


@dataclass(frozen=True)
class Alternate:
    first: str = "low"
    needs: tuple[str, ...] = ("norm",)
    names: tuple[str, ...] = ("low", "high")

    def decide(
        self, history: Sequence[regimes.PastEpoch], layers: Sequence[str]
    ) -> list[regimes.Decision]:
        if history and history[-1].statistics["norm"][0] is None:
            return [regimes.Decision(self.first, {"rule": "nothing measured"})] * len(layers)
        level = self.names[len(history) % 2]
        return [regimes.Decision(level, {"rule": "alternate"}) for _ in layers]


@dataclass(frozen=True)
class Falls:
    statistic: str = "norm"
    per_layer: bool = True

    def __call__(self, values: Sequence[float | None]) -> regimes.Verdict:
        known = [value for value in values if value is not None]
        return regimes.Verdict(len(known) < 2 or known[-1] < known[-2])


def use(data: tuple[Sequence[float], Sequence[int]], out: str) -> float:
    rule = regimes.Detected(detector=Falls())
    config = regimes.RunConfig(policy={"name": "parts:Alternate"}, epochs=3)
    regimes.run(config, out)
    groups = {"embedding*": regimes.Static("dense"), "head*": Alternate()}
    by_layer = regimes.ByLayer(groups, otherwise=rule)
    return float(len(by_layer.decide([], ["embedding.weight"])) + len(data))
