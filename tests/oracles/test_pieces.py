"""Several parameters in a row, quantised: each as if it were alone, 1-D parameters to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regimes.collectives.layers import Layer, Piece
from regimes.compression.all_reduce import dequantise_rows, quantise_rows, wire_bytes
from regimes.compression.pieces import Pieces
from regimes.compression.scatter import QuantisedScatter

ROWS = 3
SIZES = [(70, True), (5, False), (16, True), (1, True), (0, False), (33, True), (64, False)]
ORDERS = {  # of pieces in a row
    "mixed": SIZES,
    "vectors first": sorted(SIZES),
    "matrices alone": [piece for piece in SIZES if piece[1]],
    "whole blocks": [(64, True), (128, True)],
    "vectors alone": [(5, False), (64, False)],
    "one": [(100, True)],
}
KINDS = [torch.float32, torch.float64, torch.bfloat16]


def numbers(pieces: list[Piece], kind: torch.dtype) -> Tensor:
    """Each parameter a hundred times larger than the one before it."""
    generator = torch.Generator().manual_seed(1)
    parts = [
        torch.randn(ROWS, piece.size, generator=generator, dtype=torch.float64) * 100.0**i
        for i, piece in enumerate(pieces)
    ]
    return torch.cat(parts, dim=1).to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [64, 16, 5, 1, 1000])
@pytest.mark.parametrize("order", ORDERS)
def test_each_parameter_is_quantised_as_if_it_were_alone(
    order: str, block: int, bits: int, kind: torch.dtype
) -> None:
    pieces = [Piece(*piece) for piece in ORDERS[order]]
    ours, given = Pieces(pieces, bits, block, kind), numbers(pieces, kind)
    exact = torch.promote_types(kind, torch.float32)
    left = torch.empty_like(given, dtype=exact)
    wire = ours.encode(given.to(exact), 0.5, left)
    assert wire.shape == (ROWS, ours.bytes)
    assert torch.equal(ours.encode(given.to(exact), 0.5), wire)
    found, sent = ours.decode(wire, exact), 0
    assert torch.equal(ours.sum(wire[None], exact)[0], (found[0] + found[1]) + found[2])
    assert torch.equal(left, given.to(exact) - found)
    for piece, own, ours_here in zip(
        pieces,
        given.split([piece.size for piece in pieces], dim=1),
        found.split([piece.size for piece in pieces], dim=1),
        strict=True,
    ):
        packed, plain = wire_bytes(piece.size, bits, block, exact.itemsize), own[0].nbytes
        sent += min(packed, plain) if piece.compressed else plain
        if not piece.compressed or packed >= plain:
            assert torch.equal(ours_here, own.to(exact))
            continue
        alone = quantise_rows(own.to(exact), bits, block, 0.5)
        assert torch.equal(ours_here, dequantise_rows(alone, bits, block, piece.size, exact))
    assert sent == ours.bytes <= given[0].nbytes


@pytest.mark.parametrize("residual_bits", [None, 16, 8])
def test_what_is_owed_is_kept_by_parameter(residual_bits: int | None) -> None:
    pieces = tuple(Piece(*piece) for piece in SIZES)
    size = sum(piece.size for piece in pieces)
    made = QuantisedScatter(stochastic=False, error_feedback=True, residual_bits=residual_bits)
    layer = Layer("module", (ROWS, size), pieces=pieces)
    owed = numbers([*pieces], torch.float32)[None]
    kept = made.stored(owed, pieces)
    assert tuple(kept.shape[1:]) == made.residual_shape(layer)
    bound = {None: 0.0, 16: 2.0**-8, 8: 1 / 254}[residual_bits]
    found = made.numbers(kept, layer).float()
    for piece, ours, right in zip(
        pieces, *(x.split([p.size for p in pieces], dim=2) for x in (found, owed)), strict=True
    ):
        if piece.size:
            assert (ours - right).abs().max() <= bound * right.abs().max() * (1 + 1e-6), piece
