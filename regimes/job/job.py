"""One job: a training in units with a record.

The trainer (``training.build.Run``), a hook and local steps (``job.attached``) are jobs. What is
decided before a unit, its row and the saved state are alike; they differ in who calls a step, and
who ends a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from regimes.base.config import AnyLevel
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.traffic import costs_per_step
from regimes.instruments.panel import Panel
from regimes.job.rows import NO_BATCH, NO_SYNC
from regimes.job.state import FORMAT, Part, State, by_layer, layer_shapes
from regimes.policies import Decision, Policy
from regimes.policies.controller import Controller, Levels, ModelController, check_reasons
from regimes.policies.history import level_costs
from regimes.policies.schedules import period_of
from regimes.records import Header, Row


@dataclass(frozen=True)
class UnitPlan:
    """Holds what is decided before a unit, from the units so far.

    Attributes:
        levels: of all layers, with reasons.
        batch: the column "batch" of the record; a batch policy has chosen its level.
        sync: the column "sync", for local steps; its period starts at the next synchronisation.
    """

    levels: Levels
    batch: dict[str, Any] = field(default_factory=lambda: dict(NO_BATCH))
    sync: dict[str, Any] = field(default_factory=lambda: dict(NO_SYNC))


class Job:
    """Runs a training in units: decides before each unit, and keeps the rows of past ones.

    Attributes:
        rows: the units so far, as a record has them.
        header: of the record, written or not.
        panel: the gauges of what is measured.
        controller: decides the level of each layer.
        batch_controller, sync_controller: decide on all layers together; None: nothing does.
        checks_reasons: a policy's reason that no record can hold ends the job.
        batch_sizes, periods: what the levels of these two are; ``batch_size`` is the usual one.
    """

    panel: Panel
    header: Header
    controller: Controller
    batch_controller: ModelController | None = None
    sync_controller: ModelController | None = None
    checks_reasons = True
    batch_size: int
    batch_sizes: Mapping[str, int]
    periods: Mapping[str, int]

    def __init__(self, world: World, layers: Sequence[Layer]) -> None:
        self.world, self.layers = world, list(layers)
        self.rows: list[Row] = []

    # -- decisions ---------------------------------------------------------------------------

    def make_controller(
        self,
        policy: Policy,
        signal: str,
        priced: tuple[Compressor, Mapping[str, AnyLevel]] | None = None,
    ) -> Controller:
        """Make the object that asks a policy for the levels of the compressed layers, once per
        unit.

        Args:
            signal: the norm that the policy reads as "norm".
            priced: a compressor with its levels. The policy then sees what a step sends at each
                level.
        """
        world, compressed = self.world, [i for i, x in enumerate(self.layers) if x.compressed]
        costs = {}
        if priced is not None:
            every = (self.layers, priced[1], world.workers, world.shards)
            costs = dict(level_costs(costs_per_step(priced[0], *every), compressed))
        names = [layer.name for layer in self.layers]
        return Controller(policy, names, compressed, signal, costs)

    def decide_unit(self, history: Sequence[Row] | None = None) -> UnitPlan:
        """Decide the levels, batch size and period of the next unit, ``len(rows)``.

        Args:
            history: the past units as the policy of levels is to see them. None: as they are in
                ``rows``.

        Raises:
            ConfigError: a policy returns something other than decisions, or a reason that cannot be
                written into a record.
        """
        batch, sync = {}, {}
        if self.batch_controller is not None:
            chosen = self._checked(self.batch_controller)
            multiple = self.batch_sizes[chosen.level] // self.batch_size
            batch = {"batch": {"level": chosen.level, "why": chosen.why, "multiple": multiple}}
        levels = self.controller.decide(self.rows if history is None else history)
        if self.checks_reasons:
            check_reasons(self.controller.policy, levels.why)
        if self.sync_controller is not None:
            chosen = self._checked(self.sync_controller)
            period = period_of(chosen.level, self.periods)
            sync = {"sync": {"level": chosen.level, "why": chosen.why, "period": period}}
        return UnitPlan(levels, **batch, **sync)

    def _checked(self, controller: ModelController) -> Decision:
        """What it decides for the next unit."""
        chosen = controller.decide(self.rows)
        if self.checks_reasons:
            check_reasons(controller.policy, [chosen.why])
        return chosen

    def replay_levels(
        self, seen: list[Row], rows: Sequence[Row], *, all_policies: bool = False
    ) -> list[Row]:
        """Add to ``seen`` copies of those of ``rows`` that it lacks, with the levels that the
        policy of this job would have chosen; return ``seen``. So a policy that continues another
        run meets no level that it does not know.

        Args:
            seen: copies of the first of ``rows``.
            rows: the units of the other run.
            all_policies: change the levels of batch size and period as well.
        """
        others = (
            {"batch": self.batch_controller, "sync": self.sync_controller} if all_policies else {}
        )
        for row in rows[len(seen) :]:
            layers = {**row["layers"], "level": self.controller.decide(seen).names}
            decided: dict[str, Any] = {**row, "layers": layers}
            for column, rule in others.items():
                if rule is not None:
                    decided[column] = {**decided.get(column, {}), "level": rule.decide(seen).level}
            seen.append(cast("Row", decided))
        return seen

    # -- state -------------------------------------------------------------------------------

    def lay_out_state(
        self, table: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any], own: Part
    ) -> State:
        """Return the state of this process in the format of saved states (`regimes.job.state`).

        Args:
            table: what each layer has, by name: values by layer. The shapes are added here.
            shared: all else that is the same on all processes.
            own: what this process alone has.
        """
        world = self.world
        return {
            "format": FORMAT,
            "processes": world.processes,
            "workers": world.workers,
            "layers": by_layer(shape=layer_shapes(self.layers), **table),
            **shared,
            "parts": [{"process": world.rank, "workers": [*world.hosted], **own}],
        }
