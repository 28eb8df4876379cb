"""A job that has not been run (oracles: sums by hand, the compressors' own steps, a real group)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY, make_compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.cost import methods
from regimes.cost.from_model import main, make_job
from regimes.cost.methods import (
    USUAL,
    method_work,
    parse_method,
    tabulate_methods,
    tabulate_seconds,
    usual_methods,
)
from regimes.cost.models import KNOWN, Model, read_model
from regimes.cost.network import Network, Work
from regimes.cost.nodes import DEVICES, DataParallelJob, read_device, read_links
from regimes.cost.options import JobOptions
from regimes.plotting.bandwidth import _draw_bandwidth, move_apart

PARAMETERS = {  # from the models' papers and libraries
    "gpt2-124m": 124_439_808,
    "llama-1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "resnet50": 25_557_032,
    "vit-b": 86_567_656,
}
GPT2 = read_model("gpt2-124m")
FREE = Network(1e18, 0.0)


def two(model: Model = GPT2, bandwidth: float = 1e9, **changes: float) -> DataParallelJob:
    """Two nodes of one device, one bucket, no latency, a second of compute, infinite memory."""
    plain = DataParallelJob(model, 1.0, np.inf, 2, 1, FREE, Network(bandwidth, 0.0), bucket=np.inf)
    return replace(plain, algorithm="ring", **changes)


# -- by hand ---------------------------------------------------------------------------------


def test_the_known_models_have_the_parameters_of_their_papers() -> None:
    assert {name: read_model(name).size for name in KNOWN} == PARAMETERS


def test_dense_by_hand() -> None:
    """A ring of two sends every byte once: 124,439,808 x 32 bits at 1 Gbit/s."""
    step = two()
    assert step.seconds(method_work(step, parse_method("dense"))) == pytest.approx(1 + 3.982073856)


def test_powersgd_by_hand() -> None:
    """GPT-2 at rank 4: (n + m) 4 numbers of each matrix, and 1-D layers whole."""
    d, blocks = 768, 12
    matrices = [(50257, d), (1024, d)]
    matrices += blocks * [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    vectors = blocks * (2 * d + 3 * d + d + 2 * d + 4 * d + d) + 2 * d
    numbers = 4 * sum(n + m for n, m in matrices) + vectors
    step = two()
    assert step.seconds(method_work(step, parse_method("powersgd:4"))) == pytest.approx(
        1 + 32 * numbers / 1e9
    )


def test_quantised_all_reduce_by_hand() -> None:
    """A matrix of 1,024 x 1,024 in 8 bits on 2 workers: parts of 2^19 numbers, in blocks of 256
    with a scale of 4 bytes. Half of the exchange crosses the link, then a part is gathered."""
    step = two(Model("one", (Layer("weight", (1024, 1024)),)))
    part = 2**19 + 4 * 2**19 / 256
    seconds = step.seconds(method_work(step, parse_method("quantised-all-reduce:8")))
    assert seconds == pytest.approx(1 + 8 * (2 * part / 2 + part) / 1e9, rel=1e-3)


def test_the_memory_limits_compression() -> None:
    assert methods.TRANSFERS.keys() <= REGISTRY.keys()
    layers = (Layer("weight", (1000, 500)), Layer("bias", (500,)))
    step = replace(two(Model("one", layers)), memory=1e9)
    assert method_work(step, parse_method("powersgd:1")).compress == pytest.approx(
        8 * 4 * 500_000 / 1e9
    )


def test_local_steps_share_one_exchange() -> None:
    step = two(between=Network(1e9, 1e-3))
    once, local = (method_work(step, parse_method(text)) for text in ("dense", "dense/32"))
    wait = float(once.communicate(step.link, 2))
    assert step.seconds(local) == pytest.approx(1 + wait / 32)


def test_a_step_from_operations() -> None:
    """Forward and backward: 6 operations for each parameter and token, at 40 % of an A100."""
    step = make_job(JobOptions(model="gpt2-124m", items=8192))
    expected = 6 * GPT2.size * 8192 / (0.4 * DEVICES["a100"].flops)
    assert step.compute == pytest.approx(expected)
    assert step.buckets == round(4 * GPT2.size / (25 * 2**20))


def test_an_all_to_all_crosses_a_shared_link_several_times() -> None:
    """Eight replicas in two nodes: each of four sends four of its seven parts over their node's
    link; a gather's ring crosses it once."""
    step = replace(two(), gpus=4, within=FREE)
    some = Work(1.0, 0.0, {"exchange": 1, "gather": 1}, {"exchange": 7e5, "gather": 1e3})
    assert step.bytes(some) == pytest.approx(1.6e6 + 7e3)
    assert step.seconds(some) == pytest.approx(1 + 8 * (1.6e6 + 7e3) / 1e9)


