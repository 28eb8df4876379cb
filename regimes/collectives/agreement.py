"""What must be the same on all processes: facts, and weights. Facts that differ are named; of
weights a hash is compared once per unit.

Every process applies the shared updates by itself. A single bit that one computes differently would
stay and grow until its decisions differ, and then its collectives no longer match the others'.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regimes.base.errors import ConfigError, TrainingError

_NAMED = 3  # differences in a sentence; the others are counted
_LONGEST = 60  # letters of a value in a sentence


def digest(facts: Any) -> str:
    """Return the SHA-256 digest of nested plain types, in hexadecimal."""
    return hashlib.sha256(_to_json(facts).encode()).hexdigest()


def describe_difference(everyone: Sequence[Any]) -> str | None:
    """Describe how the first process that differs from process 0 differs; None if all are the same.

    Args:
        everyone: nested plain types, by rank.

    >>> describe_difference([{"seed": 0, "levels": {"low": 4}}, {"seed": 1, "levels": {"low": 4}}])
    'process 1 has seed = 1, process 0 has seed = 0'
    """
    first = dict(_flatten_leaves(everyone[0]))
    for rank, facts in enumerate(everyone):
        other = dict(_flatten_leaves(facts))
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        if names:
            more = len(names) - _NAMED
            verb = "s" if more == 1 else ""
            rest = f"; and {more} other{'s' * (more > 1)} differ{verb}" if more > 0 else ""
            return (
                f"process {rank} has {_format_values(other, names[:_NAMED])}, "
                f"process 0 has {_format_values(first, names[:_NAMED])}{rest}"
            )
    return None


def _format_values(leaves: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(_format_value(name, leaves.get(name)) for name in names)


def _format_value(name: str, value: str | None) -> str:
    if value is None:
        return f"no {name}"
    text = repr(json.loads(value))
    return f"{name} = {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'}"


def _flatten_leaves(facts: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every single value as JSON (in which NaN is equal to itself), by its place."""
    if isinstance(facts, Mapping) and facts:
        pairs = [(str(key), value) for key, value in facts.items()]
    elif isinstance(facts, list | tuple) and facts:
        pairs = [(str(i), value) for i, value in enumerate(facts)]
    else:
        yield name, _to_json(facts)
        return
    for key, value in pairs:
        yield from _flatten_leaves(value, f"{name}.{key}" if name else key)


def _to_json(facts: Any) -> str:
    return json.dumps(facts, sort_keys=True)


# -- weights -----------------------------------------------------------------------------------


AS_TRAINED = (  # what to do about a run of the trainer
    "the record up to there is intact, continue with --resume, on equal processors and with "
    "deterministic = true"
)
AS_ATTACHED = (  # what to do about a job of a user's own loop
    "each process must step the same parameters by the same optimiser, after backward has ended "
    "and on the gradients that were exchanged in it"
)


@dataclass(frozen=True)
class WeightsReport:
    """Holds what a process reports of its weights, to be compared with the other processes'.

    Attributes:
        when: what has just ended, e.g. "unit 3".
        fingerprint: of the weights that the model has now; None where it has none to compare.
        strangers: sentences on parameters that are not those that were attached.
    """

    when: str
    fingerprint: int | None
    strangers: Sequence[str] = ()


def check_weights(own: WeightsReport, everyone: Sequence[Sequence[Any]], shards: int) -> None:
    """Raise an error unless all processes train the same parameters and hold the same weights.

    Args:
        everyone: by rank the fingerprint and the strangers.

    Raises:
        ConfigError: a process trains other parameters than those that were attached.
        TrainingError: replicas hold different weights.
    """
    fingerprints, strangers = zip(*everyone, strict=True)
    for rank, sentences in enumerate(strangers):
        if sentences:
            raise ConfigError(f"process {rank}, at the end of {own.when}: {sentences[0]}")
    if None not in fingerprints:
        check_same_weights(fingerprints, own.when, shards, AS_ATTACHED)


def check_same_weights(
    fingerprints: Sequence[int | None], unit: str, shards: int = 1, advice: str = AS_TRAINED
) -> None:
    """Raise TrainingError unless all processes have the fingerprint of process 0. Where ``shards``
    divide a model, a shard is compared with the same shard of the first replica.

    Args:
        unit: what has just ended, e.g. "epoch 3".
        advice: what to do.
    """
    ranks = enumerate(fingerprints)
    odd = [str(rank) for rank, theirs in ranks if theirs != fingerprints[rank % shards]]
    if odd:
        raise TrainingError(
            f"process {', '.join(odd)} holds other weights than "
            f"{'process 0' if shards == 1 else 'the first replica'} at the end of {unit}: "
            f"the replicas have drifted apart; {advice}"
        )
