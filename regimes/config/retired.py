"""Fields that have left the configuration.

A record or a file of an earlier version may hold them. With the value that a field had by default,
it says nothing that its absence does not say, and it is read without a word. With another value
the record stays readable, and training is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from regimes.errors import ConfigError


@dataclass(frozen=True)
class Retired:
    """A field without a place in the configuration.

    Attributes:
        since: the version that no longer has it.
        instead: what to do in its place, the end of a sentence.
        default: the value that it had unless one was given; None: none.
    """

    since: str
    instead: str
    default: Any = None


RETIRED: dict[str, Retired] = {  # by dotted path
    "vmap": Retired(
        "0.4",
        "leave it out, workers are computed one after the other, or in parallel with --processes",
        default=False,
    ),
    "model.positions": Retired(
        "0.4",
        "name a function of your own as model.name, which returns regimes.models.GPT(..., "
        'positions="learned")',
    ),
    "optimizer.cycle_factor": Retired(
        "0.4",
        "set optimizer.cycle_epochs, the length of all cycles, or the rate in a training loop of "
        "your own (regimes.attach)",
        default=1,
    ),
    "optimizer.decay_vectors": Retired(
        "0.4",
        "name a class of your own as optimizer.name, which sets the weight_decay of each of its "
        'parameter groups; "torch.optim:SGD" has none for 1-D parameters',
    ),
    "compressor.kernels": Retired("0.5", "leave it out, the numbers are the same without it"),
    "data.rows": Retired("0.5", "pass your own model and data to regimes.simulate"),
    "data.rank": Retired("0.5", "pass your own model and data to regimes.simulate"),
    "churn": Retired("0.5", "leave it out, all workers take part in the whole run"),
    "pruning": Retired("0.5", "leave it out, no weight is pruned while a run trains"),
}


def without_retired(
    values: Mapping[str, Any], where: str = "", own: Collection[str] = ()
) -> dict[str, Any]:
    """A table without its retired fields.

    Args:
        where: the dotted path of the table, with a dot at its end.
        own: fields that its class has; a user's class may have one of a retired field's name.

    Raises:
        ConfigError: one has another value than its default.
    """
    kept = {}
    for key, value in values.items():
        field = None if key in own else RETIRED.get(where + key)
        if field is None:
            kept[key] = value
        elif type(value) is not type(field.default) or value != field.default:
            raise ConfigError(
                f"{where}{key} = {value!r}: the field was retired in version {field.since}; "
                f"{field.instead}"
            )
    return kept


def with_retired(config: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration as an earlier version wrote it: with the defaults of retired fields, in
    those of its tables that it has."""
    whole = dict(config)
    for path, field in RETIRED.items():
        table, dot, key = path.rpartition(".")
        if field.default is None:  # was left out, too
            continue
        if not dot:
            whole.setdefault(key, field.default)
        elif isinstance(whole.get(table), Mapping):
            whole[table] = {key: field.default} | whole[table]
    return whole
