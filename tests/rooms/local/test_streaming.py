"""Fragments, delay and mixing of Streaming DiLoCo, against a naive loop over copied models."""

from __future__ import annotations

import copy
from pathlib import Path

import forked
import pytest
import torch
from copied_models import ADAMW, DILOCO, SGD, close, every, step_each, steps, text
from hypothesis import given
from hypothesis import strategies as st
from runs import resumed_alike, weights

import regimes
from regimes.config import RunConfig
from regimes.errors import ConfigError
from regimes.training.build import prepare
from regimes.training.streaming import divide

torch.set_num_threads(1)
STREAMING = (*DILOCO, "outer.fragments=3", "outer.delay=2", "outer.mixing=0.5")


def naive(c: RunConfig, period: int, parts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Algorithm 2 of Douillard et al. (2025), with a copy of the model for each worker."""
    start, loss, batches, make = steps(c)
    models = [copy.deepcopy(start) for _ in range(c.workers)]
    optimizers = [make(model) for model in models]
    tensors = [list(model.parameters()) for model in models]
    synced = list(start.parameters())
    velocity = [torch.zeros_like(p) for p in synced]
    next_sent = [-(-period * (k + 1) // len(parts)) for k in range(len(parts))]
    sent: dict[int, tuple[int, list[torch.Tensor]]] = {}
    last_sent = [0] * len(parts)

    def arrive(k: int) -> None:
        for i, movement in zip(parts[k], sent.pop(k)[1], strict=True):
            velocity[i].mul_(c.outer.momentum).add_(movement)
            ahead = movement + c.outer.momentum * velocity[i] if c.outer.nesterov else velocity[i]
            synced[i] -= c.outer.lr * ahead
            for own in tensors:
                own[i].mul_(c.outer.mixing).add_((1 - c.outer.mixing) * synced[i])

    todo = list(batches)
    for done, (x, y) in enumerate(todo, start=1):
        step_each(c, models, optimizers, loss, x, y)
        over = done == len(todo)
        with torch.no_grad():
            for k in [k for k in sent if over]:
                arrive(k)
            for k, part in enumerate(parts):
                if done == next_sent[k] or (over and last_sent[k] < done):
                    moved = [synced[i] - torch.stack([t[i] for t in tensors]).mean(0) for i in part]
                    sent[k] = done + c.outer.delay, moved
                    next_sent[k], last_sent[k] = done + period, done
            for k in [k for k, (due, _) in sent.items() if over or due == done]:
                arrive(k)
    return dict(start.named_parameters())


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_it_is_the_naive_loop(
    optimizer: tuple[str, ...], delay: int, mixing: float, tmp_path: Path
) -> None:
    more = ("outer.fragments=3", f"outer.delay={delay}", f"outer.mixing={mixing}")
    c = text(every(6), *optimizer, *DILOCO, *more)
    regimes.run(c, tmp_path)
    sizes = [p.numel() for p in prepare(c).model.parameters()]
    close(weights(tmp_path), naive(c, 6, divide(sizes, 3)), 1e-11)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 12))
def test_fragments_divide_the_layers(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    groups = divide(sizes, count)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert len(groups) == count
    assert all(groups)
    largest = max(sum(sizes[i] for i in group) for group in groups)
    assert largest <= sum(sizes) / count + 2 * max(sizes)


def test_fragments_leave_at_equal_distances(tmp_path: Path) -> None:
    """17 steps, one a unit: fragments of three leave after steps 2, 4, 6, 8, ..., and all at last;
    the third one's arrivals count as synchronisations."""
    record = regimes.run(text(every(6), "unit_steps=1", "outer.fragments=3"), tmp_path)
    sent = [row["floats"] for row in record.rows]
    assert [i + 1 for i, floats in enumerate(sent) if floats] == [2, 4, 6, 8, 10, 12, 14, 16, 17]
    assert [row["sync"]["rounds"] for row in record.rows] == [0] * 5 + [1] + [0] * 5 + [1] + [
        0
    ] * 4 + [1]
    size = sum(p.numel() for p in prepare(text()).model.parameters())
    assert sum(sent[:6]) == size
    assert max(sent[:16]) < 0.6 * size


@pytest.mark.parametrize("compressor", ["dense", "topk"])
def test_processes_equal_simulation(compressor: str, tmp_path: Path) -> None:
    pressed = ("compressor=topk", "levels.high=5", "levels.low=50", "policy.level=high")
    more = pressed if compressor == "topk" else ()
    c = text("unit_steps=3", every(4), *ADAMW, *STREAMING, *more)
    regimes.run(c, tmp_path / "one")
    forked.train(c, tmp_path / "two", 2)
    close(weights(tmp_path / "two"), weights(tmp_path / "one"), 1e-12)
    one, two = (regimes.load(tmp_path / name).rows for name in ("one", "two"))
    assert [row["floats"] for row in one] == [row["floats"] for row in two]
    assert [row["train_loss"] for row in one] == pytest.approx([row["train_loss"] for row in two])


def test_resumed_while_a_fragment_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = text("unit_steps=3", every(4), *ADAMW, *STREAMING, "dtype=float32")
    resumed_alike(c, tmp_path, 2, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("outer.delay=6",), "below the shortest period, 6"),
        (("outer.fragments=99",), "at most the number of layers"),
        (("outer.fragments=2", "outer.states=average"), "where workers are never alike"),
        (("outer.mixing=1.0",), "below 1"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    settings: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        regimes.run(text(every(6), *settings), tmp_path)