# -- against the compressors themselves ------------------------------------------------------


@pytest.mark.parametrize("text", [*USUAL[1:9], "acp-sgd:2", "randomk:5", "quantise:4"])
@pytest.mark.parametrize("workers", [2, 7])
def test_bytes_of_each_collective_are_those_of_a_step(text: str, workers: int) -> None:
    layers = (Layer("a", (300, 200)), Layer("b", (200,)), Layer("c", (64, 3, 5, 5)))
    step = replace(two(Model("three", layers)), nodes=workers)
    method = parse_method(text)
    chosen, world = make_compressor(method.table), World(workers, processes=workers)
    reducer = Reducer(chosen, layers, world, 0)
    gradients = [torch.randn(1, *layer.shape) for layer in layers]
    levels = [method.level if layer.compressed else "dense" for layer in layers]
    for _ in range(chosen.phases):
        flat = torch.cat([g.flatten(1) for g in gradients], dim=1)
        Exchange(reducer).exchange_step(gradients, levels, torch.zeros(1), flat)
    meter, predicted = world.meter.take_counts(), method_work(step, method)
    meter.sent["mean"] -= 4 * chosen.phases  # the loss
    sent = {kind: size / chosen.phases for kind, size in meter.sent.items() if size}
    assert predicted.bytes == pytest.approx(sent, rel=0.02)
    assert predicted.calls.keys() == sent.keys()


def test_many_workers_gather_small_parts() -> None:
    """Of a quantised all-reduce each worker exchanges W - 1 parts and gathers one, at any W."""
    step = replace(two(), nodes=1000)
    size = method_work(step, parse_method("quantised-all-reduce:8")).bytes
    assert size["gather"] == pytest.approx(size["exchange"] / 999, rel=1e-9)


# -- the table -------------------------------------------------------------------------------


def test_of_two_methods_with_one_label_the_first_stays() -> None:
    """A run's own compressor, with options that send half as much, beside the usual one."""
    own = methods.Method({"name": "powersgd", "wire": "fp16"}, 4)
    frames = [
        tabulate_methods(two(), [*first, parse_method("powersgd:4")]) for first in ([own], [])
    ]
    half, whole = (frame.set_index("method").loc["powersgd 4"] for frame in frames)
    assert half["bytes"] < 0.7 * whole["bytes"]
    assert math.isnan(half["speed"])  # of which no clock was measured
    assert whole["speed"] == pytest.approx(whole["clock"] * whole["speed_up"])


def test_crossings_and_speed_ups() -> None:
    step = replace(two(), memory=1e12)
    frame = tabulate_methods(step, usual_methods(step))
    assert frame["method"].iloc[0] == "dense"
    assert not frame["method"].duplicated().any()
    for row in frame.to_dict("records")[1:]:
        above, below = (step.at(row["break_even"] * x) for x in (1.01, 0.99))
        method = next(m for m in usual_methods(step) if m.label == row["method"])
        for other, faster in ((above, False), (below, True)):
            if np.isfinite(row["break_even"]):
                fast, slow = (
                    other.seconds(method_work(other, m)) for m in (method, parse_method("dense"))
                )
                assert (fast < slow) == faster
    numbers = tabulate_seconds(step, usual_methods(step), np.array([1e9, 2e9]))
    at = numbers[numbers["bandwidth"] == 1e9].set_index("method")["seconds"]
    assert at.to_dict() == pytest.approx(frame.set_index("method")["seconds"].to_dict())


def test_one_node_averages_over_the_link_within() -> None:
    alone = replace(two(), nodes=1, gpus=4, within=Network(1e9, 0.0))
    assert alone.link.bandwidth == 1e9
    assert alone.replicas == 4
    frame = tabulate_methods(alone, [parse_method("cast:bf16")])
    assert (frame["seconds"] > 1).all()


