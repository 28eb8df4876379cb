"""Plain FSDP2's step: closed forms, the longest path through a step's tasks, sums by hand."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes.collectives.requests import Layer
from regimes.cost import from_model, sharded
from regimes.cost.job import Job
from regimes.cost.models import Model
from regimes.cost.options import JobOptions
from regimes.errors import ConfigError
from regimes.network import BACKWARD, Network

LAYERS = (Layer("embed", (10, 6)), *(Layer(f"h.{i}.w", (9, 6)) for i in range(3)))
LINK = Network(8e3, 0.5)  # 1,000 bytes a second, and half a second for a message


def job(nodes: int = 1, gpus: int = 4, **more: object) -> Job:
    return Job(
        Model("own", LAYERS),
        *(6.0, 1e3, nodes, gpus, nodes * gpus),
        within=LINK,
        between=LINK,
        algorithm="ring",
        **more,  # type: ignore[arg-type]
    )


def test_parts_are_whole_rows_padded() -> None:
    root, *blocks = sharded.groups_of(LAYERS)
    assert (root.name, root.stays, root.part(4)) == ("(root)", True, 3 * 6)
    assert [(b.name, b.stays, b.part(4)) for b in blocks] == [
        (f"h.{i}", False, 3 * 6) for i in range(3)
    ]
    assert sharded.Group("bias", (Layer("bias", (5,)), Layer("scale", ()))).part(4) == 2 + 1


def test_a_dense_step_without_overlap_is_a_sum() -> None:
    """Four groups of 18 numbers a part: 7 gathers in 2 bytes, 4 reduce-scatters in 4, each in 3
    messages of which each device sends its part, or a part, three times."""
    found = sharded.predict_step(
        job(), sharded.groups_of(LAYERS), sharded.Sharded(), overlaps=False
    )
    gather, scatter = 3 * (0.5 + 36 / 1e3), 3 * (0.5 + 72 / 1e3)
    assert found.seconds == pytest.approx(6.0 + 7 * gather + 4 * scatter, rel=1e-12)
    assert found.bytes == 7 * 3 * 36 + 4 * 3 * 72


def test_quantised_collectives_send_codes_and_scales() -> None:
    """18 numbers are one block: 9 or 18 bytes of codes, and 4 of its scale."""
    groups = sharded.groups_of(LAYERS)
    found = sharded.predict_step(
        job(), groups, sharded.parse_sharded("scatter:4+gather:8"), overlaps=False
    )
    assert found.bytes == 7 * 3 * 22 + 4 * 3 * 13
    network = 7 * 3 * (0.5 + 22 / 1e3) + 4 * (0.5 + 39 / 1e3)  # an all-to-all waits once
    assert found.communicate == pytest.approx(network, rel=1e-12)
    rounding = 4 * (sum(x.size for x in LAYERS) * (5 + 2 * 2) - 60 * 2) / 1e3
    assert found.compress == pytest.approx(rounding, rel=1e-12)
    assert found.seconds == pytest.approx(6.0 + rounding + network, rel=1e-12)


def test_an_all_to_all_crosses_a_nodes_link_from_each_of_its_devices() -> None:
    groups = sharded.groups_of(LAYERS)
    one = sharded.predict_step(job(2, 2), groups, sharded.parse_sharded("scatter:8"))
    dense = sharded.predict_step(job(2, 2), groups, sharded.Sharded())
    assert dense.bytes - one.bytes == 4 * (3 * 72 - 2 * 2 * 22)


def test_replicas_average_what_their_devices_have_reduced() -> None:
    """Two nodes of two: a device holds 30 or 30 of each group's numbers, and a node's link carries
    the mean of all of a node's."""
    groups = sharded.groups_of(LAYERS)
    found = sharded.predict_step(job(2, 2), groups, sharded.parse_sharded("HSDP"), overlaps=False)
    part = 5 * 6
    assert found.bytes == 4 * 2 * part * 4
    mean = 2 * (0.5 + part * 4 / 1e3)
    scatter, gather = 0.5 + part * 4 / 1e3, 0.5 + part * 2 / 1e3
    assert found.seconds == pytest.approx(6.0 + 4 * (mean + scatter) + 7 * gather, rel=1e-12)


