"""Several layers in one layout: nothing is lost or moved, whatever the sizes, owners and blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from regimes.base.seeding import draw_uniform
from regimes.compression.all_reduce import quantise_rows, wire_bytes
from regimes.compression.codes import weighted_sums
from regimes.compression.kernel_layout import Layout, PlacedRows, UniformNoise

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@given(
    sizes=SIZES, owners=st.integers(1, 4), block=st.integers(1, 20), bits=st.sampled_from([4, 8])
)
def test_layers_come_back_and_only_they_travel(
    sizes: list[int], owners: int, block: int, bits: int
) -> None:
    plan, generator = Layout(sizes, owners, block), torch.Generator().manual_seed(sizes[0])
    layers = [torch.randn(2, size, generator=generator) for size in sizes]
    values = torch.full((2, owners, plan.width), torch.nan)
    plan.spread(layers, values)
    assert values.isfinite().all()
    assert torch.isclose(values.sum(), sum(layer.sum() for layer in layers), atol=1e-4)
    found = plan.collect(values[1:], torch.empty(1, sum(sizes)))
    assert all(torch.equal(a, layer[1]) for a, layer in zip(found, layers, strict=True))
    rounded = torch.empty_like(values)
    wire = quantise_rows(values, bits, block, 0.5, rounded)
    kept = plan.without_gaps(wire, bits)
    assert kept.shape[-1] == sum(plan.bytes_of_parts(bits, 4))
    assert plan.bytes_of_parts(bits, 4) == [wire_bytes(x, bits, block) for x in plan.parts]
    again = plan.with_gaps(kept, bits, wire.shape[-1])
    assert torch.equal(plan.without_gaps(again, bits), kept)
    # what a layer alone is rounded to: its blocks and codes do not depend on its neighbours
    for layer, size, back in zip(
        layers, sizes, plan.collect(rounded[:1], torch.empty(1, sum(sizes))), strict=True
    ):
        part = -(-size // owners)
        alone = torch.nn.functional.pad(layer[:1], (0, owners * part - size)).view(owners, part)
        own = torch.empty_like(alone)
        quantise_rows(alone, bits, block, 0.5, own)
        assert torch.equal(own.flatten()[:size], back)
    left = [layer.clone() for layer in layers]
    plan.subtract_(left, values)
    assert not any(bool(layer.any()) for layer in left)


@given(sizes=SIZES, block=st.sampled_from([8, 16]), bits=st.sampled_from([1, 2, 4, 8, 16]))
def test_what_fills_the_gaps_of_gathered_codes_is_never_read(
    sizes: list[int], block: int, bits: int
) -> None:
    plan, generator = Layout(sizes, 1, block), torch.Generator().manual_seed(sizes[0])
    packed = plan.width * bits // 8
    sent = torch.randint(256, (3, packed), generator=generator, dtype=torch.uint8)  # gaps, too
    received = plan.with_gaps(plan.without_gaps(sent, bits), bits, packed)
    scales = torch.rand((3, plan.width // block), generator=generator)
    of_sent, of_received = (
        plan.joined(weighted_sums(codes, bits, scales, block, 3), scales)
        for codes in (sent, received)
    )
    assert all(map(torch.equal, of_sent, of_received))


@given(sizes=SIZES, owners=st.integers(1, 3), block=st.integers(1, 9), width=st.integers(1, 7))
def test_noise_by_columns_is_each_layers_own_stream(
    sizes: list[int], owners: int, block: int, width: int
) -> None:
    plan, device = Layout(sizes, owners, block), torch.device("cpu")
    seeds = [[100 * i + worker for worker in range(2)] for i in range(len(sizes))]
    noise = UniformNoise(plan, seeds, owners, torch.empty(0))
    columns = [noise(a, min(a + width, plan.width)).clone() for a in range(0, plan.width, width)]
    whole = torch.cat(columns, dim=1).view(2, owners, plan.width)
    for i, (start, part) in enumerate(zip(plan.starts, plan.parts, strict=True)):
        for worker, row in enumerate(whole):
            (own,) = draw_uniform([(seeds[i][worker], owners * part, 0)], device)
            assert torch.equal(row[:, start : start + part].flatten(), own)


@given(sizes=SIZES, block=st.integers(1, 9), width=st.integers(1, 7))
def test_columns_by_columns_are_those_of_all_layers_spread(
    sizes: list[int], block: int, width: int
) -> None:
    """There, and back to layers without gaps, in another type."""
    plan = Layout(sizes, 1, block)
    layers = [torch.randn(2, size) for size in sizes]
    whole = torch.empty(2, 1, plan.width, dtype=torch.float64)
    plan.spread(layers, whole)
    by_columns = PlacedRows(plan, layers, torch.float64)
    places = [(a, min(a + width, plan.width)) for a in range(0, plan.width, width)]
    for a, b in places:
        assert torch.equal(by_columns[:, a:b], whole[:, 0, a:b])
    columns = ((a, b, whole[1, 0, a:b]) for a, b in places)
    back = plan.joined(columns, layers[0])
    assert all(map(torch.equal, back, (layer[1] for layer in layers)))
    assert len({layer.untyped_storage().data_ptr() for layer in back}) == 1
