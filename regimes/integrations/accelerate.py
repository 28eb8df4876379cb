"""Loops of one's own with Accelerate under the hook (needs the extra ``transformers``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from regimes.hook.ddp import Hook, RecordOptions
from regimes.integrations.shared import HookSettings, load_hook, save_hook


def attach(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    every: int,
    record: str | Path | RecordOptions | None = None,
    **options: Any,
) -> Hook:
    """Let a model that ``accelerator.prepare`` has wrapped exchange its gradients compressed::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        hook = attach(accelerator, model, optimizer, every=50, record="runs/mine")

    The loop stays as it is: ``accelerator.accumulate``, ``clip_grad_norm_`` (it sees the shared
    update) and mixed precision included. ``accelerator.save_state(folder)`` saves the
    hook's state with the others, ``load_state`` continues from it, on any number of processes.

    Args:
        model, optimizer: as ``prepare`` gave them; call this before the first step.
        every: levels are decided after so many optimiser steps.
        record: a folder for a record of the job, or a ``regimes.RecordOptions``.
        options: of ``regimes.attach`` or ``attach_shards``: ``policy``, ``compressor``, ...

    Raises:
        ConfigError: one sentence, before anything is registered.
    """
    hook = HookSettings(every, record, options).attach(
        model, optimizer, epoch_steps=None, total=None, batch_size=None, scaler=accelerator.scaler
    )
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: save_hook(hook, folder)
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: load_hook(hook, folder))
    return hook