def test_a_node_of_several_devices_waits_for_its_slowest_link() -> None:
    step = replace(two(), gpus=8, within=Network(1e8, 0.0))
    ring = replace(step, within=FREE, between=Network(1e8, 0.0))
    dense = method_work(step, parse_method("dense"))
    assert step.seconds(dense) == ring.seconds(dense)


# -- models of the user's --------------------------------------------------------------------


class Wide(nn.Module):
    """More parameters than any machine has memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10**6, 10**6)
        self.out = nn.Linear(10**6, 10, bias=False)
        self.out.weight.requires_grad = False


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    net[1].weight = net[0].weight
    return net


NO_MODULE = 3


def broken() -> nn.Module:
    raise ValueError("no")


def needy(depth: int) -> nn.Module:
    raise AssertionError(depth)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def complex_numbers() -> nn.Module:
    return nn.Linear(3, 3, dtype=torch.complex64)


def test_a_module_is_built_without_memory() -> None:
    model = read_model("test_job:Wide")
    assert (model.size, model.item) == (10**12, "token")  # without the frozen layer
    assert read_model("test_job:tied").size == 50 * 8 + 50


def test_a_model_of_torchvision_is_built_by_its_name() -> None:
    assert read_model("torchvision.models:resnet50").size == PARAMETERS["resnet50"]


def test_a_file_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'item = "token"\nflops = 5e6\n[[layers]]\nname = "block.{}"\nshape = [3, 4]\ntimes = 2\n'
    )
    model = read_model(str(path))
    assert [(layer.name, layer.shape) for layer in model.layers] == [
        ("block.0", (3, 4)),
        ("block.1", (3, 4)),
    ]
    assert model.step_flops(10) == 3 * 5e6 * 10


REFUSED = {
    "gpt3": "no such model, .*Known: gpt2-124m",
    "none.toml": "cannot be read",
    "test_job:needy": "needs depth: name a function without arguments",
    "test_job:broken": r"cannot be built on the meta device: ValueError\('no'\)",
    "test_job:lazy": "parameter 'weight' has no shape before the first batch",
    "test_job:complex_numbers": "parameter 'weight' is complex",
    "test_job:NO_MODULE": "a module, or a function that returns one",
    "test_job:nothing": "cannot import the model",
    "no_such_module:model": "cannot import the model",
    "raises:model": r"cannot import the model 'raises:model': OSError\('no'\)",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_model_is_one_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises.py").write_text("raise OSError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[text]):
        read_model(text)


FILES = {
    "layers = 3": "layers",
    "[[layers]]\nname = 3\nshape = [1]": "name",
    '[[layers]]\nname = "a"\nshape = [0]': "shape",
    '[[layers]]\nname = "a"\nshape = [1]\ntimes = 0': "times",
    '[[layers]]\nname = "a"\nshape = [1]\nsize = 2': "a table with name, shape and times",
    'itme = "token"': "unknown field 'itme', did you mean 'item'",
    'item = "word"': '"token" or "sample"',
    "flops = -1": "a number above 0",
    "a = [": "cannot be read",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_of_shapes_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=FILES[text]):
        read_model(str(path))


STEP: dict[str, Any] = {"step": "1s"}
ALONE: dict[str, Any] = {**STEP, "nodes": 2, "gpus": 1}
MANY: dict[str, Any] = {**STEP, "nodes": 2, "gpus": 8}
METHODS = ("powersgd", "powersgd:x", "nothing:1", "dense/0", "a b")
REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *[({**STEP, name: n}, f"--{name} = ") for name in ("nodes", "gpus") for n in (0, -1, 10**7)],
    ({"step": "fast"}, "--step fast"),
    ({"utilisation": 1.5}, r"\(0, 1\]"),
    ({"device": "a200"}, "no such device, did you mean"),
    ({"bucket_mb": 0.0}, "above 0"),
    ({"items": 0}, "--items"),
    ({"flops": -1.0}, "--flops"),
    ({"within": "fast"}, "no bandwidth and latency"),
    ({"links": Path("none.json")}, "write it with torchrun"),
    *[({"methods": (text,)}, "method|level of|compressor '") for text in METHODS],
    ({"methods": ()}, "one or more"),
    ({"methods": ("topk:1", "topk:1")}, "expected topk 1 once"),
    ({**STEP, "nodes": 1, "gpus": 1}, "there is one device, which exchanges nothing"),
    ({"model": "mine.toml", "items": 8}, "do not follow from its shapes"),
    ({"model": "mine.toml", "items": None}, "seconds of a step are missing"),
    ({**ALONE, "links": Path("within.json")}, "has no 'between'.*give --between"),
    ({**MANY, "links": Path("between.json")}, "has no 'within'.*give --within"),
    ({"items": 10**400}, "--items"),
    ({**STEP, "flops": math.inf}, "--flops"),
    ({"step": "1e300s"}, "--step"),
    ({"bucket_mb": 1e-300}, "--bucket-mb"),
    ({"utilisation": math.nan}, "--utilisation"),
    ({**STEP, "between": "1e-300bit/s"}, "bandwidth"),
    ({**STEP, "between": "1Gbit/s,1e300s"}, "latency"),
    ({**STEP, "nodes": 10**400}, "--nodes"),
    ({**STEP, "model": "huge.toml"}, "parameters"),
    ({**STEP, "model": "infinite.toml"}, "flops"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED_OPTIONS)
def test_wrong_options_are_one_sentence(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of numbers that no float holds, and of what a file lacks."""
    monkeypatch.chdir(tmp_path)
    layer, size = '[[layers]]\nname = "a"\nshape = ', 10**18
    for name, text in (
        ("mine", f"{layer}[3, 4]"),
        ("huge", f"{layer}[{size}, {size}]"),
        ("infinite", f"flops = inf\n{layer}[3]"),
    ):
        (tmp_path / f"{name}.toml").write_text(text)
    for name in ("within", "between"):
        link = {name: {"bandwidth": 4e7, "latency": 5.7e-05}}
        (tmp_path / f"{name}.json").write_text(json.dumps(link))
    usual = JobOptions(model="resnet50", items=None if "step" in given else 64)
    with pytest.raises(ConfigError, match=said):
        main(replace(usual, **given))


