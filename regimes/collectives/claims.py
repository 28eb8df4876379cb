"""Several groups of one job that want the same thing, such as a record's folder: the groups of a
mesh of data and tensor parallel processes, or of a pipeline's stages."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist

from regimes.collectives.process_group import job_store
from regimes.collectives.processes import ProcessWorld


class Claims:
    """Lets one group of processes claim things that other groups of the job may want too. Claims
    are posted in the store of torch's default group.

    Attributes:
        first: the group's first process, by its rank in the default group.
    """

    def __init__(self, first: int) -> None:
        self.first = first

    @staticmethod
    def of_world(world: ProcessWorld) -> Claims | None:
        """Return the claims of a world's group; None if it is the only group of its job."""
        if world.processes == dist.get_world_size():
            return None
        return Claims(world.everyone.ranks[0])

    def post_claim(self, what: str) -> None:
        """Claim something for this group; see ``list_claimants``."""
        self._claim_store(what).set(str(self.first), "")

    def list_claimants(self, what: str) -> list[int]:
        """Return the first process of each group that claims the thing, this group's included, in
        order. Call it in a backward pass, with ``post_claim`` before the forward pass: groups that
        share a forward pass (a mesh of data and tensor parallel processes) have then all posted
        their claims."""
        store, others = self._claim_store(what), range(dist.get_world_size())
        return sorted({self.first, *(rank for rank in others if store.check([str(rank)]))})

    def take_ownership(self, what: str) -> int:
        """Take the thing for good, unless another group was earlier; return the first process of
        the group that has it."""
        # atomic: of groups that ask at the same time, one gets it
        return int(self._claim_store(what).compare_set("owner", "", str(self.first)))

    def leave_text(self, what: str, key: str, text: str) -> None:
        """Leave a text for the group that owns the thing, which this group claims too."""
        self._claim_store(what).set(f"{key}/{self.first}", text)

    def read_texts(self, what: str, key: str, wait: float = 0.0) -> list[str]:
        """Return what the other groups that claim the thing have left under a key, in order.

        Args:
            wait: seconds for those that have not.
        """
        store, texts = self._claim_store(what), []
        for other in self.list_claimants(what):
            place = [f"{key}/{other}"]
            if other == self.first:
                continue
            if wait and not store.check(place):
                with contextlib.suppress(RuntimeError):  # its time is over
                    store.wait(place, timedelta(seconds=wait))
            if store.check(place):
                texts.append(store.get(place[0]).decode())
        return texts

    @staticmethod
    def _claim_store(what: str) -> dist.Store:
        return job_store(f"claim/{what}")
