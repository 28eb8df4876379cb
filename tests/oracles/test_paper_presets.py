"""Presets at the paper's scale: rates of every epoch, windows, ladders (oracles: a loop that sets
the rate at the end of an epoch, as the authors' does, their published curves, Table 7 by hand)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from analysis.paper import published
from regimes.presets import get_grid, get_preset
from regimes.training.learning_rate import LearningRate

# -- the learning rate, by hand from Table 7 -------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [(0, 0.1), (1, 0.16), (4, 0.34), (5, 0.4), (150, 0.4), (151, 0.04), (250, 0.04), (251, 0.004)],
)
def test_learning_rate_of_the_papers_text(epoch: int, rate: float) -> None:
    config = get_preset("paper-text-resnet18-cifar10").optimizer
    assert LearningRate(config, 98, 98 * 300)(98 * epoch) == pytest.approx(rate)


def loop(epochs: int, first: float, peak: float, decays: tuple[int, int]) -> list[float]:
    """The rates of a loop like the authors': at the end of epoch e the rate is set from e, a factor
    that grows over five epochs, over ten per decay that e has come to, and e + 1 trains at it."""
    rates, rate = [], first
    for epoch in range(epochs):
        rates.append(rate)
        grown = first + (peak - first) * min(epoch / 5, 1)
        rate = grown / 10 ** sum(epoch >= decay for decay in decays)
    return rates


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("paper-resnet18-cifar10", loop(300, 0.1, 0.4, (151, 251))),
        ("paper-vgg19bn-cifar10", loop(300, 0.1, 0.4, (151, 251))),
        ("paper-table1-resnet18/low", loop(300, 0.1, 0.4, (151, 251))),
        ("paper-batch-cifar100/small-batch", loop(300, 0.1, 0.4, (151, 251))),
        ("paper-lstm", loop(90, 2.5, 10.0, (61, 80))),
    ],
    ids=str,
)
def test_the_papers_presets_have_the_rates_of_the_authors_loop(
    name: str, oracle: list[float]
) -> None:
    """In every epoch. Their rate falls after epoch 150 and 250, of the LSTM after 60 and from 80
    on."""
    config = get_preset(name)
    rate = LearningRate(config.optimizer, 7, 7 * config.epochs)
    assert [rate(7 * epoch) for epoch in range(config.epochs)] == pytest.approx(oracle)
    assert config.epochs == len(oracle)


def test_the_authors_curves_jump_where_the_rate_falls() -> None:
    """In 51 of 54 of their logs the largest gain about the decay is that of epoch 152."""
    logs = published.runs()
    jumps = Counter()
    for _, log in logs[logs["model"] != "lstm"].groupby(["data", "model", "compressor", "level"]):
        gains = log.sort_values("epoch").set_index("epoch")["value"].diff().loc[148:155]
        jumps[gains.idxmax()] += 1
    assert jumps[152] == 51
    assert jumps[151] == 0
    assert sum(jumps.values()) == 54
    assert get_preset("paper-vgg19bn-cifar10").optimizer.decay_epochs[0] == 152


@pytest.mark.parametrize(
    ("name", "windows", "late"),
    [
        ("paper-figure2", [[0, 20], [152, 162]], [[152, 172]]),
        ("paper-text-figure2", [[0, 20], [151, 161]], [[151, 171]]),
    ],
)
def test_hand_made_windows_follow_the_decay(name: str, windows: Any, late: Any) -> None:
    cells = get_grid(name)
    assert cells["low-in-critical"].policy["windows"] == windows
    assert cells["low-late"].policy["windows"] == late


def test_the_paper_by_its_text_differs_in_rates_and_the_lstms_interval_alone() -> None:
    for name in ("resnet18-cifar10", "resnet18-cifar100", "vgg19bn-cifar10", "lstm"):
        ours, theirs = get_preset(f"paper-{name}"), get_preset(f"paper-text-{name}")
        same = replace(theirs, optimizer=ours.optimizer, policy=ours.policy)
        assert same == ours
        assert theirs.optimizer.warmup_hold == 0
        assert theirs.policy["interval"] == 10
        assert ours.policy["interval"] == (5 if name == "lstm" else 10)
    assert get_preset("paper-text-lstm").optimizer.decay_epochs == (61, 81)


@pytest.mark.parametrize(
    ("name", "ranks"), [("small-adaqs", [1, 2, 4]), ("paper-adaqs", [1, 2, 4])]
)
def test_adaqs_halves_the_compression_from_rung_to_rung(name: str, ranks: list[int]) -> None:
    cell = get_grid(name)["adaqs"]
    assert [cell.levels[level] for level in cell.policy["levels"]] == ranks
