"""The pretended GPU itself: what CUDA refuses it refuses, what waits is counted."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pretended
import pytest
import torch
from torch import Tensor, nn

ONES = torch.ones(4)


def there(*size: int) -> Tensor:
    return torch.arange(float(torch.Size(size).numel()), device="cuda").view(size)


REFUSED: dict[str, Callable[[], Any]] = {
    "a sum of two places": lambda: there(4) + ONES,
    "into a tensor of the CPU": lambda: torch.zeros(4).add_(there(4)),
    "into a scalar of the CPU": lambda: torch.zeros(()).add_(there(4)[0]),
    "cat with a scalar's vector": lambda: torch.cat([there(4), ONES]),
    "a matrix product": lambda: there(2, 4) @ ONES,
    "an index of the GPU into the CPU": lambda: ONES[torch.zeros(1, dtype=int, device="cuda")],
    "two GPUs": lambda: there(4) + torch.ones(4, device="cuda:1"),
    "a model elsewhere": lambda: nn.Linear(4, 2)(there(4)),
    "numpy": lambda: there(4).numpy(),
    "a generator of the CPU": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "dropout that cuDNN keeps": lambda: nn.LSTM(2, 2, 2, dropout=0.5).to("cuda")(there(1, 2)),
    "an event without a time": lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
}
WAITS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "float": (lambda x: float(x[0]), 1),
    "bool": (lambda x: bool((x > 2).any()), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "to the CPU": (lambda x: x.to("cpu", torch.float64), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "a mask": (lambda x: x[x > 1], 1),
    "where": (lambda x: torch.where(x > 1, x, 0.0), 0),
    "a mask filled": (lambda x: x.masked_fill_(x > 1, 0.0), 0),
    "equal": (lambda x: torch.equal(x, x), 1),
    "to the GPU": (lambda x: ONES.to(x.device), 1),
    "pageable memory, quickly": (lambda x: ONES.to(x.device, non_blocking=True), 1),
    "pinned memory, quickly": (lambda x: ONES.pin_memory().to(x.device, non_blocking=True), 0),
    "pinned memory": (lambda x: ONES.pin_memory().to(x.device), 1),
    "copy from pageable memory": (lambda x: x.copy_(ONES), 1),
    "copy from the GPU": (lambda x: torch.empty(4).copy_(x), 1),
    "a list": (lambda x: torch.tensor([1.0], device="cuda"), 1),
    "an index of the CPU": (lambda x: x[torch.tensor([0, 1])], 1),
    "made there": (lambda x: torch.zeros(3, device="cuda") + x.new_ones(3), 0),
    "a scalar of the CPU": (lambda x: x * torch.tensor(2.0), 0),
    "a stream": (lambda x: torch.cuda.current_stream().synchronize(), 1),
    "the device": (lambda x: torch.cuda.synchronize(), 1),
    "an event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 1),
    "a question to an event": (lambda x: torch.cuda.current_stream().record_event().query(), 0),
    "a sum": (lambda x: (x.view(2, 2) @ x.view(2, 2)).sum(), 0),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "like it": torch.zeros_like,
    "new": lambda x: x.new_tensor([1.0]),
    "a view": lambda x: x.view(2, 2)[0].mT if x.dim() > 2 else x[1:],
    "deep-copied": copy.deepcopy,
    "another type": lambda x: x.double(),
    "to where another is": lambda x: ONES.to(x),
    "of a module": lambda x: next(nn.Linear(2, 2).to(x.device, torch.float64).parameters()),
    "a gradient": lambda x: torch.autograd.grad((y := x.requires_grad_()).square().sum(), y)[0],
    "a gradient that is none": lambda x: torch.autograd.grad(
        x.sum() * there(1).requires_grad_(),
        [there(3).requires_grad_()],
        allow_unused=True,
        materialize_grads=True,
    )[0],
    "drawn": lambda x: torch.rand(3, device="cuda", generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cuda_refuses(refused: Callable[[], Any]) -> None:
    with pretended.gpu(2), pytest.raises((RuntimeError, TypeError)):
        refused()


@pytest.mark.parametrize(("act", "expected"), WAITS.values(), ids=WAITS)
def test_waits_of_the_host(act: Callable[[Tensor], Any], expected: int) -> None:
    with pretended.gpu() as diary:
        x = there(4)
        diary.clear()
        act(x)
        assert diary.waits.total() == expected, diary.waits


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_where_tensors_are_made(make: Callable[[Tensor], Tensor]) -> None:
    with pretended.gpu():
        made = make(there(4))
        assert made.device == pretended.GPU
        assert made.is_cuda
        assert not made.is_cpu
        assert made.cpu().device == pretended.CPU
        assert not torch.zeros(3).is_cuda
    assert made.device == pretended.CPU  # nothing stays pretended


def test_launches_are_counted_and_views_are_none() -> None:
    with pretended.gpu() as diary:
        x = there(4)
        diary.clear()
        y = x.view(2, 2).t()[0].detach()
        assert diary.ops.total() == 0
        (y + 1).mul_(2).sum()
        assert diary.ops == {"add": 1, "mul_": 1, "sum": 1}
        diary.clear()
        ONES.add(1).sum()
        assert diary.ops.total() == 0  # of the CPU's


def test_backward_is_counted_in_a_thread_and_a_stream() -> None:
    with pretended.gpu() as diary:
        x = there(4).requires_grad_()
        side, seen = torch.cuda.Stream(), []

        def hook(gradient: Tensor) -> None:
            where = threading.get_ident(), torch.cuda.current_stream()
            seen.append((*where, gradient.device, torch.ones(2, device="cuda").device))

        x.register_hook(hook)
        with torch.cuda.stream(side):
            loss = x.square().sum()
            diary.clear()
            loss.backward()
        thread, stream, *devices = seen[0]
        assert thread != threading.get_ident()
        assert stream is side
        assert devices == [pretended.GPU] * 2
        assert diary.ops["mul"] == 2  # of pow's derivative
        assert torch.cuda.current_stream() is not side


def test_events_measure_time_and_streams_keep_a_diary() -> None:
    with pretended.gpu() as diary:
        side, first, last = torch.cuda.Stream(), *(torch.cuda.Event(True) for _ in range(2))
        first.record()
        last.record(side)
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(last)
        assert first.elapsed_time(last) >= 0
        assert diary.streams == [
            "event of main",
            "event of side",
            "side waits for main",
            "main waits for an event",
        ]
