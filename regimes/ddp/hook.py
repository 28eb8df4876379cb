"""What a user of the hook holds: what ends an epoch, what is logged, its state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from torch import nn

from regimes.config import Level
from regimes.ddp import elastic, pace, state, validate
from regimes.ddp.fitting import fit
from regimes.ddp.job import Job, Scaler
from regimes.ddp.recording import Recording, recording
from regimes.errors import ConfigError
from regimes.policies import Decision


def attach(
    model: nn.Module,
    *,
    policy: Any = "accordion",
    compressor: Any = "powersgd",
    levels: Mapping[str, Level] | None = None,
    signal: str = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    optimizer: Any = None,
    every: Any = "epoch",
    record: str | Path | Recording | None = None,
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
        levels: what the policy's words mean for the compressor, by default the compressor's own:
            for PowerSGD ranks, ``{"low": 4, "high": 1}``.
        signal: what the norm is of, see ``regimes.instruments.gradient_norm``. All but "update"
            keep a copy of the gradients and send something at the end of an epoch.
        seed: of the compressor's random numbers.
        start_compressing_after: the first so many steps send the gradient uncompressed.
        optimizer: whose learning rate the hook reads, that of the first group; then
            ``epoch_end()`` needs none.
        every: "epoch": a unit ends with ``epoch_end()``. A number: it ends by itself after so many
            steps, ``len(loader)`` for an epoch. A ``DistributedSampler``: it ends by itself when
            ``set_epoch`` names another epoch. The last two need the optimiser.
        record: a folder for a record of the job, as the trainer writes one; process 0 writes it.
        scaler: the GradScaler that scales the loss, if one does. The hook then works in units of
            the unscaled loss, so that a change of scale changes neither residuals nor norms.
        timeout: seconds until a process that the others wait for counts as lost.

    Raises:
        ConfigError: one sentence, before anything is registered.
    """
    ddp = validate.wrapped(model)
    validate.check_wait(timeout, scaler)
    validate.check_seed(seed)
    chosen = validate.choose(policy, compressor, levels, signal, start_compressing_after)
    paced = pace.choose(every, optimizer, ddp)
    return Hook(ddp, chosen, paced, recording(record), seed, scaler, float(timeout))


class Hook(Job):
    """Made by ``attach``; one per model and process.

    Attributes:
        rows: the units (epochs, or of so many steps) so far, as a record has them.
    """

    # -- what a script calls -----------------------------------------------------------------

    def epoch_end(
        self, *, lr: SupportsFloat | None = None, next_lr: SupportsFloat | None = None
    ) -> dict[str, Decision]:
        """Read the epoch's statistics and decide the next epoch's levels; all processes call this,
        unless the hook was told to do so by itself.

        Args:
            lr: the learning rate now. Call this after ``scheduler.step()``: then it is that of the
                next epoch, and the policy hears of a decay in time. Not needed where the hook has
                the optimiser.
            next_lr: that of the next epoch, where ``lr`` is still that of the epoch just trained.

        Returns:
            The decision for each compressed layer.

        Raises:
            ConfigError: no backward pass since the last call, a rate that is no number from zero
                up, none at all, or a hook that ends its units by itself.
        """
        if self.pace.own:
            raise ConfigError(
                "epoch_end: this hook ends its units by itself, as attach(..., every=...) has told "
                "it: leave epoch_end() out"
            )
        if not self.buckets.steps:
            raise ConfigError(
                "epoch_end: no gradient has been reduced since the epoch began: call it once per "
                "epoch, after the training steps (backward under no_sync() reduces nothing)"
            )
        given = lr if lr is not None else self.pace.rate()
        if given is None:
            raise ConfigError(
                "epoch_end: give the learning rate, epoch_end(lr=...), or the optimiser to "
                "attach(..., optimizer=optimizer)"
            )
        now, following = pace.rate(given, "epoch_end: lr"), None
        if next_lr is not None:
            following = pace.rate(next_lr, "epoch_end: next_lr")
        else:
            before = self.pace.first if lr is None else self.lr
            now, following = (now if before is None else before), now
        self.lr = following
        return self._end(now, following)

    def log(self, **values: Any) -> None:
        """Add numbers to the record: of the unit under way, or, before the next unit's first step,
        of the one just ended. Several values of a name count as their mean. "train_loss",
        "test_loss" and the record's metric have columns of their own. Process 0's count; without a
        record it does nothing.

        Raises:
            ConfigError: a value that is no number.
        """
        if self.journal is not None:
            self.journal.log(values)

    def close(self) -> None:
        """End the record; all processes call this, or none: when Python ends, it ends as well.

        The steps since the last unit are its last, shorter unit, where the hook ends units by
        itself.
        """
        self._close(talks=True)

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
        self.world.guard.enter("load_state_dict()")
        self._continue(fit(self, saved))

    def full_state_dict(self) -> dict[str, Any] | None:
        """The states of all processes in one, on process 0 (None on the others), which any number
        of processes can continue from. All processes call this. Its tensors are on the CPU;
        ``torch.load(weights_only=True)`` reads it back.

        A unit of so many steps that has had them ends now, where its statistics could not be
        saved, and not with the next step: call this after ``scheduler.step()``.

        Raises:
            ConfigError: as ``state_dict`` does, on all processes.
        """
        self.world.guard.enter("full_state_dict()")
        if not state.within(self) and self.pace.over(self.buckets.steps):
            self._end(*self.pace.rates())
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
        self.world.guard.enter("load_full_state_dict()")
        self._continue(elastic.deal(self, full))
