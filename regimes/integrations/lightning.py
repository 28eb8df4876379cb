"""Lightning's Trainer under the hook (needs the extra ``lightning``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from regimes.hook.ddp import Hook, RecordOptions
from regimes.integrations.shared import EVALUATED, HookSettings, collect_states, load_collected

LOSSES = {"loss", "train_loss", "train/loss"}  # of training: logged at each step


class _Epochs:
    """Tells a hook the trainer's epoch, with which a unit then ends. Under manual optimisation the
    number of steps does not tell: a training step may step several optimisers, or none."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def epoch(self) -> int:
        return self.trainer.current_epoch


class RegimesCallback(Callback):
    """Compresses the exchange of gradients under ``Trainer(strategy=ModelParallelStrategy())``,
    whose module calls ``fully_shard`` in ``configure_model``, or ``Trainer(strategy="ddp")``::

        callback = RegimesCallback(every=50, record="runs/mine", scatter={"level": 4})
        Trainer(strategy=strategy, devices=2, callbacks=[callback]).fit(module, loader)

    The loss of each step and what the module logs go into the record: "val_loss" as "test_loss".
    Lightning's checkpoints hold the hook's state, and ``fit(..., ckpt_path=...)`` goes on with it:
    under DDP on any number of processes, of a sharded model on as many as before. Process 0 then
    holds the states of all in its memory while it saves them.

    Attributes:
        hook: of the training under way, or of the last one; None before.
    """

    def __init__(
        self,
        *,
        every: int | str = "epoch",
        record: str | Path | RecordOptions | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            every: levels are decided every "epoch", or after so many optimiser steps.
            record: a folder for a record of the job, or a ``regimes.RecordOptions``.
            options: of ``regimes.attach`` or ``attach_shards``: ``policy``, ``compressor``, ...

        Raises:
            ConfigError: an option that is none.
        """
        self.settings = HookSettings(every, record, options)
        self.hook: Hook | None = None
        self.loaded: Mapping[str, Any] | None = None  # a state, until there is a hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        accumulated = trainer.accumulate_grad_batches
        # by the trainer's epochs (see `_Epochs`); else by optimiser steps
        by_epoch = self.settings.every == "epoch" and not pl_module.automatic_optimization
        self.hook = self.settings.attach(
            trainer.strategy.model or pl_module,
            list(trainer.optimizers) or None,
            epoch_steps=trainer.num_training_batches / accumulated,
            total=trainer.max_epochs if by_epoch else trainer.estimated_stepping_batches,
            clock=_Epochs(trainer) if by_epoch else None,
            batch_size=None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )
        if self.loaded:
            load_collected(self.hook, self.loaded)
        self.loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.hook is not None and loss is not None:
            # Lightning divides the loss by the number of accumulated batches.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.hook.log(train_loss=loss * parts)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, evaluated=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, evaluated=False)

    def _log(self, trainer: Trainer, evaluated: bool) -> None:
        """Log metrics of the evaluation, or only the others: at the end of an epoch, metrics of the
        evaluation may be of an earlier epoch."""
        if self.hook is not None:
            metrics = {
                name: value
                for name, value in trainer.callback_metrics.items()
                if name not in LOSSES and bool(EVALUATED.fullmatch(name)) is evaluated
            }
            self.hook.log(**self.settings.numbers(metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.hook is not None:
            self.hook.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes, on process 0; Lightning calls this on all
        processes."""
        return {} if self.hook is None else collect_states(self.hook) or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state once the model is wrapped."""
        self.loaded = state_dict
