"""How far compressed training comes in a step, as a share of a step of dense: a method's *clock*.

    python -m benchmarks.clocks train --jobs 2   # about 6 hours of 2 cores; can be continued
    python -m benchmarks.clocks plans --jobs 2   # about 4 hours; can be continued

A method that ends at some loss after N steps has the clock k if dense ends there after k N steps,
each at its own best learning rate. *train* adds methods, lengths, a size and an optimiser to the
trainings of `benchmarks.plans`, by the same rule: rates a factor of two apart until the best is no
end of the list, and three seeds at the two best rates. What ``plans_losses.jsonl`` has is not
trained again. *plans* trains, with the seeds of the other trainings, what each of nine plans chose
for a larger model, at the rate that the plan prints. Losses are lines of ``clocks.jsonl``.

The losses of the plans (three sizes, seven methods) suggest that a clock hardly depends on the size
of the model, that it is about 1 for 8 and 4 bits and 0.8 for a synchronisation every 8 steps, and
that it falls with length for methods that lose much: rank 4 has 0.82, 0.72 and 0.68 at 300, 600 and
1,200 steps, and in a check with two rates TopK of 10 % had 0.67 and 0.56, and rank 2 0.65 and 0.51,
at 300 and 600. That was found afterwards. Written before any training of this module. Each of these
would refute it, where a clock is the mean over seeds and the length is that of 115k (half of it at
460k):

- *Size*: for some method and length the clock at 460k divided by that at 115k is outside 0.85 to
  1.18, by more than its 95 % interval.
- *Length*: the clock of 4 bits, or of a synchronisation every 8 steps, changes by more than 10 %
  with a doubling of the length; or that of rank 1, rank 2, TopK of 10 % or signs does not fall by
  10 to 30 % with each.
- *Values at 600 steps*: rank 1 outside 0.35 +- 0.1, rank 2 outside 0.51 +- 0.08, TopK of 10 %
  outside 0.56 +- 0.08, every 32 steps outside 0.63 +- 0.08.
- *Optimiser*: with SGD the clock of rank 1, TopK of 10 % or every 8 steps differs from that with
  AdamW by more than 20 %.
- *Held out*: the size 260k, and its lengths of 450 and 900 steps, are trained last. Each method's
  clock is taken from a line over the logarithm of the length that is fitted to 115k and 460k.
  Together with dense's own losses at 260k it predicts the gaps to dense; their rms error over all
  methods and both lengths is above 0.05 bits per byte.
- *Plans*: at the plan's rate the mean regret of the nine plans is outside 0.08 to 0.25 bits (at the
  best rate that was found it is 0.008 for plans from a smaller model), or always 4 bits every 8
  steps at its own best rate is worse than the plans by more than 0.05 bits.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.plans import (
    LOSSES,
    PLANS,
    SEEDS,
    SITUATIONS,
    STEPS,
    known,
    missing,
    train_rounds,
    training,
)
from regimes.config import RunConfig, override_fields
from regimes.plans.curve import Probe
from regimes.plans.probes import in_steps

OWN = Path(__file__).with_name("clocks.jsonl")
SGD = {
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 1.0,
    "optimizer.lr": 0.2,
}
METHODS = (
    *("powersgd:1", "powersgd:2", "powersgd:4", "topk:10", "sign:1"),
    *("quantised-all-reduce:4", "dense/8", "dense/32"),
)
FEW = ("powersgd:1", "topk:10", "dense/8")


def wanted(
    methods: tuple[str, ...], lengths: tuple[int, ...], dense: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    return {"dense": dense, **dict.fromkeys(methods, lengths)}


# What is trained, in this order. Dense needs the shortest lengths: a clock of 0.3 ends there.
TRAINED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "115k": wanted(METHODS, (300, 600, 1200), (75, 150, 300, 600, 1200)),
    "460k": wanted(METHODS, (150, 300, 600), (38, 75, 150, 300, 600)),
    "115k, sgd": wanted(FEW, (300, 600, 1200), (75, 150, 300, 600, 1200)),
    "260k": wanted(METHODS, (450, 900), (112, 225, 450, 900)),
}


def configure(size: str) -> RunConfig:
    """The training of a size in steps."""
    if size == "260k":
        config = override_fields(training("115k"), {"model.width": 96})
    else:
        config = training(size.partition(",")[0])
    return in_steps(override_fields(config, SGD if size.endswith("sgd") else {}), STEPS)


def train(out: Path, jobs: int) -> None:
    for size, lengths in TRAINED.items():

        def next_runs(
            size: str = size, lengths: Mapping[str, tuple[int, ...]] = lengths
        ) -> list[Probe]:
            return missing(size, known(LOSSES, OWN), lengths)

        train_rounds(size, configure(size), next_runs, OWN, out, jobs)


def train_choices(out: Path, jobs: int) -> None:
    """Train what the plans of larger models chose, at their rates."""
    asked = {case.name: case for case in SITUATIONS if case.size != "115k"}
    for line in map(json.loads, PLANS.read_text().splitlines()):
        if line["situation"] not in asked:
            continue
        size = asked[line["situation"]].size
        config = configure(size)
        row = next(row for row in line["rows"] if row["method"] == line["chosen"])
        doublings = math.log2(row["rate"] / config.optimizer.lr)
        probes = [Probe(row["method"], row["steps"], doublings, seed) for seed in SEEDS]

        def next_runs(size: str = size, probes: list[Probe] = probes) -> list[Probe]:
            losses = known(LOSSES, OWN)
            return [probe for probe in probes if (size, probe) not in losses]

        train_rounds(size, config, next_runs, OWN, out, jobs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "plans"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/clocks"))
    arguments = parser.parse_args()
    {"train": train, "plans": train_choices}[arguments.what](arguments.out, arguments.jobs)
