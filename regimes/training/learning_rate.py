"""The learning rate as a pure function of the epoch: linear warm-up, then step decay (Table 7)."""

from __future__ import annotations

from regimes.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, epoch: int) -> float:
    """The rate that ``epoch`` (from 0) trains at.

    The warm-up runs linearly from ``warmup_from`` in epoch 0 to ``lr`` in epoch
    ``warmup_epochs`` (Goyal et al., 2017); each epoch of ``decay_epochs`` is the first to train
    at a rate divided once more by ``decay_factor``.

    >>> config = OptimizerConfig(lr=0.4, warmup_from=0.1, warmup_epochs=2, decay_epochs=(4,))
    >>> [round(learning_rate(config, epoch), 3) for epoch in range(6)]
    [0.1, 0.25, 0.4, 0.4, 0.04, 0.04]
    """
    rate = config.lr
    if config.warmup_from is not None and epoch < config.warmup_epochs:
        done = epoch / config.warmup_epochs
        rate = config.warmup_from + (config.lr - config.warmup_from) * done
    return rate / config.decay_factor ** sum(epoch >= first for first in config.decay_epochs)
