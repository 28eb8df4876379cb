"""The evaluation, shared out: the numbers of one process, which are those of a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke as config
from ddp_scripts import group
from torch import nn
from torch.nn import functional as F

import regimes
from regimes.base.config import RunConfig, override
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import Evaluators
from regimes.data import images, load_task, task
from regimes.data.classification import ImageTask
from regimes.data.language import NextWord

CPU = torch.device("cpu")
TEXT = [
    "data.name=stdlib",
    "data.train_size=2000",
    "data.test_size=4000",
    "data.sequence=16",
    'model={name="gpt",width=16,depth=1,heads=2}',
]
CASES = {
    "images": ["data.test_size=400", "data.validation_size=100"],
    "windows": [*TEXT, "data.windows=contiguous"],
    "streams": [*TEXT, "data.windows=streams", 'model={name="lstm",width=8,depth=1}'],
}


def case(name: str, batch: int) -> tuple[Any, nn.Module, Callable[[], tuple[Any, Any]]]:
    """(task, model, its evaluation by a plain loop that reads each batch's loss) in float32."""
    c = override(RunConfig(), ["model.width=4", "workers=4", *CASES[name]])
    made: Any = load_task(c)
    model = made.build(c).eval()
    if name == "images":
        return made, model, lambda: _images(made, model, batch)
    return made, model, lambda: _text(made, model)


@torch.no_grad()
def _images(made: Any, model: nn.Module, batch: int) -> tuple[float, float]:
    loss = correct = count = 0.0
    for x, y in images.evaluation_batches(made.images, batch):
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
        count += len(y)
    return loss / count, correct / count


@torch.no_grad()
def _text(made: Any, model: nn.Module) -> tuple[float, float]:
    total, count, size, hidden = 0.0, 0, 0, None
    for _, (inputs, targets) in made._own_batches(made.corpus.test, task.ALONE):
        carried = hidden if made.layout == "streams" else None
        loss, hidden = NextWord().carry(model, inputs, targets, carried)
        total += loss.item() * targets.numel()
        count += targets.numel()
        size += int(made.corpus.lengths[targets].sum())
    return total / count, total / math.log(2) / size


def evaluated(rank: int, name: str) -> list[float]:
    """Of the test set in one of several processes, in small batches."""
    patch = pytest.MonkeyPatch()
    _smaller(patch)
    made, model, _ = case(name, 50)
    return [*made.evaluate(model, CPU, torch.float32, ProcessWorld(4, CPU).evaluators)]


def _smaller(patch: pytest.MonkeyPatch) -> None:
    whole = images.evaluation_batches
    patch.setattr(images, "evaluation_batches", lambda x, _, *rest: whole(x, 50, *rest))
    patch.setattr("regimes.data.language.MAX_LOGITS", 2**16)  # 16 windows


def test_each_number_of_processes_gives_the_bits_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _smaller(monkeypatch)
    answers = group.run_in_turn(2, *((evaluated, name) for name in CASES))
    for name, found in zip(CASES, answers, strict=True):
        made, model, plain = case(name, 50)
        expected = plain()
        assert made.evaluate(model, CPU, torch.float32) == expected, name
        assert found == [list(expected)] * 2, name


def test_sums_are_taken_in_the_order_of_the_batches() -> None:
    """Where the order decides the bits; one process may have no batch at all."""
    values = [1e16, 1.0, 1.0, -1e16, 3.0]
    numbers = [torch.tensor([v, 1.0], dtype=torch.float64) for v in values]
    expected = 0.0
    for value in values:
        expected += value
    for count in (1, 2, 3, 7):
        parts = [dict(list(enumerate(numbers))[rank::count]) for rank in range(count)]
        told = [[(i, n.tolist()) for i, n in part.items()] for part in parts]
        evaluators = Evaluators(count, count - 1, lambda mine, told=told: told)
        assert task.sum_over_processes(evaluators, parts[-1]) == [expected, 5.0]


@pytest.mark.parametrize("name", ["images", "windows"])
def test_what_is_tested_on_is_moved_and_stays(name: str) -> None:
    made, model, _ = case(name, 50)
    data = "images" if name == "images" else "corpus"
    before = getattr(made, data)
    there = before.with_test_on(torch.device("meta"))
    parts = (
        [there.test_x, there.test_y, *there.validation]
        if name == "images"
        else [there.test, there.lengths]
    )
    assert {part.device.type for part in parts} == {"meta"}
    assert (there.train_x if name == "images" else there.train).device == CPU
    made.evaluate(model, CPU, torch.float32)
    assert getattr(made, data) is not before  # kept for the next one


def test_a_run_shares_its_evaluations_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = []
    for name in ("evaluate", "validate"):
        original = getattr(ImageTask, name)

        def seen(*arguments: Any, original: Any = original) -> Any:
            last.append(arguments[-1])
            return original(*arguments)

        monkeypatch.setattr(ImageTask, name, seen)
    c = config("data.validation_size=100", "policy=static", epochs=1)
    regimes.run(c, tmp_path / "run")
    assert [isinstance(given, Evaluators) for given in last] == [True, True]
