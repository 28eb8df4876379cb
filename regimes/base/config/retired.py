"""Fields that have left the configuration.

A file of the version before may hold them, and training is then refused in a sentence that says
what to do. A record that has them stays readable.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Retired:
    """Describes a field without a place in the configuration.

    Attributes:
        since: the version that no longer has it.
        instead: what to do in its place, the end of a sentence.
    """

    since: str
    instead: str


RETIRED: dict[str, Retired] = {  # by dotted path
    "compressor.kernels": Retired("0.5", "leave it out, the numbers are the same without it"),
    "data.rows": Retired("0.5", "pass your own model and data to regimes.simulate"),
    "data.rank": Retired("0.5", "pass your own model and data to regimes.simulate"),
    "churn": Retired("0.5", "leave it out, all workers take part in the whole run"),
    "pruning": Retired("0.5", "leave it out, no weight is pruned while a run trains"),
}