@pytest.mark.parametrize(("gpus", "halves"), [(2, True), (3, False), (4, True), (5, False)])
def test_replicas_are_of_equally_many_devices(gpus: int, halves: bool) -> None:
    """One node is two replicas, where its devices are twice as many as a replica's."""
    alone = job(1, gpus)
    frame = sharded.tabulate_sharded(alone, [sharded.parse_sharded("scatter:4")])
    assert ("HSDP" in {*frame["method"]}) == halves
    assert ("HSDP" in sharded.format_sharded(frame).note) == halves
    assert sharded.advise_sharded(alone, frame).startswith(("Stay dense", "Try attach("))
    if not halves:
        with pytest.raises(ConfigError, match=f"{gpus} devices of one node are no two replicas"):
            sharded.tabulate_sharded(alone, [sharded.parse_sharded("HSDP")])


# -- overlap ---------------------------------------------------------------------------------------

seconds = st.lists(st.floats(0, 10), min_size=4, max_size=4)


def longest(
    compute: list[float], gather: list[float], again: list[float], scatter: list[float]
) -> float:
    """The longest path through the tasks of a step, each with those that it waits for."""
    last = len(compute) - 1
    tasks: dict[tuple[str, int], tuple[float, list[tuple[str, int]]]] = {}
    for i, x in enumerate(compute):
        tasks["gather", i] = gather[i], [("gather", i - 1), ("begun", i - 1)]
        tasks["begun", i] = 0.0, [("gather", i), ("forward", i - 1)]
        tasks["forward", i] = (1 - BACKWARD) * x, [("begun", i)]
        link = ("scatter", i + 2) if i + 2 <= last else ("gather", last)
        begun = ("begun again", i + 1) if i < last else ("forward", last)
        tasks["again", i] = again[i], [link, ("again", i + 1), begun]
        tasks["begun again", i] = 0.0, [("again", i), ("backward", i + 1), ("forward", last)]
        tasks["backward", i] = BACKWARD * x, [("begun again", i)]
        tasks["scatter", i] = (
            scatter[i],
            [
                ("backward", i),
                ("again", max(0, i - 1)),
                ("scatter", i + 1),
            ],
        )

    @cache
    def end(task: tuple[str, int]) -> float:
        if task not in tasks:
            return 0.0
        own, before = tasks[task]
        return own + max(map(end, before))

    return max(end(("scatter", 0)), end(("backward", 0)))


@given(seconds, seconds, seconds, seconds)
def test_overlap_is_the_longest_path(
    compute: list[float], gather: list[float], again: list[float], scatter: list[float]
) -> None:
    found = sharded.pipeline_seconds(compute, gather, again, scatter)
    assert found == pytest.approx(longest(compute, gather, again, scatter), rel=1e-9, abs=1e-9)
    link = math.fsum([*gather, *again, *scatter])
    assert found >= max(math.fsum(compute), link) - 1e-9
    assert found <= math.fsum(compute) + link + 1e-9


# -- the command -----------------------------------------------------------------------------------


def options(tmp_path: Path, **more: object) -> JobOptions:
    shapes = tmp_path / "own.toml"
    shapes.write_text('layers = [{name = "h.{}.w", shape = [1024, 1024], times = 8}]\n')
    return JobOptions(str(shapes), step="100ms", device="a100", gpus=4, nodes=1, shards=4, **more)  # type: ignore[arg-type]


def test_the_command_prints_what_it_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(tmp_path, within="1Gbit/s", overlap=False, json=tmp_path / "cost.json")
    frame = from_model.main(given).set_index("method")
    said = " ".join(capsys.readouterr().out.split())
    assert "one replica of 4 devices" in said
    assert "8 calls of fully_shard" in said
    # a device sends 3/4 of 8 * 2^20 numbers in 2 bytes twice, and in 4 bytes once
    assert frame.bytes["dense"] == 0.75 * 8 * 2**20 * 8
    assert frame.seconds["dense"] == pytest.approx(0.1 + frame.bytes["dense"] * 8 / 1e9, rel=1e-9)
    waits = frame.seconds["dense"] - 0.1
    assert f"waits {1e3 * waits:.3g} ms for the network" in said
    assert 'Try attach(model, shards=mesh, scatter={"level": ' in said
    assert (tmp_path / "cost.json").exists()


def test_a_fast_link_needs_none_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_model.main(options(tmp_path, within="4Tbit/s"))
    assert "Stay dense: " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"methods": ("powersgd:4",)}, "expected scatter:BITS"),
        ({"methods": ("scatter:4+scatter:8",)}, "expected scatter:BITS"),
        ({"methods": ("gather:2",)}, "with 4 or 8 bits"),
        ({"figure": Path("x.png")}, "--figure: there is none of plain FSDP2"),
        ({"shards": 2, "overlap": False}, "--overlap: it is for plain FSDP2"),
    ],
)
def test_wrong_options(tmp_path: Path, more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        from_model.main(JobOptions(**{**vars(options(tmp_path)), **more}))
