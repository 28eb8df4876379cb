"""Runs of tests: what two of them share, and how one is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import regimes
from regimes.base.config import RunConfig
from regimes.records import read_lines
from regimes.training import checkpoint, loop


def rows(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a record."""
    return read_lines(folder / "epochs.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model in the last checkpoint."""
    saved = checkpoint.load(folder)
    assert saved is not None
    return saved[1]["model"]


def same_weights(a: Path, b: Path) -> None:
    """Bit for bit."""
    other = weights(b)
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, other[name]), name


def same_bits(a: Path, b: Path) -> None:
    """Equal epochs and weights, bit for bit."""
    assert (a / "epochs.jsonl").read_bytes() == (b / "epochs.jsonl").read_bytes()
    same_weights(a, b)


def same_run(a: Path, b: Path, tolerance: float = 1e-12) -> None:
    """Equal levels, reasons, floats; weights equal to a relative tolerance."""
    for mine, theirs in zip(rows(a), rows(b), strict=True):
        for key in ("level", "floats"):
            assert mine["layers"][key] == theirs["layers"][key]
        assert [w and w["rule"] for w in mine["layers"]["why"]] == [
            w and w["rule"] for w in theirs["layers"]["why"]
        ]
        assert mine["metric"] == pytest.approx(theirs["metric"], rel=tolerance)
    other = weights(b)
    for name, tensor in weights(a).items():
        scale = other[name].abs().max().clamp_min(1e-30) if tensor.is_floating_point() else 1
        assert ((tensor - other[name]).abs().max() / scale) <= tolerance, name


def same_text(a: Path, b: Path) -> None:
    """Equal levels and floats; perplexities and weights equal to a relative tolerance."""
    for mine, theirs in zip(rows(a), rows(b), strict=True):
        for key in ("level", "floats"):
            assert mine["layers"][key] == theirs["layers"][key]
        assert mine["metric"] == pytest.approx(theirs["metric"], rel=1e-9)
    other = weights(b)
    for name, tensor in weights(a).items():
        difference = (tensor - other[name]).abs().max() / other[name].abs().max()
        assert difference <= 1e-9, name


class Reporter:
    """One that does nothing: a test overrides what it watches."""

    def start(self, header: Any, rows: Any) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: Any, seconds: Any) -> None: ...
    def stop(self, message: str) -> None: ...


def stop_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the trainer, as Ctrl-C does, when this many units are over."""
    original = loop._train_unit

    def wrapped(parts: Any, unit: int, watchers: Any) -> Any:
        if unit == epochs:
            raise KeyboardInterrupt
        return original(parts, unit, watchers)

    monkeypatch.setattr(loop, "_train_unit", wrapped)


def break_off(config: RunConfig, folder: Path, units: int) -> None:
    """A run that is interrupted when so many units are over."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(units, patch)
        with pytest.raises(KeyboardInterrupt):
            regimes.run(config, folder)


def resumed_alike(config: RunConfig, folder: Path, epochs: int, processes: int = 1) -> None:
    """A run that stops after so many epochs and is resumed ends in the bits of a whole one; on
    several processes in its numbers."""
    regimes.run(config, folder / "whole")
    break_off(config, folder / "broken", epochs)
    if processes > 1:
        forked.train(config, folder / "broken", processes)
        same_run(folder / "whole", folder / "broken")
    else:
        regimes.run(config, folder / "broken", resume=True)
        same_bits(folder / "whole", folder / "broken")


def wait(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    """Until the condition holds; an error after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
