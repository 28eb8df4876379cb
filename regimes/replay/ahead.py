"""What was known before a recorded run: its learning rates, and the bytes of its levels."""

from __future__ import annotations

from regimes.config import OptimizerConfig, as_level, from_dict
from regimes.policies.history import Ahead, level_costs
from regimes.records import Record
from regimes.training.learning_rate import LearningRate, mean_rates
from regimes.training.units import Units


def schedule_of(run: Record) -> tuple[LearningRate, Units] | None:
    """The learning rates and the units of a run; None of a hook's record, which has no schedule."""
    config = run.config
    if config["optimizer"].get("schedule", "step") is None:
        return None
    per_epoch = int(run.header["steps_per_epoch"] or 1)
    total = config.get("steps") or config["epochs"] * per_epoch
    units = Units(per_epoch, config.get("unit_steps"), total)
    optimizer = from_dict(OptimizerConfig, config["optimizer"], "optimizer.")
    return LearningRate(optimizer, per_epoch, total), units


def ahead_of(run: Record) -> Ahead:
    """What a policy knew before the run."""
    from regimes.compression import make_compressor  # torch, so late
    from regimes.compression.base import levels_without_feedback

    compressed = [i for i, layer in enumerate(run.header["layers"]) if layer["compressed"]]
    costs = level_costs(run.header["per_step"], compressed)
    levels = {name: as_level(level) for name, level in run.config["levels"].items()}
    dropped = levels_without_feedback(make_compressor(dict(run.config["compressor"])), levels)
    if (schedule := schedule_of(run)) is None:
        return Ahead(costs=costs, dropping=dropped)
    rate, units = schedule
    spans = map(units.step_span, range(len(units)))
    steps = [stop - first for first, stop in spans]
    return Ahead(mean_rates(rate, units), steps, costs, dropped)
