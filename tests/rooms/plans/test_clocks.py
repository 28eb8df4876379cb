"""The clocks of compressed training (oracle: losses made from a clock that is known)."""

from __future__ import annotations

import math

import pytest

from benchmarks import clock_choices, clocks
from regimes.search.plans.clock import Probe


def made(sizes: dict[str, dict[str, float]], spread: float = 0.0) -> clocks.Losses:
    """Dense falls by 0.1 bits with each doubling; a method is as far after N steps as dense after
    its clock times N. A second, worse rate has one seed, and a lower loss there.

    Args:
        spread: of the methods' losses over seeds, beside dense's, more at larger sizes.
    """
    losses: clocks.Losses = {}
    for size, known in sizes.items():
        share = clocks.SHARE[size]
        lengths = [round(share * n) for n in (75, 150, 300, 600, 1200)]
        for method, clock in {"dense": 1.0, **known}.items():
            for steps in lengths[0 if method == "dense" else 2 :]:
                loss = 3 - 0.1 * math.log2(clock * steps / lengths[0])
                for seed, shift in zip(clocks.SEEDS, (-0.01, 0.0, 0.01), strict=True):
                    more = 0.0 if method == "dense" else spread * shift / share
                    losses[size, Probe(method, steps, 0.0, seed)] = loss + shift + more
                losses[size, Probe(method, steps, 1.0, clocks.SEEDS[0])] = 1.0
    return losses


def test_a_clock_is_the_share_of_denses_steps_with_the_same_loss() -> None:
    losses = made({"115k": {"powersgd:1": 0.4, "dense/8": 0.8, "sign:1": 0.1}})
    found = clocks.all_clocks(losses)
    for length in clocks.LENGTHS:
        assert found["115k", "powersgd:1", length] == pytest.approx([0.4] * 3)
        assert found["115k", "dense/8", length] == pytest.approx([0.8] * 3)
    assert all(map(math.isnan, found["115k", "sign:1", 300]))  # dense had none so short
    assert found["115k", "sign:1", 1200] == pytest.approx([0.1] * 3)


def test_what_is_beyond_denses_longest_training_is_known_to_a_tenth() -> None:
    losses = made({"115k": {"quantised-all-reduce:4": 1.05, "quantised-all-reduce:8": 1.2}})
    found = clocks.all_clocks(losses)
    assert found["115k", "quantised-all-reduce:4", 1200] == pytest.approx([1.05] * 3)
    assert all(map(math.isnan, found["115k", "quantised-all-reduce:8", 1200]))
    assert found["115k", "quantised-all-reduce:8", 600] == pytest.approx([1.2] * 3)


def test_gaps_of_a_held_out_size_follow_from_clocks_and_its_dense_losses() -> None:
    known = {"powersgd:1": 0.4, "dense/8": 0.8}
    gaps = clocks.held_out_gaps(made({"115k": known, "460k": known, "260k": known}))
    assert {(gap.method, gap.steps) for gap in gaps} == {(m, n) for m in known for n in (450, 900)}
    for gap in gaps:
        assert gap.measured == pytest.approx(-0.1 * math.log2(known[gap.method]))
        assert gap.predicted == pytest.approx(gap.measured, abs=0.005)


def test_the_page_names_what_was_refuted() -> None:
    apart = {"115k": {"powersgd:1": 0.4}, "460k": {"powersgd:1": 0.6}}
    text = clocks.report(made(apart, spread=0.1))
    assert "clock is 0.85 to 1.18 times the clock with 115 k: refuted by rank 1 at" in text
    assert "rank 1 falls by 10 to 30 % with a doubling: refuted" in text
    assert "rank 1 has 0.35 +- 0.1 at 600 steps: holds" in text


def test_a_line_gives_a_clock_with_the_interval_of_new_seeds() -> None:
    same = {("115k", "dense/8", n): [0.7, 0.8, 0.9] for n in clocks.LENGTHS}
    middle, low, high = clock_choices.clock_at(same, "dense/8", ("115k",), 600) or (0, 0, 0)
    assert middle == pytest.approx(0.8)
    assert high - 0.8 == pytest.approx(0.8 - low)
    assert 0.06 < high - 0.8 < 0.15  # a seed deviates by 0.09
    more = {**same, **{("115k", "topk:1", n): [0.5] * 3 for n in clocks.LENGTHS}}
    assert (clock_choices.clock_at(more, "topk:1/8", ("115k",), 600) or [0])[0] == pytest.approx(
        0.4
    )
    assert clock_choices.clock_at(same, "topk:1", ("115k",), 600) is None
    assert clock_choices.clock_at({}, "dense", ("115k",), 600) == (1.0, 1.0, 1.0)