UNREADABLE = {
    "binary": (bytes(range(256)) * 40_000, "is no text|larger than"),
    "short binary": (b"\xff\xfe\x00" * 9, "is no text"),
    "deep": (b"[" * 90_000, "cannot be read"),
    "infinite": (b'{"between": {"bandwidth": 1e999, "latency": 0}}', "bandwidth = 'inf bit/s'"),
    "no float": (b'{"between": {"bandwidth": 1' + b"0" * 400 + b"}}", "cannot be read"),
    "no number": (b'{"between": {"bandwidth": "' + b"x" * 5000 + b'"}}', "cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_file_of_links_is_one_short_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    content, said = UNREADABLE[name]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_links(path)
    assert len(str(error.value)) < 400 + len(str(path))


SPEEDS = {
    "50GFLOP/s": "lacks the memory's speed",
    "50GFLOP/s,": "'' is no speed in B/s",
    "1TFLOP/s,1GB/s,1GB/s": "has more than two",
    "1.2.3TFLOP/s,1GB/s": "'1.2.3TFLOP/s' is no speed in FLOP/s",
    "1e400TFLOP/s,1GB/s": "no speed in FLOP/s",
    "1TFLOP/s,1e400GB/s": "no speed in B/s",
    "1GB/s,1TFLOP/s": "no speed in FLOP/s",
    "0TFLOP/s,1GB/s": "no speed",
}


@pytest.mark.parametrize("text", SPEEDS)
def test_a_speed_that_is_refused_says_why(text: str) -> None:
    with pytest.raises(ConfigError, match=SPEEDS[text]):
        read_device(text)


def test_speeds_have_any_usual_unit() -> None:
    assert read_device("50GFLOP/s, 20GB/s") == read_device("0.05TFLOP/s,0.02TB/s")


# -- files -----------------------------------------------------------------------------------


def test_files_of_links(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text('{"between": {"bandwidth": 2e9, "latency": 1e-4}}')
    some = JobOptions(model="resnet50", step="1s", links=path)
    planned = make_job(replace(some, gpus=1))
    assert planned.between == Network(2e9, 1e-4)
    assert make_job(replace(some, within="1Gbit/s")).within == Network(1e9)
    path.write_text('{"within": {"bandwidth": 4e9, "latency": 0}, "between": {}}')
    both = make_job(replace(some, between="1Gbit/s"))
    assert (both.within, both.between) == (Network(4e9), Network(1e9))
    for wrong in ("[]", '{"within": {"bandwidth": 0, "latency": 0}}', '{"within": 3}', "{"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="write it with torchrun"):
            read_links(path)


def test_the_files_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, numbers = tmp_path / "f.svg", tmp_path / "n.json"
    options = JobOptions(model="resnet50", step="0.1s", json=numbers, figure=picture)
    frame = main(options, csv=tmp_path / "n.csv")
    said = capsys.readouterr().out
    assert "quantised-all-reduce 8" in said
    assert picture.stat().st_size > 10_000
    content = json.loads(numbers.read_text())
    assert [row["method"] for row in content["methods"]] == frame["method"].tolist()
    assert " ".join(content["advice"].split()) in " ".join(said.split())
    with pytest.raises(ConfigError, match="expected a name that ends"):
        main(replace(options, figure=tmp_path / "f.jpeg"))


def test_a_ring_is_where_a_line_crosses_that_of_dense() -> None:
    lines = {"dense": [4.0, 3.0, 2.0, 1.0], "a": [1.0, 1.5, 2.0, 2.5], "b": [2.5, 3.0, 3.5, 4.0]}
    numbers = pd.DataFrame({"bandwidth": [1e6, 1e8, 1e10, 1e12], **lines})
    numbers = numbers.melt("bandwidth", var_name="method", value_name="seconds")
    table = pd.DataFrame({"method": [*lines], "break_even": [np.nan, 1e10, 1e8]})
    drawn = _draw_bandwidth(numbers, table, 1e9, "", "").axes[0].get_lines()
    (rings,) = [line.get_xydata() for line in drawn if line.get_marker() == "o"]
    assert rings == pytest.approx(np.array([[1e10, 2.0], [1e8, 3.0]]))


def test_labels_are_moved_apart() -> None:
    places = move_apart(np.array([0.0, 0.1, 0.11, 0.5]), 0.1)
    assert np.diff(places).min() == pytest.approx(0.1)
    assert places[3] == 0.5
    assert places[:3].mean() == pytest.approx(np.mean([0.0, 0.1, 0.11]))


@pytest.mark.slow
def test_the_command_needs_no_memory_for_the_model() -> None:
    """Llama 7B has 27 GB; the command may have 3."""
    limit = "import resource as r; r.setrlimit(r.RLIMIT_AS, (3 * 2**30, 3 * 2**30))"
    words = ["regimes", "cost", "--model", "llama-7b", "--items", "4096"]
    code = f"{limit}; import sys; sys.argv = {words}; from regimes.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "6.74 G parameters in 291 layers" in done.stdout


# -- nodes of several devices ------------------------------------------------------------------


@pytest.mark.parametrize("text", [*USUAL, "acp-sgd:2"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_sends_what_one_device_would(text: str, nodes: int) -> None:
    method = parse_method(text)
    one = two(nodes=nodes)
    several = replace(one, gpus=8, worker="node")
    work = method_work(several, method)
    if method.period > 1:  # local steps have a worker for each device
        assert work.inside is None
        return
    assert several.bytes(work) == one.bytes(method_work(one, method))
    # the whole gradient within a node, of which a device keeps an eighth, and back
    assert work.inside is not None
    full = {"scatter": 4 * GPT2.size * 7 / 8, "gather": 4 * GPT2.size / 8}
    if method.table["name"] != "powersgd":  # which joins its factors, too
        assert work.inside.bytes == full
    links = {"within": Network(1e9, 0.0), "between": Network(np.inf, 0.0)}
    sent = sum(work.inside.bytes[kind] * {"scatter": 1, "gather": 7}[kind] for kind in full)
    seconds = replace(several, **links).waiting(work)
    assert seconds == pytest.approx(8 * sent / 1e9)


@pytest.mark.parametrize("text", USUAL)
def test_by_default_a_node_is_the_worker_as_attach_has_it(text: str) -> None:
    method, job = parse_method(text), two(nodes=4, gpus=8)
    by_device, by_node = (
        tabulate_methods(replace(job, worker=worker), [method]).iloc[-1]
        for worker in ("device", "node")
    )
    usual = tabulate_methods(job, [method]).iloc[-1]
    name = method.table["name"]
    apart = name in ("quantised-all-reduce", "topk", "sign") and method.period == 1
    assert usual["worker"] == ("node" if apart else "device")
    assert usual["bytes"] == (by_node if apart else by_device)["bytes"]
    assert not apart or by_node["bytes"] < by_device["bytes"] / 2
