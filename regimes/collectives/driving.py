"""Runs programs (``requests``) to their end: in lockstep, or one after the other.

In lockstep each round joins the requests of one kind of all programs, which then travel as one
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from regimes.collectives.requests import (
    Batched,
    Collective,
    Exchange,
    Gather,
    JoinShards,
    Mean,
    Program,
    Scatter,
    SumShards,
)

KIND = {
    Mean: "mean",
    Gather: "gather",
    Exchange: "exchange",
    Scatter: "scatter",
    SumShards: "sum",
    JoinShards: "join",
}
_Answer = Callable[[str, Sequence[Any]], Sequence[Tensor]]  # a kind and its requests: their answers
_Count = Callable[[int, Collective, int], str]  # a program's request in a round: its kind


def run_in_lockstep(
    programs: Sequence[Program | Mean], answer: _Answer, count: _Count, batched: bool
) -> list[Any]:
    """The results of programs that run round by round.

    Args:
        batched: join ``Batched`` requests.
    """
    results: list[Any] = [None] * len(programs)
    plain = {i: x for i, x in enumerate(programs) if isinstance(x, Mean)}
    running = {i: x for i, x in enumerate(programs) if not isinstance(x, Mean)}
    answers: dict[int, Any] = dict.fromkeys(running)
    turn = 0
    while answers or plain:
        waiting: dict[str, dict[int, Any]] = {kind: {} for kind in KIND.values()}
        asked = {**plain, **_advance_programs(running, answers, results, batched)}
        for i in sorted(asked):  # by program, the same order on all processes
            waiting[count(i, asked[i], turn)][i] = asked[i]
        answers = {}
        for kind, alike in waiting.items():  # in one order, which must be that of all processes
            if alike:
                answers.update(zip(alike, answer(kind, [*alike.values()]), strict=True))
        for i in plain:
            results[i] = answers.pop(i)
        plain, turn = {}, turn + 1
    return results


def run_one_by_one(programs: Sequence[Program | Mean], answer: _Answer, count: _Count) -> list[Any]:
    """The results of programs that run one after the other; plain means are taken together."""
    means = {i: program for i, program in enumerate(programs) if isinstance(program, Mean)}
    for i, mean in means.items():
        count(i, mean, 0)
    answers = iter(answer("mean", [*means.values()]))
    return [
        next(answers) if isinstance(program, Mean) else _run_one(i, program, answer, count)
        for i, program in enumerate(programs)
    ]


def _run_one(i: int, program: Program, answer: _Answer, count: _Count) -> Any:
    """Run a single program: the bookkeeping for several would take twice as long."""
    turn, answered = 0, None
    while True:
        try:
            request = _next_collective(program, answered)
        except StopIteration as stop:
            return stop.value
        answered = answer(count(i, request, turn), [request])[0]
        turn += 1


def _advance_programs(
    programs: Mapping[int, Program], answers: dict[int, Any], results: list[Any], batched: bool
) -> dict[int, Collective]:
    """Run programs until each asks for a collective, or ends and leaves its result."""
    requests: dict[int, Collective] = {}
    while answers:
        calls: dict[Any, dict[int, tuple[Any, ...]]] = {}  # by kernel: the arguments by program
        for i in sorted(answers):
            program, answer = programs[i], answers[i]
            try:
                request = program.send(answer) if batched else _next_collective(program, answer)
            except StopIteration as stop:
                results[i] = stop.value
                continue
            if isinstance(request, Batched):
                calls.setdefault(request.kernel, {})[i] = request.arguments
            else:
                requests[i] = request
        answers = {}
        for kernel, arguments in calls.items():
            answers.update(zip(arguments, kernel(list(arguments.values())), strict=True))
    return requests


def _next_collective(program: Program, answer: Any) -> Collective:
    """Run a program, its ``Batched`` work included, until it asks for a collective.

    Raises:
        StopIteration: it has ended; ``value`` is its result.
    """
    request = program.send(answer)
    while isinstance(request, Batched):
        request = program.send(request.kernel([request.arguments])[0])
    return request
