"""A run whose level would send more of some layers than they have. The same run at "dense" is the
oracle of its numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import regimes
from regimes.base.errors import ConfigError
from regimes.cli import monitor as watch
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.powersgd import PowerSGD
from regimes.cost import from_model, predict
from regimes.cost.network import Network
from regimes.cost.options import JobOptions
from regimes.plotting.reporters import LiveTable, PlainLines
from regimes.records import Record

NAMES = ["0.weight", "2.weight"]  # 16 x 8 and 3 x 16


class Doubling(PowerSGD):
    """A user's own, whose formula says twice what it sends."""

    def traffic(self, layer: Layer, level: Any, workers: int, itemsize: int = 4) -> Traffic:
        once = super().traffic(layer, level, workers, itemsize)
        return Traffic(2 * once.floats, 2 * once.bytes)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def run(out: Path, level: Any, compressor: Any = "powersgd", **options: Any) -> Record:
    options = {"reporters": [], "policy": {"name": "static", "level": "low"}, **options}
    return regimes.simulate(
        network,
        points(48, 0),
        points(16, 1),
        out=out,
        workers=3,
        batch_size=4,
        epochs=2,
        compressor=compressor,
        levels={"low": level, "high": 1},
        **options,
    )


def test_a_rank_above_all_trains_as_dense_does(tmp_path: Path) -> None:
    whole, dense = run(tmp_path / "64", 64), run(tmp_path / "dense", "dense")
    assert whole.header["per_step"]["low"]["whole"] == NAMES
    for row, plain in zip(whole.rows, dense.rows, strict=True):
        for column in ("train_loss", "test_loss", "bytes", "floats", "collectives"):
            assert row[column] == plain[column], column
        assert row["layers"]["bytes"] == plain["layers"]["bytes"]


def test_one_layer_is_sent_whole_beside_another(tmp_path: Path) -> None:
    """Rank 3 pays for 16 x 8 and not for 3 x 16, of which nothing is lost."""
    mixed = run(tmp_path / "3", 3, set={"instruments": {"error": {}}})
    dense = run(tmp_path / "dense", "dense")
    names = [layer["name"] for layer in mixed.header["layers"]]
    assert mixed.header["per_step"]["low"]["whole"] == ["2.weight"]
    for row, plain in zip(mixed.rows, dense.rows, strict=True):
        counts = zip(names, row["layers"]["bytes"], plain["layers"]["bytes"], strict=True)
        for name, sent, most in counts:
            assert sent == most if name != "0.weight" else sent < most
        errors = dict(zip(names, row["statistics"]["error:low"], strict=True))
        assert errors["2.weight"] == 0 < errors["0.weight"]


@pytest.mark.parametrize("compressor", ["powersgd", Doubling()], ids=["known", "own"])
def test_it_is_said(compressor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the run starts, by `watch` and by `cost`; of a compressor's own formula, too."""
    lines, screen = io.StringIO(), Console(record=True, width=200, file=io.StringIO())
    record = run(tmp_path / "run", 3, compressor, reporters=[PlainLines(lines)])
    names = NAMES if compressor != "powersgd" else NAMES[1:]
    sentence = f"sent whole at level low: {len(names)} of 2 layers, because 3 would not send less"
    sentence = f"{sentence} of them ({', '.join(names)})"
    assert sentence in lines.getvalue().splitlines()
    table = LiveTable(screen)
    table.start(record.header, [])
    table.stop("")
    assert sentence in screen.export_text()
    watch.watch_runs(tmp_path / "run", once=True, console=screen)
    assert sentence in screen.export_text()
    assert "level high" not in lines.getvalue()
    predict.main([str(tmp_path / "run")], None, Network(1e10, 5e-5), None)
    said = " ".join(capsys.readouterr().out.split())
    assert f"layers sent whole at low (3): {len(names)}, because it would not send less" in said
    assert "sent whole at high" not in said


def test_the_costs_of_methods_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    shapes = "[[layers]]\nname = 'a.{}'\nshape = [16, 8]\ntimes = 3\n"
    path.write_text(f"item = 'token'\n{shapes}[[layers]]\nname = 'b'\nshape = [512, 512]\n")
    methods = ("dense", "powersgd:4", "powersgd:64")
    from_model.main(JobOptions(str(path), step="1ms", device="a100", methods=methods))
    said = " ".join(capsys.readouterr().out.split())
    assert "layers sent whole by powersgd 64: 3, because it would not send less of them" in said
    assert said.count("sent whole") == 1  # neither of rank 4 nor of "dense"


def test_check_compressor_refuses_shapes_that_are_all_sent_whole() -> None:
    regimes.check_compressor(PowerSGD(), 2)
    with pytest.raises(ConfigError, match="PowerSGD: by its traffic, level 64 would send more"):
        regimes.check_compressor(PowerSGD(), 64)
