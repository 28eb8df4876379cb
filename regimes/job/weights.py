"""The weights that a model has now, beside those that a job was given.

A script may replace them: ``p.data = ...`` gives a parameter another memory, ``load_state_dict(...,
assign=True)`` another object, and ``requires_grad_(True)`` trains one that was frozen. What a job
compares and synchronises are therefore the weights that the module has at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.fingerprint import fingerprint
from regimes.base.torch_compat import parameter_table, place_of
from regimes.collectives.agreement import WeightsReport
from regimes.collectives.sharded_models import (
    all_param_groups,
    local_part,
    optimizer_rows,
)
from regimes.job.fit_state import list_names

HASHED = (2, 4, 8)  # bytes of a number that has a fingerprint


class AttachedWeights:
    """Reads the weights of a job's model, and what has become of its parameters.

    Args:
        network: gives the model.
        parameters: what the job trains, by name.
        ignored: names of parameters that differ between processes on purpose.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        parameters: Mapping[str, Any],
        ignored: Collection[str] = (),
    ) -> None:
        self.network, self.parameters = network, dict(parameters)
        self.ignored = frozenset(ignored)
        self._rows = _divided_rows(network())
        names = {id(p): name for name, p in self._present().items()}
        self.places = [names.get(id(p), name) for name, p in self.parameters.items()]
        # tensor parallelism under DDP takes parameters out of the module
        self._found = [name for name, p in self.parameters.items() if id(p) in names]

    def _present(self) -> dict[str, Any]:
        """The parameters by name; of modules that FSDP2 has divided the rows, also within a pass,
        where they hold gathered weights."""
        found: dict[str, Any] = dict(self.network().named_parameters())
        return found | {name: optimizer_rows(row) for name, row in self._rows.items()}

    def trained(self) -> list[Tensor]:
        """Return what this process has of each trained parameter now.

        Raises:
            ConfigError: one has left the model, or has another shape or type.
        """
        now = self._present()
        tensors = []
        for place, (name, was) in zip(self.places, self.parameters.items(), strict=True):
            p = now.get(place)
            if p is None or (p.shape, p.dtype, p.device) != (was.shape, was.dtype, was.device):
                got = "is no longer in the model" if p is None else f"is {p.dtype} {list(p.shape)}"
                raise ConfigError(
                    f"the parameter {name!r} {got}; it was {was.dtype} {list(was.shape)}: attach "
                    "anew after a change of the model"
                )
            tensors.append(local_part(p).data)
        return tensors

    def read(self, when: str, may_move: bool = False) -> WeightsReport:
        """Return what this process reports of its weights.

        Args:
            when: what has just ended.
            may_move: another object in place of a trained parameter is followed.
        """
        try:
            now = self._present()
        except (ReferenceError, AssertionError):  # the script has deleted its model
            return WeightsReport(when, None)
        known, here = {id(p) for p in self.parameters.values()}, {id(p) for p in now.values()}
        moved = [name for name in self._found if id(self.parameters[name]) not in here]
        added = [
            name
            for name, p in now.items()
            if p.requires_grad and id(p) not in known and name not in {*self.places, *self.ignored}
        ]
        strangers = []
        if moved and not may_move:
            strangers.append(
                f"{list_names(moved)} in the model is another object than the one that was "
                "attached, as after load_state_dict(..., assign=True): its gradient is not "
                "exchanged; load without assign=True, or attach after loading"
            )
        if added:
            strangers.append(
                f"{list_names(added)} is trained, and was not when this job was attached: its "
                "gradient is not exchanged; unfreeze it before attaching, or attach anew"
            )
        parts = [local_part(p) for name, p in now.items() if name not in self.ignored]
        hashed = [part for part in parts if part.element_size() in HASHED]
        return WeightsReport(when, fingerprint(hashed) if hashed else None, strangers)


def _divided_rows(network: nn.Module) -> dict[str, Any]:
    """What FSDP2 keeps of each parameter that it has divided, by the parameter's name."""
    groups = all_param_groups(network)
    if not groups:
        return {}
    names = {
        (id(module), own): f"{path}.{own}" if path else own
        for path, module in network.named_modules()
        for own in parameter_table(module)
    }
    rows = [row for group in groups for row in group.fsdp_params]
    places = [(id(module), own) for module, own in map(place_of, rows)]
    return {names[place]: row for place, row in zip(places, rows, strict=True) if place in names}
