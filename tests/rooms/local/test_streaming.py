"""Fragments, delay and mixing of Streaming DiLoCo, against a naive loop over copied models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from copied_models import ADAMW, DILOCO, SGD, Feedback, Streaming, close, every, text
from ddp_scripts import group, own_loop
from hypothesis import given
from hypothesis import strategies as st
from runs import rows, same_weights, weights

import regimes
from regimes.base.config import override
from regimes.base.errors import ConfigError
from regimes.training.build import prepare_run
from regimes.training.local_rounds import Rounds, divide_layers

torch.set_num_threads(1)
STREAMING = (*DILOCO, "outer.fragments=3", "outer.delay=2", "outer.mixing=0.5")


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(SGD, id="sgd"), pytest.param(ADAMW, id="adamw", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mixing", [pytest.param(0.0, marks=pytest.mark.slow), 0.25])
def test_it_is_the_naive_loop(
    optimizer: tuple[str, ...], delay: int, mixing: float, tmp_path: Path
) -> None:
    more = ("outer.fragments=3", f"outer.delay={delay}", f"outer.mixing={mixing}")
    c = text(every(6), *optimizer, *DILOCO, *more)
    regimes.run(c, tmp_path)
    sizes = [p.numel() for p in prepare_run(c).model.parameters()]
    close(weights(tmp_path), Streaming(c, 6, divide_layers(sizes, 3)).run(), 1e-11)


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
    sizes = [p.numel() for p in prepare_run(c).model.parameters()]
    close(
        weights(tmp_path), Streaming(c, 6, divide_layers(sizes, 3), feedback=feedback).run(), 1e-11
    )
    assert feedback.residuals


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 12))
def test_fragments_divide_the_layers(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    groups = divide_layers(sizes, count)
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
    size = sum(p.numel() for p in prepare_run(text()).model.parameters())
    assert sum(sent[:6]) == size
    assert max(sent[:16]) < 0.6 * size


def test_processes_equal_simulation(tmp_path: Path) -> None:
    pressed = ("compressor=topk", "levels.high=5", "levels.low=50", "policy.level=high")
    c = text("unit_steps=3", every(4), *ADAMW, *STREAMING, *pressed)
    regimes.run(c, tmp_path / "one")
    forked.train(c, tmp_path / "two", 2)
    close(weights(tmp_path / "two"), weights(tmp_path / "one"), 1e-12)
    one, two = (regimes.load(tmp_path / name).rows for name in ("one", "two"))
    assert [row["floats"] for row in one] == [row["floats"] for row in two]
    assert [row["train_loss"] for row in one] == pytest.approx([row["train_loss"] for row in two])


# -- what instruments see, and what a stopped run keeps of it --------------------------------

PLACES = {  # fragments, delay, mixing; "sent again": before instruments have seen the others
    "in turn": (2, 0, 0.0),
    "delayed": (3, 1, 0.5),
    "all at once": (1, 3, 0.5),
    "sent again": (3, 5, 0.5),
}


def place(name: str) -> tuple[str, ...]:
    fragments, delay, mixing = PLACES[name]
    return f"outer.fragments={fragments}", f"outer.delay={delay}", f"outer.mixing={mixing}"


class Norms(Streaming):
    """Adds up the pseudo-gradients of a run, whenever the last fragment has come back."""

    def seen(self) -> list[float]:
        last: dict[int, torch.Tensor] = {}
        self.last, self.sums = last, [torch.zeros_like(p) for p in self.synced]
        self.run()
        return [float(total.norm()) for total in self.sums]

    def _arrive(self, k: int) -> None:
        self.last |= dict(zip(self.parts[k], self.sent[k][1], strict=True))
        super()._arrive(k)
        if k == len(self.parts) - 1:
            for i, movement in self.last.items():
                self.sums[i] = self.sums[i] + movement


@pytest.mark.parametrize(("name", "nesterov"), [*zip(PLACES, ["true", "false"] * 2, strict=True)])
def test_the_norm_is_that_of_the_pseudo_gradients(name: str, nesterov: str, tmp_path: Path) -> None:
    """Without compression the means of what was sent are the updates: both readings are alike."""
    both = "instruments={norms={readings=['update','global']}}"
    outer = ("outer.lr=0.7", "outer.momentum=0.9", f"outer.nesterov={nesterov}")
    c = text(every(6), *SGD, *outer, *place(name), both)
    (row,) = regimes.run(c, tmp_path).rows
    sizes = [p.numel() for p in prepare_run(c).model.parameters()]
    expected = Norms(c, 6, divide_layers(sizes, PLACES[name][0])).seen()
    for reading in ("update", "global"):
        assert row["statistics"][f"norm:{reading}"] == pytest.approx(expected, rel=1e-9)


PRESSING = (
    "compressor=topk",
    "levels={low=50,high=5}",
    "policy={name='accordion',interval=1,eta=0.6}",
    "signal=update",
)
PERIODS = {
    "constant": every(6),
    "by the norm": "sync_policy={name='accordion',interval=1,eta=0.3}",
    "from shared steps": "sync_policy={name='windows',windows=[[0,2]],inside='1',outside='6'}",
}


@pytest.mark.parametrize(
    ("name", "period"),
    [
        ("delayed", "constant"),
        ("all at once", "constant"),
        ("sent again", "constant"),
        ("delayed", "by the norm"),
        ("in turn", "from shared steps"),
    ],
)
def test_stopped_after_any_unit_it_ends_in_the_same_bytes(
    name: str, period: str, tmp_path: Path
) -> None:
    """A branch without a change, and so a run that is resumed: they read the same checkpoint."""
    nesterov = () if period == "from shared steps" else DILOCO
    levels = ("sync_levels={low=6,high=8}", "unit_steps=4", "checkpoint_keep=all")
    c = text(PERIODS[period], *ADAMW, *nesterov, *place(name), *PRESSING, *levels)
    instruments = "instruments={norms={readings=['update','global','local-mean']}}"
    regimes.run(override(c, [instruments]), tmp_path / "trunk")
    lines = (tmp_path / "trunk/epochs.jsonl").read_bytes().splitlines()
    levels_seen = {level for row in rows(tmp_path / "trunk") for level in row["layers"]["level"]}
    assert name == "sent again" or levels_seen >= {"low", "high"}
    for at in range(1, len(lines)):
        out = tmp_path / f"from {at}"
        regimes.branch(tmp_path / "trunk", at=at, out=out)
        assert (out / "epochs.jsonl").read_bytes().splitlines() == lines[at:], at
        same_weights(out, tmp_path / "trunk")


@pytest.mark.slow
def test_a_job_saved_after_any_step_goes_on_as_if_it_had_not_been() -> None:
    places = [PLACES[name] for name in ("in turn", "delayed", "sent again")]
    for found in group.run(own_loop.saved_after_each_step, 2, places):
        assert found == []


def test_losses_go_to_the_steps_that_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The period is 12, after the first unit 5: the fragments leave after steps 4, 8 and 12, the
    second one again after step 13 and the first after 16, so that what the first one brings is
    newer than what the second one does."""
    seen = list[tuple[float, float, int]]()
    deliver = Rounds._delivered_losses

    def watched(local: Rounds) -> list[Any]:
        losses = [*deliver(local)]
        seen.extend((float(mean), float(rows.mean()), step) for mean, rows, _, step in losses)
        return losses

    monkeypatch.setattr(Rounds, "_delivered_losses", watched)
    rule = "sync_policy={name='windows',windows=[[0,1]],inside='12',outside='5'}"
    regimes.run(text("unit_steps=8", rule, "outer.fragments=3", "outer.delay=4"), tmp_path)
    assert [step for *_, step in seen] == sorted(step for *_, step in seen)
    assert [mean for mean, *_ in seen] == pytest.approx([own for _, own, _ in seen], rel=1e-12)
    assert len(seen) >= 12


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("outer.delay=6",), "below the shortest period, 6"),
        (("outer.fragments=99",), "at most the number of layers"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    settings: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        regimes.run(text(every(6), *settings), tmp_path)
