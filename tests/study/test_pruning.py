"""A pruning event: what is pruned, by hand; that it stays so, in a run, resumed, over processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from configs import smoke as config
from runs import resumed_alike, same_run, weights
from torch import nn

import regimes
from analysis.plugins.pruning import Masks, Pruning
from regimes.collectives.requests import Layer
from regimes.config import override
from regimes.errors import ConfigError
from regimes.records import read_lines
from regimes.training import build

EVENT = "pruning={epoch=2,share=0.8}"


def two_layers(table: Pruning) -> tuple[Masks, nn.Parameter, nn.Parameter, nn.Parameter]:
    """Two matrices and a vector, of weights that are known."""
    first = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, -4.0]]))
    second = nn.Parameter(torch.tensor([[-0.5, 0.1], [5.0, -6.0]]))
    vector = nn.Parameter(torch.tensor([0.01, 0.02]))
    named = {"first": first, "second": second, "vector": vector}
    layers = [Layer(name, tuple(p.shape)) for name, p in named.items()]
    return masks(table, layers, named.values()), first, second, vector


def masks(table: Pruning, layers: list[Layer], parameters: Iterable[nn.Parameter]) -> Masks:
    job: Any = SimpleNamespace(layers=layers, parameters=list(parameters))
    return table.start(job)


def test_the_smallest_half_of_both_matrices_by_hand() -> None:
    """0.1, 0.5, 1 and 2; a vector is not pruned, however small."""
    pruning, first, second, vector = two_layers(Pruning(epoch=3, share=0.5))
    for epoch in (0, 2, 4):
        pruning.before_unit(epoch)
        assert not pruning.masks
    pruning.before_unit(3)
    assert first.tolist() == [[0.0, 0.0], [3.0, -4.0]]
    assert second.tolist() == [[0.0, 0.0], [5.0, -6.0]]
    assert vector.tolist() == pytest.approx([0.01, 0.02])


def test_what_is_pruned_has_no_gradient_and_comes_not_back() -> None:
    pruning, first, second, vector = two_layers(Pruning(epoch=0, share=0.5))
    loss = (first.sum() + second.sum() + vector.sum()) * 7
    pruning.before_unit(0)
    loss.backward()
    assert [p.grad.tolist() for p in (first, second, vector) if p.grad is not None] == [
        [[0, 0], [7, 7]],
        [[0, 0], [7, 7]],
        [7, 7],
    ]
    with torch.no_grad():
        for p in (first, second, vector):
            p += 1  # momentum, or what error feedback still owed
    pruning.after_step()
    assert first.tolist() == [[0, 0], [4, -3]]
    assert second.tolist() == [[0, 0], [6, -5]]


def test_weights_of_equal_size_are_pruned_in_their_order() -> None:
    p = nn.Parameter(torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    pruning = masks(Pruning(0, 0.5), [Layer("one", (2, 2))], [p])
    pruning.before_unit(0)
    assert p.tolist() == [[0, 0], [1, -1]]


def pruned(folder: Path) -> dict[str, torch.Tensor]:
    """Which weights of the matrices are zero."""
    return {n: w == 0 for n, w in weights(folder).items() if w.is_floating_point() and w.dim() > 1}


def share(zeros: dict[str, torch.Tensor]) -> float:
    return sum(int(z.sum()) for z in zeros.values()) / sum(z.numel() for z in zeros.values())


def test_a_run_is_what_it_was_before_the_event_and_is_pruned_from_there_on(tmp_path: Path) -> None:
    c = config(EVENT, "policy=static", "policy.level=high", epochs=5)
    for epochs in (2, 3, 5):
        regimes.run(
            replace(c, epochs=epochs) if epochs > 2 else replace(c, epochs=2, interventions={}),
            tmp_path / str(epochs),
        )
    regimes.run(replace(c, interventions={}), tmp_path / "never")
    rows, plain = (read_lines(tmp_path / n / "epochs.jsonl") for n in ("5", "never"))
    assert rows[:2] == plain[:2]
    assert rows[2]["train_loss"] != plain[2]["train_loss"]
    assert share(pruned(tmp_path / "2")) == share(pruned(tmp_path / "never")) == 0
    after, end = pruned(tmp_path / "3"), pruned(tmp_path / "5")
    assert share(end) == pytest.approx(0.8, abs=1e-4)
    assert all(torch.equal(zeros, after[name]) for name, zeros in end.items())


@pytest.mark.parametrize("stop", [2, 4])
def test_resumed_before_and_after_the_event(stop: int, tmp_path: Path) -> None:
    c = config(EVENT, "dtype=float32", epochs=5)
    resumed_alike(c, tmp_path, stop)


@pytest.mark.slow
def test_processes_equal_simulation(tmp_path: Path) -> None:
    c = config(EVENT)
    regimes.run(c, tmp_path / "1x4")
    forked.train(replace(c, bucket_mb=0.02), tmp_path / "2x2", 2)  # reduced during backward
    same_run(tmp_path / "1x4", tmp_path / "2x2")
    assert share(pruned(tmp_path / "2x2")) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["pruning.epoch=24"], "pruning.epoch = 24: expected one of the run's 24 units"),
        (["pruning.unit=3"], "unknown key 'pruning.unit'"),
    ],
)
def test_what_is_off_is_said_in_one_sentence(
    settings: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        regimes.run(override(regimes.get_preset("smoke"), settings), tmp_path / "run")
    assert sentence in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_matrices_is_refused() -> None:
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="no layer that is compressed"):
        masks(Pruning(), [Layer("scale", (3,))], [vector])


def test_nothing_is_pruned_by_default() -> None:
    assert not build.prepare_run(config()).interventions
