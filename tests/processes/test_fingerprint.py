"""The fingerprint of the weights: it sees one bit, and stops processes that have drifted apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from configs import smoke as config
from ddp_scripts import group

import regimes
from regimes.base.config import RunConfig
from regimes.base.errors import TrainingError
from regimes.base.fingerprint import fingerprint
from regimes.collectives.agreement import check_same_weights
from regimes.records import read_lines
from regimes.training import loop

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Shorter than a row, whole rows, rows and a rest, one that begins within 8 bytes, one that
    is not contiguous."""
    torch.manual_seed(0)
    x = torch.randn(6000, dtype=dtype)
    return [x[:7], x[8:1032].view(32, 32), x[1100:2401], x[2401:3703], x[3704:5704].view(40, 50).T]


def next_after(number: torch.Tensor) -> torch.Tensor:
    """The neighbour one bit away: torch's ``nextafter`` has none in float16."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[number.element_size()]
    return (number.view(words) + 1).view(number.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_anywhere_shows(dtype: torch.dtype) -> None:
    parts = tensors(dtype)
    before = fingerprint(parts)
    assert fingerprint([part.clone() for part in parts]) == before
    for part in parts:
        for place in range(0, part.numel(), 97):
            row, rest = divmod(place, part.shape[-1])
            at = (row, rest) if part.ndim == 2 else (place,)
            old = part[at].clone()
            part[at] = next_after(old)
            assert fingerprint(parts) != before
            part[at] = old
    assert fingerprint(parts) == before


def test_a_shard_may_hold_no_number() -> None:
    """Of a model with fewer rows than processes."""
    assert fingerprint([torch.empty(0, 3), torch.empty(0)]) == 0


def test_places_count() -> None:
    a, b = tensors(torch.float32)[:2]
    assert (
        len(
            {
                fingerprint([a, b]),
                fingerprint([a.flip(0), b]),
                fingerprint([a, b.flip(0)]),
                fingerprint([b, a]),
            }
        )
        == 4
    )


def test_who_differs_is_named() -> None:
    check_same_weights([5, 5, 5], "epoch 1")
    check_same_weights([None], "epoch 1")
    with pytest.raises(TrainingError, match=r"process 1, 3 holds other .* at the end of epoch 1:"):
        check_same_weights([5, 6, 5, 7], "epoch 1")


def nudged(rank: int, c: RunConfig, out: Path, place: str) -> str:
    """A run in which process 1 nudges one weight by one unit in the last place, in epoch 1."""
    group.launch(rank, 2, place)
    dist.destroy_process_group()
    train = loop._train_steps

    def nudge(run: loop.Run, plan: loop.UnitPlan, *rest: object) -> tuple[float, int]:
        trained = train(run, plan, *rest)
        if rank == 1 and len(run.rows) == 1:
            weight = run.gradients.parameters[0].data.view(-1)
            weight[3] = torch.nextafter(weight[3], weight[3] + 1)
        return trained

    loop._train_steps = nudge
    try:
        regimes.run(c, out)
    except TrainingError as error:
        return str(error)
    return ""


def test_a_replica_that_has_drifted_by_one_bit_stops_the_run(tmp_path: Path) -> None:
    place, out = (tmp_path / "meet").as_uri(), tmp_path / "run"
    heard = group.run(nudged, 2, config("dtype=float32", epochs=3), out, place)
    assert heard[0] == heard[1]
    assert heard[0].startswith("process 1 holds other weights than process 0 at the end of epoch 1")
    assert len(read_lines(out / "epochs.jsonl")) == 1
    assert read_lines(out / "events.jsonl")[-1]["event"] == "stopped"
