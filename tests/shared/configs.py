"""Configurations that train in seconds, for tests."""

from __future__ import annotations

from pathlib import Path

import regimes
from regimes.base.config import RunConfig, from_dict, override


def smoke(*settings: str, epochs: int = 4) -> RunConfig:
    """The smoke preset, cut short, in float64; ACCORDION decides each epoch."""
    short = [
        f"epochs={epochs}",
        "dtype=float64",
        "data.train_size=120",
        "data.test_size=100",
        "policy.interval=1",
        "optimizer.decay_epochs=[3]",
    ]
    return override(regimes.get_preset("smoke"), [*short, *settings])


def smoke_constant_rate(*settings: str) -> RunConfig:
    """The smoke preset, 6 epochs of 200 samples, without a decay; ACCORDION decides."""
    short = ["epochs=6", "data.train_size=200", "data.test_size=100", "optimizer.decay_epochs=[]"]
    return override(regimes.get_preset("smoke"), [*short, *settings])


def smoke_static(*settings: str) -> RunConfig:
    """The smoke preset, 3 epochs of 200 samples in float64, without a decay, at one level."""
    short = [
        "epochs=3",
        "dtype=float64",
        "data.train_size=200",
        "data.test_size=100",
        "policy=static",
        "optimizer.decay_epochs=[]",
    ]
    return override(regimes.get_preset("smoke"), [*short, *settings])


def gpt(*settings: str) -> RunConfig:
    """A small GPT: 17 steps of 4 x 2 windows of 16 letters."""
    base = from_dict(
        RunConfig,
        {
            "epochs": 2,
            "workers": 4,
            "batch_size": 2,
            "data": {"name": "stdlib", "sequence": 16, "train_size": 2100, "test_size": 300},
            "model": {"name": "gpt", "width": 16, "depth": 1, "heads": 2},
            "optimizer": {"lr": 0.5, "clip": 1.0},
            "levels": {"low": 2, "high": 1},
        },
    )
    return override(base, list(settings))


def lstm(text: Path, *settings: str, epochs: int = 3) -> RunConfig:
    """A small LSTM in float64 on `corpora.random_walk`: 4 workers x 3 streams of 66 tokens in 7
    windows."""
    base = from_dict(
        RunConfig,
        {
            "epochs": epochs,
            "workers": 4,
            "batch_size": 3,
            "dtype": "float64",
            "data": {"name": "wikitext-2", "path": str(text), "sequence": 10},
            "model": {"name": "lstm", "width": 8, "depth": 2, "dropout": 0.0},
            "optimizer": {"lr": 1.0, "warmup_from": 0.5, "warmup_epochs": 1, "decay_epochs": [2]},
            "policy": {"name": "accordion", "interval": 1},
        },
    )
    return override(base, list(settings))
