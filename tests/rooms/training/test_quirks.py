"""``quirks = "authors"``: the fields that it sets, and what they do (oracles: torch's SGD, hand
arithmetic, the committed runs)."""

from __future__ import annotations

import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import regimes
from regimes.base.config import RunConfig, from_dict, override, to_dict
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.presets import get_grid, get_preset
from regimes.records.earlier import as_present
from regimes.training.quirks import resolve_quirks

# -- quirks ----------------------------------------------------------------------------------


def test_authors_quirks_are_ordinary_fields() -> None:
    config = resolve_quirks(replace(get_preset("smoke"), quirks="authors"))
    assert config.signal == "worker0"
    assert config.compressor == {"name": "powersgd", "reset_on_change": True}
    assert not config.data.reshuffle
    assert (config.optimizer.nesterov, config.optimizer.weight_decay) == (False, 1e-4)
    topk = resolve_quirks(
        replace(get_preset("smoke"), quirks="authors", compressor={"name": "topk"})
    )
    assert topk.compressor == {
        "name": "topk",
        "reduction": "sum",
        "error_feedback": False,
        "count": "truncate",
    }
    assert resolve_quirks(get_preset("smoke")) == get_preset("smoke")
    assert resolve_quirks(config) == config


def test_the_lstm_of_the_authors_is_near_nesterov_and_not_the_same() -> None:
    """Theirs: m = 0.9 m + g, then g + m. torch's, by hand and by torch: g + 0.9 m. The steps that
    one gradient causes add up to 11 and to 10 of it."""
    config = resolve_quirks(replace(get_preset("paper-lstm"), quirks="authors")).optimizer
    assert (config.nesterov, config.weight_decay) == (True, 0.0)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=True)
    m = theirs = 0.0
    for step in range(200):
        g = float(step == 0)
        weight.grad = torch.tensor([g])
        before = weight.item()
        optimizer.step()
        m = 0.9 * m + g
        assert before - weight.item() == pytest.approx(g + 0.9 * m, abs=1e-6)
        theirs += g + m
    assert -weight.item() == pytest.approx(10.0, abs=1e-5)
    assert theirs == pytest.approx(11.0, abs=1e-5)


@pytest.mark.parametrize("name", ["small-quirks", "smoke-quirks-topk"])
def test_committed_runs_have_the_quirks_of_their_grid(name: str) -> None:
    """But for the seed and where their images lay."""
    archive = Path(__file__).parents[3] / "data" / "reference" / f"{name}.tar.xz"
    grid = get_grid(name)
    with tarfile.open(archive) as packed:
        for member in (
            m
            for m in packed
            if m.name.endswith("seed-2000/run.json") or m.name.endswith("seed-3000/run.json")
        ):
            file = packed.extractfile(member)
            assert file is not None
            run = json.load(file)["config"]
            config = to_dict(resolve_quirks(grid[run["name"]]))
            old = to_dict(resolve_quirks(from_dict(RunConfig, as_present(run))))
            assert config["data"]["reshuffle"] == old["data"]["reshuffle"]
            for each in (config, old):
                del each["seed"], each["data"], each["quirks"]
            assert config == old


# -- TopK's count ----------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("workers", [1, 4])
def test_of_less_than_one_coordinate_nothing_is_sent(workers: int, feedback: bool) -> None:
    """Beside a layer that sends: no traffic, an update of zeros, and what is owed stays owed."""
    layers = [Layer("small", (5, 10)), Layer("large", (20, 50))]
    world = World(workers)
    reducer = Reducer(TopK(count="truncate", error_feedback=feedback), layers, world, seed=0)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(5, 10)
    for _ in range(3):
        grads = [torch.randn(workers, *layer.shape, generator=generator) for layer in layers]
        total += grads[0].sum(0)
        stack = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        updates = Exchange(reducer).exchange_step(grads, [0.3, 0.3], torch.zeros(workers), stack)[0]
        assert torch.equal(updates[0], torch.zeros(5, 10))
        assert 0 < int(updates[1].count_nonzero()) <= 3 * workers
    compressor = TopK(count="truncate")
    assert compressor.cost(layers[0], 0.3, workers) == regimes.Traffic(0, 0)
    assert compressor.cost(layers[1], 0.3, workers) == regimes.Traffic(2 * 3 * workers, 3 * 8)
    owed = reducer.residuals()[0]
    if feedback:
        assert owed is not None
        assert torch.allclose(owed.sum(0), total, atol=1e-5)
    else:
        assert owed is None


def test_the_count_is_cut_off_and_not_rounded() -> None:
    layer = Layer("layer", (1, 250))
    sent = {
        count: TopK(count=count).traffic(layer, 0.7, 4).floats for count in ("round", "truncate")
    }
    assert sent == {"round": 2 * 4 * 2, "truncate": 2 * 4 * 1}  # of 1.75
    with pytest.raises(ConfigError, match=r"compressor\.count"):
        TopK(count="floor")


AUTHORS = (
    "quirks=authors",
    "compressor=topk",
    "levels.low=10",
    "levels.high=0.3",
    "epochs=1",
    "policy=static",
    "policy.level=high",
    "optimizer.lr=0.05",
)


def counts(run: Any) -> tuple[list[int], list[float]]:
    """Coordinates that a compressed layer sends per worker and step, by hand and by the record."""
    names = [layer["name"] for layer in run.header["layers"] if layer["compressed"]]
    sizes = [math.prod(layer["shape"]) for layer in run.header["layers"] if layer["compressed"]]
    floats = run.layers.set_index("layer").loc[names, "floats"] / run.rows[0]["steps"] / (2 * 4)
    return [int(0.003 * size) for size in sizes], floats.to_list()


def test_a_run_in_which_layers_send_nothing(tmp_path: Path) -> None:
    """Digits at 0.3 %: two of seven layers have fewer than 334 weights."""
    run = regimes.run(override(get_preset("smoke"), list(AUTHORS)), tmp_path / "run")
    expected, found = counts(run)
    assert found == expected
    assert expected.count(0) == 2
    assert run.finished


@pytest.mark.slow
def test_real_processes_agree_that_a_layer_sends_nothing(tmp_path: Path) -> None:
    config = override(get_preset("smoke"), list(AUTHORS))
    alone = regimes.run(config, tmp_path / "1")
    forked.train(config, tmp_path / "2", 2)
    two = regimes.load(tmp_path / "2")
    assert counts(two) == counts(alone)
    assert two.epochs["train_loss"].to_list() == pytest.approx(alone.epochs["train_loss"].to_list())
