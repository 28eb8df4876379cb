"""Trials of a level within local steps (``policies.trial``): some workers start a round from where
another level would have led, and all are scored at its end.

At a trial's first synchronisation the pseudo-gradients are exchanged at the job's level, which
gives the update that counts, and once more at the level under trial, on copies of the compressors'
memories. The outer step is linear in its updates: the same optimiser over zeros, stepped by the
difference of both updates, gives the *offset* of what the other level would have led to, momentum
included. The treated workers start the next round there. Their pseudo-gradients are measured from
their own start, so that nothing of a trial remains in the weights but what the treated have learnt
on the way.

A trial's bytes are counted as its layers' traffic, and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.capabilities import WORKER_SCORES, declared_needs
from regimes.collectives.requests import Gather
from regimes.compression.reducer import Reducer
from regimes.config import DENSE, AnyLevel, OuterConfig
from regimes.errors import ConfigError
from regimes.instruments.panel import finite_or_none
from regimes.job.state import by_layer, get_column
from regimes.policies import Policy, Trial
from regimes.training.outer_step import make_outer_optimizer
from regimes.training.replicas import Replicas


@dataclass(frozen=True)
class Probe:
    """What scores a worker's model.

    Attributes:
        batch: of a trial, by its number; the same on all processes.
        loss: the model's mean loss over a batch, a scalar tensor.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[Any], Tensor]

    def score_models(self, replicas: Replicas, number: int) -> Float[Tensor, " L"]:
        """The loss of each hosted worker's model, in evaluation mode, without any trace."""
        with _evaluating(self.model):
            batch = self.batch(number)
            losses = [self.loss(batch).double().reshape(()) for _ in replicas.each_worker()]
        return torch.stack(losses)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; random streams and modes are as before afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training


@dataclass(eq=False)
class _UnderWay:
    """A trial that has begun.

    Attributes:
        left: synchronisations until it is scored.
        bytes: that one worker has sent for it.
        offset: the treated workers' start less the other workers' start, ``[*shape]`` per layer.
        optimizer: the outer optimiser, over the offset.
        updates: what came back at the trial's level; None: it is no synchronisation's turn.
    """

    number: int
    level: str
    base: str
    treated: tuple[int, ...]
    left: int
    bytes: int
    offset: list[Tensor]
    optimizer: torch.optim.SGD
    updates: list[Tensor] | None = None


