"""What a user of the hook holds: its levels, what ends an epoch, its state.

The same compressors, policies and gauges as the trainer's (``training.loop``), and the same rows of
past epochs, so that a policy sees here what it would see there. All processes of the model's group
do the same with the same configuration, which is checked at the first bucket of each epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.compression.reducer import Reducer, check_order
from regimes.config import DENSE, Level
from regimes.ddp import elastic, state, validate
from regimes.ddp.buckets import Buckets
from regimes.ddp.fitting import fit
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError, unexpected
from regimes.instruments.base import MeasurementContext
from regimes.instruments.panel import Panel, Readings, choose
from regimes.policies import Decision
from regimes.policies.controller import Controller


@runtime_checkable
class Scaler(Protocol):
    """What the hook wants of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


def attach(
    model: nn.Module,
    *,
    policy: Any = "accordion",
    compressor: Any = "powersgd",
    levels: Mapping[str, Level] | None = None,
    signal: str = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    scaler: Scaler | None = None,
    timeout: float = 600.0,
) -> Hook:
    """Let a DDP model exchange its gradients compressed, at levels that a policy decides.

    Call it on every process, right after wrapping the model. ``.grad`` then holds the shared
    update after each backward pass, as without the hook. To accumulate gradients, use
    ``model.no_sync()`` for all backward passes of a step but the last.

    Args:
        model: a DistributedDataParallel model.
        policy, compressor: a name, a table like ``{"name": "accordion", "interval": 5}``, or an
            object.
        levels: what the policy's words mean for the compressor; by default PowerSGD ranks,
            ``{"low": 4, "high": 1}``.
        signal: what the norm is of, see ``regimes.instruments.gradient_norm``. All but "update"
            keep a copy of the gradients and send something at the end of an epoch.
        seed: of the compressor's random numbers.
        start_compressing_after: the first so many steps send the gradient uncompressed.
        scaler: the GradScaler that scales the loss, if one does. The hook then works in units of
            the unscaled loss, so that a change of scale changes neither residuals nor norms.
        timeout: seconds until a process that the others wait for counts as lost.

    Raises:
        ConfigError: one sentence, before anything is registered.
    """
    ddp = validate.wrapped(model)
    chosen = validate.choose(policy, compressor, levels, signal, start_compressing_after)
    return Hook(ddp, chosen, seed, scaler, timeout)


