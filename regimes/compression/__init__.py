"""Compressors: how the gradients of workers become one shared update, a file per family.

``base`` has the contract, ``exchange`` puts gradients into buckets, ``reducer`` plans a bucket.
This room uses collectives and base; training, job and hook use it.
"""

from regimes.base.config import Registry
from regimes.compression.base import Compressor
from regimes.compression.bucket import State

REGISTRY = Registry(
    "compressor",
    {
        "dense": "regimes.compression.elementwise:Dense",
        "powersgd": "regimes.compression.powersgd:PowerSGD",
        "acp-sgd": "regimes.compression.powersgd:ACPSGD",
        "topk": "regimes.compression.sparse:TopK",
        "randomk": "regimes.compression.sparse:RandomK",
        "chunked-topk": "regimes.compression.chunked:ChunkedTopK",
        "sign": "regimes.compression.elementwise:Sign",
        "quantise": "regimes.compression.elementwise:Quantise",
        "quantised-all-reduce": "regimes.compression.all_reduce:QuantisedAllReduce",
        "cast": "regimes.compression.elementwise:Cast",
    },
    has=("linear", "check", "exchange", "cost"),
)


def make_compressor(table: dict) -> Compressor:
    """Make the compressor that a configuration table names. Raise ConfigError if the table names
    none."""
    return REGISTRY.make(table)


__all__ = ["REGISTRY", "Compressor", "State", "make_compressor"]
