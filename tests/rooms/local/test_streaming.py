"""Fragments, delay and mixing of Streaming DiLoCo, against a naive loop over copied models."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from copied_models import ADAMW, DILOCO, SGD, Feedback, Streaming, close, every, text
from hypothesis import given
from hypothesis import strategies as st
from runs import resumed_alike, weights

import regimes
from regimes.errors import ConfigError
from regimes.training.build import prepare
from regimes.training.streaming import divide

torch.set_num_threads(1)
STREAMING = (*DILOCO, "outer.fragments=3", "outer.delay=2", "outer.mixing=0.5")


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
    close(weights(tmp_path), Streaming(c, 6, divide(sizes, 3)).run(), 1e-11)


def two_bits(delta: torch.Tensor, chunk: int = 4, share: float = 0.25) -> torch.Tensor:
    """What a worker sends by SparseLoCo: of each block the largest, each as the mean of those of
    the whole matrix with its sign and in its half of the range of magnitudes."""
    kept = torch.zeros(delta.shape, dtype=torch.bool)
    for top in range(0, delta.shape[0], chunk):
        for left in range(0, delta.shape[1], chunk):
            place = slice(top, top + chunk), slice(left, left + chunk)
            block = delta[place]
            bound = block.abs().flatten().sort(descending=True).values[round(share * 16) - 1]
            kept[place] = block.abs() >= bound
    sizes = delta[kept].abs()
    middle = (sizes.min() + sizes.max()) / 2
    sent = torch.zeros_like(delta)
    for negative in (False, True):
        for large in (False, True):
            alike = kept & ((delta < 0) == negative) & ((delta.abs() >= middle) == large)
            if alike.any():
                sent[alike] = delta[alike].mean()
    return sent


def four_bits(delta: torch.Tensor) -> torch.Tensor:
    """Multiples of a seventh of the largest magnitude, rounded to the nearest."""
    scale = delta.abs().max() / 7
    return (delta / scale + 0.5).floor().clamp(-7, 7) * scale


PRESSED = {
    "sparseloco": (
        "compressor={name='chunked-topk',chunk=4}",
        "levels={high=25}",
        Feedback(two_bits, 0.95),
    ),
    "4 bits": (
        "compressor={name='quantise',stochastic=false,error_feedback=true}",
        "levels={high=4}",
        Feedback(four_bits),
    ),
}


@pytest.mark.parametrize("name", PRESSED)
def test_compressed_fragments_are_the_naive_loop(name: str, tmp_path: Path) -> None:
    compressor, levels, feedback = PRESSED[name]
    pressed = (compressor, levels, "policy={name='static',level='high'}")
    more = ("outer.fragments=3", "outer.delay=2", "outer.mixing=0.5", "model.width=16")
    c = text(every(6), *ADAMW, *DILOCO, *more, *pressed)
    regimes.run(c, tmp_path)
    sizes = [p.numel() for p in prepare(c).model.parameters()]
    close(weights(tmp_path), Streaming(c, 6, divide(sizes, 3), feedback=feedback).run(), 1e-11)
    assert feedback.residuals


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
