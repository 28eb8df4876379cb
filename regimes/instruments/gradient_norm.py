"""Per-layer norm of the gradient accumulated over an epoch: ACCORDION's signal (section 4.2).
Four readings of it, each one addition per step:

- ``update``: the aggregated updates, which every worker has already; nothing to send.
- ``global``: the worker-mean gradients before compression; one dense mean per epoch.
- ``local-mean``: root mean square over workers of their own accumulated gradients' norms.
- ``worker0``: worker 0's own (the authors' code).

The last two need each worker's own gradient and so rule out the union pass, one backward pass for
all hosted workers (``training.gradients``). Two more readings are of
the optimiser's steps, which differ from the gradients with AdamW or Muon:

- ``movement``: the parameters' movement over the unit, without decoupled weight decay.
- ``movement/lr``: the same over the sum of the steps' learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.base.capabilities import (
    OPTIMIZER_STEPS,
    OWN_COLLECTIVES,
    WORKER_GRADIENTS,
)
from regimes.base.config import Signal
from regimes.base.torch_compat import foreach_add_, foreach_norm, foreach_sub
from regimes.collectives.comm import signals
from regimes.instruments.base import (
    MeasurementContext,
    Reading,
    StatelessGauge,
    add_sums,
    divide_or_nan,
)

PER_WORKER = ("local-mean", "worker0")
OF_GRADIENTS: tuple[Signal, ...] = ("update", "global", "local-mean", "worker0")
OF_STEPS: tuple[Signal, ...] = ("movement", "movement/lr")
ALL = (*OF_GRADIENTS, *OF_STEPS)
REQUIRES: Mapping[Signal, frozenset[str]] = {  # what each needs of a job (``capabilities``)
    "update": frozenset(),
    "global": frozenset({OWN_COLLECTIVES}),
    "local-mean": frozenset({OWN_COLLECTIVES, WORKER_GRADIENTS}),
    "worker0": frozenset({OWN_COLLECTIVES, WORKER_GRADIENTS}),
    "movement": frozenset({OPTIMIZER_STEPS}),
    "movement/lr": frozenset({OPTIMIZER_STEPS}),
}


@dataclass(frozen=True)
class Norms:
    """Records norms of gradients, besides the one that the run's ``signal`` names.

    Attributes:
        readings: The signals whose norms are recorded.
    """

    readings: tuple[Signal, ...] = OF_GRADIENTS
    every: int = field(default=1, init=False)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset().union(*(REQUIRES[reading] for reading in self.readings))

    def start(self, context: MeasurementContext) -> NormsGauge:
        return NormsGauge(self.readings, context)


class NormsGauge(StatelessGauge):
    """Adds up gradients during an epoch, and takes their norms at its end."""

    def __init__(self, readings: Iterable[Signal], context: MeasurementContext) -> None:
        self.readings = sorted(set(readings), key=ALL.index)
        self.world = context.world
        self.sizes = [layer.size for layer in context.world.local_layers(context.layers)]
        self.sums: dict[str, list[Tensor]] = {}
        self._room: dict[str, list[Tensor]] = {}  # the memory of the sums before the last step
        self.movement: Movement | None = None
        if not {*OF_STEPS}.isdisjoint(self.readings):
            assert context.optimizer is not None  # OPTIMIZER_STEPS
            self.movement = Movement(context.optimizer, context.parameters)

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        if "update" in self.readings:
            self._add("update", list(updates))
        if "global" in self.readings:
            self._add("global", [stack[0] if len(stack) == 1 else stack.mean(0)])
        if "local-mean" in self.readings:
            self._add("workers", [stack])
        elif "worker0" in self.readings and 0 in self.world.hosted:
            self._add("workers", [stack[:1]])
        if self.movement is not None:
            self.movement.step()

    def _add(self, name: str, tensors: list[Tensor]) -> None:
        if name not in self.sums:
            self.sums = {**self.sums, name: [t.clone() for t in tensors]}
        elif self.reversible:
            sums = self.sums[name]
            self.sums = {**self.sums, name: add_sums(sums, tensors, self._room.get(name, []))}
            self._room = {**self._room, name: sums}
        else:
            foreach_add_(self.sums[name], tensors)

    def revert(self, before: Mapping[str, list[Tensor]], layers: Collection[int]) -> None:
        """Take the last step back for some layers; ``before`` has the sums before it."""
        if "update" in self.sums:
            now = enumerate(self.sums["update"])
            old = before.get("update") or [torch.zeros_like(t) for t in self.sums["update"]]
            sums = [old[i] if i in layers else total for i, total in now]
            self.sums, self._room = {**self.sums, "update": sums}, {}

    def read(self, epoch: int) -> Reading:
        """Return ``norm:<reading>`` per layer."""
        norms = {} if self.movement is None else self.movement.read()
        norms |= {name: self._norms(name).tolist() for name in self.readings if name not in norms}
        self.sums, self._room = {}, {}
        return Reading(layers={f"norm:{name}": norms[name] for name in self.readings})

    def _norms(self, reading: str) -> Float[Tensor, " layers"]:
        if reading == "update":
            return self._of_whole(torch.stack(foreach_norm(self.sums["update"])))
        if reading == "global":
            (total,) = self.sums["global"]
            means = self._means(total[None].split(self.sizes, 1))
            return self._of_whole(torch.stack(foreach_norm(means)))
        if reading == "local-mean":
            columns = self._squares().T
            if self.world.shards == 1:
                return torch.stack(self._means(columns)).sqrt()
            # of whole layers: a worker that is divided among processes sends each once
            comm = signals(self.world, range(len(columns)))
            sums = comm.mean_of_sums([column[:, None] for column in columns])
            return torch.stack([total[0] for total in sums]).sqrt()
        device = getattr(self.world, "device", torch.device("cpu"))
        # Only one process hosts worker 0; all take part in the broadcast.
        own = torch.zeros(len(self.sizes), dtype=self.world.meter.dtype, device=device)
        if 0 in self.world.hosted:
            own.copy_(self._of_whole(self._squares()[0].sqrt()))
        self.world.broadcast([own])
        return own

    def _of_whole(self, norms: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """Norms of whole layers, from the norms of their shards."""
        return self.world.whole_norms(norms)

    def _means(self, parts: Iterable[Float[Tensor, "rows ..."]]) -> list[Tensor]:
        """Over all workers, of one part per layer; the bytes are counted for that layer."""
        parts = [*parts]
        return signals(self.world, range(len(parts))).mean(parts)

    def _squares(self) -> Float[Tensor, "rows layers"]:
        (stack,) = self.sums["workers"]
        return torch.stack([x.square().sum(1) for x in stack.split(self.sizes, dim=1)], dim=1)


class Movement:
    """Adds up the movement of each layer's parameters over a unit, without decoupled weight decay:
    the sum over steps of ``theta_(t+1) - theta_t + lr_t * decay * theta_t``."""

    def __init__(
        self,
        optimizer: Callable[[], tuple[float, Sequence[float]]],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        self.start: list[Tensor] = []
        self.rates = 0.0

    def step(self) -> None:
        """Keep the parameters at the start of the unit, and add up the weight decay that the step
        will apply; it is called before each step of the optimiser."""
        lr, decays = self.optimizer()
        now = [p.detach() for p in self.parameters]
        if not self.start:
            self.start = [p.clone() for p in now]
            self.decayed = {i: torch.zeros_like(now[i]) for i, decay in enumerate(decays) if decay}
        for i, decayed in self.decayed.items():
            decayed.add_(now[i], alpha=lr * decays[i])
        self.rates += lr

    def read(self) -> dict[str, list[float]]:
        """Return both readings per layer; the next unit begins."""
        moved = list(foreach_sub([p.detach() for p in self.parameters], self.start))
        for i, decayed in self.decayed.items():
            moved[i] += decayed
        norms = torch.stack(foreach_norm(moved)).tolist()
        rates, self.start, self.rates = self.rates, [], 0.0
        return {"movement": norms, "movement/lr": [divide_or_nan(norm, rates) for norm in norms]}
