"""Hugging Face's Trainer under the hook (needs the extra ``transformers``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regimes.hook.ddp import Hook, RecordOptions
from regimes.integrations.shared import HookSettings, load_hook, save_hook

SUMMARY = "train_runtime"  # is only in the one entry about the whole job
KNOWN = {"learning_rate", "epoch"}  # the record has them


class RegimesCallback(TrainerCallback):
    """Compresses the exchange of gradients in a ``Trainer``, on as many processes as torchrun or
    ``accelerate launch`` starts::

        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.add_callback(RegimesCallback(trainer, every=50, record="runs/mine"))
        trainer.train()

    What the Trainer logs goes into the record: "loss" as "train_loss", "eval_loss" as "test_loss".
    Each checkpoint has the hook's state in ``regimes.pt``, and a training that is resumed from one
    goes on with it, on any number of processes.

    Attributes:
        hook: of the training under way, or of the last one; None before.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        every: int | str = "epoch",
        record: str | Path | RecordOptions | None = None,
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            trainer: the one that gets this callback.
            every: levels are decided every "epoch", or after so many optimiser steps.
            record: a folder for a record of the job, or a ``regimes.RecordOptions``.
            resume_from: the checkpoint that ``trainer.train`` resumes from, where that is not in
                the Trainer's ``output_dir``.
            options: of ``regimes.attach`` or ``attach_shards``: ``policy``, ``compressor``, ...

        Raises:
            ConfigError: an option that is none.
        """
        self.trainer, self.resume_from = trainer, resume_from
        self.settings = HookSettings(every, record, options)
        self.hook: Hook | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        loader, accumulated = given.get("train_dataloader"), args.gradient_accumulation_steps
        length = len(loader) if isinstance(loader, Sized) else None
        self.hook = self.settings.attach(
            self.trainer.model_wrapped,
            given.get("optimizer"),
            epoch_steps=None if length is None else math.ceil(length / accumulated),
            total=state.max_steps,
            batch_size=args.per_device_train_batch_size * accumulated,
            scaler=getattr(self.trainer.accelerator, "scaler", None),
        )
        if state.global_step:
            load_hook(self.hook, self.resume_from or self._checkpoint(args, state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        if self.hook is None or not logs or SUMMARY in logs:
            return
        cost = ("_runtime", "_per_second")
        values = {k: v for k, v in logs.items() if k not in KNOWN and not k.endswith(cost)}
        if "loss" in values:
            values["train_loss"] = values.pop("loss")
        self.hook.log(**self.settings.numbers(values))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self.hook is not None and not args.save_only_model:
            save_hook(self.hook, self._checkpoint(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self.hook is not None:
            self.hook.close()

    @staticmethod
    def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir), f"checkpoint-{state.global_step}")
