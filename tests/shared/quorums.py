"""A quorum whose replicas are threads of this process, without torchft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DONE = SimpleNamespace(wait=lambda: None)


class Group:
    """The group of a quorum, as one replica has it.

    Attributes:
        shared: of all replicas: what was sent in each round, by rank.
    """

    def __init__(self, count: int, rank: int, shared: SimpleNamespace) -> None:
        self.count, self.rank, self.shared, self.round = count, rank, shared, 0
        self.parent = self  # as of torchft's group

    def swap(self, value: Any) -> list[Any]:
        """What all have sent in this round, which a later abort leaves whole."""
        shared, self.round = self.shared, self.round + 1
        with shared.condition:
            sent = shared.rounds.setdefault(self.round, {})
            sent[self.rank] = value
            shared.condition.notify_all()
            shared.condition.wait_for(lambda: len(sent) == self.count or shared.aborted)
            if len(sent) < self.count:
                raise RuntimeError("Connection closed by peer")
            return [sent[i] for i in range(self.count)]

    def allgather(self, rows: list[list[Tensor]], own: list[Tensor], _: Any) -> Any:
        for row, value in zip(rows[0], self.swap(own[0].clone()), strict=True):
            row.copy_(value)
        return DONE

    def allreduce(self, own: list[Tensor], _: Any) -> Any:
        own[0].copy_(torch.stack(self.swap(own[0].clone())).sum(0))
        return DONE

    def alltoall_base(self, out: Tensor, own: Tensor, *sizes: Any) -> Any:
        sent = self.swap(own.clone().split(sizes[1]))
        parts = [part[self.rank] for part in sent if len(part) > self.rank]
        out.copy_(torch.cat(parts))
        return DONE

    def abort(self) -> None:
        with self.shared.condition:
            self.shared.aborted = True
            self.shared.condition.notify_all()


class Manager:
    """What a world reads of a manager, and its group."""

    def __init__(self, count: int, rank: int) -> None:
        self.count, self.rank, self.error = count, rank, None
        self.group: Any = SimpleNamespace(getBackendName=lambda: "gloo")

    def start_quorum(self) -> None: ...
    def should_commit(self) -> None: ...

    def num_participants(self) -> int:
        return self.count

    def participating_rank(self) -> int:
        return self.rank

    def is_participating(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def report_error(self, error: Exception) -> None:
        self.error = SimpleNamespace(original_exception=error)

    def errored(self) -> Any:
        return self.error