class Hook:
    """Made by ``attach``; one per model and process.

    Attributes:
        rows: the epochs so far, as a record has them.
    """

    def __init__(
        self, model: DistributedDataParallel, chosen: validate.Choice, seed: int,
        scaler: Scaler | None, timeout: float,
    ) -> None:  # fmt: skip
        rule, signal = chosen.policy, chosen.signal
        self.compressor, self.values = chosen.compressor, chosen.levels
        found = validate.trainable(model)
        self.layers = [Layer(name, tuple(p.shape)) for name, p in found.items()]
        check_order(self.compressor, self.values, self.layers, model.process_group.size())
        compressed = [i for i, layer in enumerate(self.layers) if layer.compressed]
        self.controller = Controller(rule, list(found), compressed, signal)
        first = next(iter(found.values()))
        self.world = GroupWorld(model.process_group, first.device, timeout)
        self.world.meter.dtype = first.dtype
        self.reducer = Reducer(self.compressor, self.layers, self.world, seed)
        self.panel = self._choose(model.module, chosen, seed)
        from_updates = {"norms", "msdr"} if signal == "update" else {"msdr"}
        self.buckets = Buckets(
            model,
            list(found.values()),
            self.reducer,
            list(self.panel),
            keep_gradients=not self.panel.gauges.keys() <= from_updates,
            scale=(lambda: 1.0) if scaler is None else scaler.get_scale,
            dense_start=chosen.dense_start,
        )
        self.rows: list[dict[str, Any]] = []
        self.lr: float | None = None
        self.earlier = Traffic(0, 0)
        self._decide()
        receive = self.buckets.receive
        model.register_comm_hook(None, lambda state, bucket: receive(bucket))

    def _choose(self, model: nn.Module, chosen: validate.Choice, seed: int) -> Panel:
        """The gauges of what the policy reads; they see gradients and no data."""
        context = MeasurementContext(
            model, validate.no_data, self.world, self.layers, seed, False, validate.no_data,
            validate.no_data, chosen.compressor, chosen.levels,
        )  # fmt: skip
        needs = chosen.policy.needs
        norm = any(Statistic.parse(need).is_norm for need in needs)
        return choose({}, needs, chosen.signal if norm else None, context)

    @property
    def levels(self) -> dict[str, str]:
        """The level that each layer has now; "dense" for those that are never compressed."""
        return dict(zip((layer.name for layer in self.layers), self._levels, strict=True))

    @property
    def traffic(self) -> Traffic:
        """What this process has handed to the collectives since training began, detectors'
        signals and the news of non-finite gradients included."""
        return sum(self.world.meter.layers.values(), self.earlier)

    # -- epochs ------------------------------------------------------------------------------

    def epoch_end(
        self, *, lr: SupportsFloat, next_lr: SupportsFloat | None = None
    ) -> dict[str, Decision]:
        """Read the epoch's statistics and decide the next epoch's levels; all processes call this.

        Args:
            lr: the learning rate now. Call this after ``scheduler.step()``: then it is that of the
                next epoch, and the policy hears of a decay in time.
            next_lr: that of the next epoch, where ``lr`` is still that of the epoch just trained.

        Returns:
            The decision for each compressed layer.

        Raises:
            ConfigError: no backward pass since the last call, or a rate that is no number from zero
                up.
        """
        if not self.buckets.steps:
            raise ConfigError(
                "epoch_end: no gradient has been reduced since the epoch began: call it once per "
                "epoch, after the training steps (backward under no_sync() reduces nothing)"
            )
        rate, following = _rate(lr), None if next_lr is None else _rate(next_lr)
        if following is None:
            rate, following = (rate if self.lr is None else self.lr), rate
        self.lr = following
        self.rows.append(self._row(rate, following))
        self.buckets.restart()
        return self._decide()

    def _row(self, rate: float, following: float) -> dict[str, Any]:
        """The epoch as a record has it; without statistics when every step was skipped."""
        with self.buckets.on_hook_stream():
            kept = self.buckets.kept
            readings = self.panel.read(len(self.rows)) if kept else Readings()
        return {
            "epoch": len(self.rows),
            "lr": rate,
            "next_lr": following,
            "steps": self.buckets.steps,
            "skipped": self.buckets.steps - kept,
            "layers": {"level": self._levels},
            "statistics": readings.layers,
            "model": readings.model,
        }

    def _decide(self) -> dict[str, Decision]:
        found = self.controller.decide(self.rows)
        self._use(found.names)
        return {self.layers[i].name: decision for i, decision in found.decisions.items()}

    def _use(self, levels: list[str]) -> None:
        self._levels = levels
        self.buckets.levels = [DENSE if x == DENSE else self.values[x] for x in levels]
        self.buckets.check = self._agree

    def _agree(self) -> None:
        """Processes with different ideas would wait for each other, or mix up their bytes."""
        control = self.controller
        plug_ins = state.describe(control.policy), state.describe(self.compressor)
        configuration = (*plug_ins, dict(self.values), control.signal, self.layers,
                         self.buckets.dense_start)  # fmt: skip
        place = len(self.rows), self.buckets.steps, self.buckets.total, self._levels
        facts = {"model or configuration of the hook": configuration, "state of the hook": place}
        self.world.agree(
            **{k: hashlib.sha256(repr(v).encode()).hexdigest() for k, v in facts.items()}
        )

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This process's state, which ``torch.load(weights_only=True)`` reads back. Each process
        saves its own, because each owes something else. Nothing in it changes afterwards.

        Raises:
            ConfigError: within an epoch, when the policy reads more than the norm.
        """
        return state.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``saved`` was taken; all processes call this.

        Layers are known by their names. One that ``saved`` lacks, because it was frozen, starts
        without a residual; one that is frozen now is left out. Process 0 warns of both.

        Raises:
            ConfigError: it is of another model, compressor, process or number of processes.
        """
        self._use(state.restore(self, fit(self, saved)))

    def full_state_dict(self) -> dict[str, Any] | None:
        """The states of all processes in one, on process 0 (None on the others), which any number
        of processes can continue from. All processes call this. Its tensors are on the CPU;
        ``torch.load(weights_only=True)`` reads it back.

        Raises:
            ConfigError: as ``state_dict`` does, on all processes.
        """
        return elastic.collect(self)

    def load_full_state_dict(self, full: Mapping[str, Any] | None) -> None:
        """Continue where ``full`` was taken; all processes call this, and process 0 passes what
        ``full_state_dict`` gave there (what the others pass is not looked at).

        On as many processes as then it is ``load_state_dict`` of each one's own state. On another
        number the residuals are divided such that their mean over the processes is kept, and
        ``traffic`` goes on from that of process 0. Layers are matched as in ``load_state_dict``.

        Raises:
            ConfigError: on all processes: as ``load_state_dict`` does; or, on another number of
                processes, it was saved within an epoch and the signal is not "update".
        """
        self._use(state.restore(self, elastic.deal(self, full)))


def _rate(value: Any) -> float:
    """A learning rate as schedulers give it: a number of Python, NumPy or torch, zero included."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool) and 0 <= float(number) < math.inf:
        return float(number)
    raise unexpected("epoch_end: lr", value, "a number from zero up")