class Trials:
    """Runs the trials of a policy between the synchronisations of local steps.

    Attributes:
        reducer: of what is exchanged at levels under trial; its memories are copies.
        synced: synchronisations so far.
        begun: trials so far.
        current: the one under way.
        ended: those that have ended since ``take_ended``, as a record has them.
        over: no round follows.
    """

    def __init__(
        self,
        rule: Trial,
        levels: Mapping[str, AnyLevel],
        parameters: Sequence[Tensor],
        reducer: Reducer,
        outer: OuterConfig,
        probe: Probe,
        seed: int,
    ) -> None:
        """
        Args:
            parameters: of the last synchronisation.
            reducer: for the levels under trial alone.

        Raises:
            ConfigError: levels or workers do not fit the policy.
        """
        self.rule, self.reducer, self.outer, self.seed = rule, reducer, outer, seed
        self.parameters = [parameter.data for parameter in parameters]
        self.levels = {DENSE: DENSE, **levels}
        self.probe, self.world = probe, reducer.world
        rule.check_workers(self.world.workers)
        rule.check_levels(self.levels)
        self.synced = self.begun = 0
        self.current: _UnderWay | None = None
        self.ended: list[dict[str, Any]] = []
        self.over = False

    # -- a synchronisation -------------------------------------------------------------------

    def end_round(self, replicas: Replicas, last: bool) -> None:
        """Score the trial that ends here: a round of all workers is over, and they are not averaged
        yet.

        Args:
            last: no round follows, so that no trial may begin.
        """
        self.over = last
        if (trial := self.current) is not None:
            trial.left -= 1
            if not trial.left:
                self._score_trial(trial, replicas)

    def _score_trial(self, trial: _UnderWay, replicas: Replicas) -> None:
        own = self.probe.score_models(replicas, trial.number)
        before = self._bytes_sent()
        scores = self.world.ask(Gather(own))[0].tolist()
        sums = [0.0, 0.0]
        for worker, score in enumerate(scores):
            sums[worker in trial.treated] += score
        treated, others = len(trial.treated), self.world.workers - len(trial.treated)
        entry = {
            "number": trial.number,
            "level": trial.level,
            "base": trial.base,
            "treated": [*trial.treated],
            "scores": [finite_or_none(score) for score in scores],
            "difference": finite_or_none(sums[1] / treated - sums[0] / others),
            "bytes": trial.bytes + self._bytes_sent() - before,
        }
        self.ended.append(entry)

    def measure_from_own_start(self, parts: Sequence[Float[Tensor, "rows ..."]]) -> None:
        """Correct the pseudo-gradients, per layer, of workers that did not start at the last
        synchronisation; a trial that is over, or cannot end, has no more effect."""
        if (trial := self.current) is None:
            return
        for part, offset in zip(parts, trial.offset, strict=True):
            for row in self._treated_rows(trial):
                part[row].add_(offset)
        if not trial.left or self.over:
            self.drop_trial()

    def exchange_trial(
        self, reducer: Reducer, parts: Sequence[Float[Tensor, "rows ..."]], levels: Sequence[Any]
    ) -> None:
        """Exchange the pseudo-gradients, which are left as they are, at the level under trial, if
        there is one now; before the exchange that counts, by ``reducer`` at ``levels``."""
        due = not self.over and self.synced % self.rule.every == 0
        self.synced += 1
        if self.current is not None and self._level_values(self.current.base) != [*levels]:
            self.drop_trial()  # the job's level has changed within the trial
        elif self.current is None and due:
            self._begin_trial(reducer, levels)
        if (trial := self.current) is None:
            return
        before = self._bytes_sent()
        chosen = self._level_values(trial.level)
        updates = self.reducer.reduce(range(len(parts)), parts, chosen)
        trial.bytes += self._bytes_sent() - before
        # a compressor may write the next update to the same memory
        trial.updates = [updates[i].clone() for i in range(len(parts))]
        if trial.left == 1:
            self._drop_residuals()

    def start_round(self, updates: Mapping[int, Tensor], replicas: Replicas) -> None:
        """Let the treated workers start the next round from their own start. All others start from
        the synchronised parameters, the result of ``updates``."""
        if (trial := self.current) is None or trial.updates is None:
            return
        for i, (offset, update) in enumerate(zip(trial.offset, trial.updates, strict=True)):
            offset.grad = update.sub_(updates[i])
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        trial.updates = None
        for stack, offset in zip(replicas.stacks, trial.offset, strict=False):
            for row in self._treated_rows(trial):
                stack[row].add_(offset)

    def take_ended(self) -> dict[str, Any]:
        """The column "trials" of a row: those that have ended since the last call."""
        taken, self.ended = self.ended, []
        return {"trials": taken}

    # -- beginning and end -------------------------------------------------------------------

    def _begin_trial(self, reducer: Reducer, levels: Sequence[Any]) -> None:
        """Begin a trial, unless the job has a level that the policy does not know."""
        known = (name for name in self.rule.levels if self._level_values(name) == [*levels])
        if (base := next(known, None)) is None:
            return
        for i, state in enumerate(reducer.states):
            copy = self.reducer.states[i] = state.twin()
            if copy.residual is not None:
                copy.residual = copy.residual.clone()
        offset = [torch.zeros_like(tensor) for tensor in self.parameters]
        level, treated = self.rule.assignment(base, self.begun, self.world.workers, self.seed)
        optimizer = make_outer_optimizer(offset, self.outer)
        rounds = self.rule.rounds
        self.current = _UnderWay(self.begun, level, base, treated, rounds, 0, offset, optimizer)
        self.begun += 1

    def drop_trial(self) -> None:
        """End the trial under way without a result."""
        self.current = None
        self._drop_residuals()

    def _drop_residuals(self) -> None:
        """Hold no residuals: no more is exchanged in this trial."""
        for state in self.reducer.states:
            state.residual = None

    def _level_values(self, name: str) -> list[AnyLevel]:
        """The level of each layer where the compressed ones have this one."""
        value = self.levels[name]
        return [value if layer.compressed else DENSE for layer in self.reducer.layers]

    def _treated_rows(self, trial: _UnderWay) -> list[int]:
        return [row for row, worker in enumerate(self.world.hosted) if worker in trial.treated]

    def _bytes_sent(self) -> int:
        return sum(traffic.bytes for traffic in self.world.meter.layers.values())

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): the entries "trials" of a state's "outer", and of a part's."""
        shared: dict[str, Any] = {"synced": self.synced, "begun": self.begun, "ended": self.ended}
        if (trial := self.current) is None:
            return {**shared, "current": None}, {"layers": {}}
        memories, residuals = self.reducer.state_dict()
        names = [layer.name for layer in self.reducer.layers]
        current = {
            "number": trial.number,
            "level": trial.level,
            "base": trial.base,
            "treated": [*trial.treated],
            "left": trial.left,
            "bytes": trial.bytes,
            "layers": by_layer(offset=dict(zip(names, trial.offset, strict=True)), memory=memories),
            "optimizer": trial.optimizer.state_dict(),
        }
        return {**shared, "current": current}, {"layers": by_layer(residual=residuals)}

    def load_state_dict(self, state: Mapping[str, Any], residuals: Mapping[str, Any]) -> None:
        """The inverse, of ``state`` and the residuals of this process's workers."""
        self.synced, self.begun, self.ended = state["synced"], state["begun"], [*state["ended"]]
        self.current = None
        if (saved := state["current"]) is None:
            return
        self.reducer.load_state_dict(get_column(saved["layers"], "memory"), dict(residuals))
        self.reducer.to(self.parameters[0].device)
        values = get_column(saved["layers"], "offset").values()
        offset = [torch.zeros_like(tensor) for tensor in self.parameters]
        for tensor, value in zip(offset, values, strict=True):
            tensor.copy_(value)
        optimizer = make_outer_optimizer(offset, self.outer)
        optimizer.load_state_dict(saved["optimizer"])
        plain = {key: saved[key] for key in ("number", "level", "base", "left", "bytes")}
        treated = tuple(saved["treated"])
        self.current = _UnderWay(**plain, treated=treated, offset=offset, optimizer=optimizer)


def trial_of(rule: Policy) -> Trial | None:
    """The policy itself, if it makes trials.

    Raises:
        ConfigError: it is a part of another policy.
    """
    if isinstance(rule, Trial):
        return rule
    if WORKER_SCORES in declared_needs(rule):
        raise ConfigError(
            f"policy: {type(rule).__name__} has a policy by trials as its part, and trials are of "
            'one level for all compressed layers: let policy.name be "trial"'
        )
    return None
