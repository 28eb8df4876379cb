"""What compressors need of a job (`capabilities`)."""

from __future__ import annotations

from collections.abc import Iterator

from regimes.base.capabilities import GRADIENT_UNIT, LEARNING_RATE, Part, declared_needs
from regimes.compression import REGISTRY, Compressor, make_compressor


def compressor_parts(chosen: Compressor) -> Iterator[Part]:
    """Yield the compressor as a part of a job, and before it the unit of its residual if that is
    another than usual."""
    needs, name = declared_needs(chosen), REGISTRY.table(chosen)["name"]
    if chosen.residual != type(chosen).residual:
        of_residual = needs & {GRADIENT_UNIT, LEARNING_RATE}
        usual = repr(type(chosen).residual)
        yield Part("compressor.residual", of_residual, chosen.residual, usual)
        needs -= of_residual
    yield Part("compressor", needs, name, "another one", compressor_needs)


def compressor_needs() -> dict[str, frozenset[str]]:
    """Return what each registered compressor needs of a job, by name."""
    return {name: declared_needs(make_compressor({"name": name})) for name in REGISTRY}
