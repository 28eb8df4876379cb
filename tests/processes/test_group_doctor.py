"""`regimes doctor` in a launched group (oracles: two gloo processes, versions made to differ)."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from pathlib import Path

import pytest
import torch
from ddp_scripts import group as processes

from regimes import cli
from regimes.base.errors import ConfigError, TrainingError
from regimes.cli import links
from regimes.cli import machine as doctor
from regimes.collectives.connect import connect_world
from regimes.cost.network import Network
from regimes.cost.nodes import read_links


def checked(rank: int, other: bool) -> tuple[bool, str]:
    """What the doctor says on one process, the last of which may have another torch."""
    os.environ["COLUMNS"] = "120"
    if other and rank == 1:
        torch.__version__ = "9.9"  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        good = doctor.group_report(30)
    return good, said.getvalue()


@functools.cache
def both() -> list[list[tuple[bool, str]]]:
    """Of processes that are alike, and of those of which one has another torch."""
    return processes.run_in_turn(2, (checked, False), (checked, True), timeout=None)


def test_processes_that_are_alike() -> None:
    (good, said), (also, silent) = both()[0]
    assert good
    assert also
    assert silent == ""
    assert "2 processes connected" in said
    assert f"torch {torch.__version__}" in said
    assert "us of one number" in said
    assert "runs would be refused" not in said


def test_another_torch_on_one_of_them_is_told_and_fails_on_all() -> None:
    (good, said), (also, _) = both()[1]
    assert not good
    assert not also
    assert f"torch: process 1 has 9.9, the others have {torch.__version__}" in said


def test_a_process_that_does_not_come_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REGIMES_RENDEZVOUS", (tmp_path / "rendezvous").as_uri())
    with pytest.raises(TrainingError, match="process 0 of 2 lost contact with the others"):
        doctor.group_report(1)


def measured(rank: int, hosts: list[str]) -> dict[str, dict[str, float]]:
    """The links of a group whose processes count as on these machines."""
    device = torch.device("cpu")
    world = connect_world(len(hosts), device, 30)
    try:
        return {
            name: vars(link) for name, link in links.measure_links(world, hosts, device).items()
        }
    finally:
        world.close()


@pytest.mark.slow
def test_links_within_and_between_machines(tmp_path: Path) -> None:
    everyone = processes.run(measured, 4, ["a", "a", "b", "b"], timeout=None)
    assert all(found == everyone[0] for found in everyone)
    assert [*everyone[0]] == ["within", "between"]
    found = {name: Network(**link) for name, link in everyone[0].items()}
    assert all(1e6 < link.bandwidth < 1e13 for link in found.values())
    assert all(1e-7 < link.latency < 1 for link in found.values())
    links.write_links(tmp_path / "links.json", found)
    assert read_links(tmp_path / "links.json") == found
    for hosts, names in (("ab", ["between"]), ("aa", ["within"])):
        (one, *_) = processes.run(measured, 2, [*hosts], timeout=None)
        assert [*one] == names


def test_links_need_a_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        cli.doctor(links=tmp_path / "links.json")


def test_who_is_slow_is_named_but_fails_nothing() -> None:
    alike = dict.fromkeys(doctor.ALIKE, "1")
    every = [alike | {"seconds": seconds} for seconds in (1.0, 1.1, 2.0, 1.0)]
    assert doctor.describe_differences(every) == [("speed", "process 2 takes 2.0 times as long")]
    assert not {"speed", "python"} & {*doctor.FATAL}


def test_a_process_is_held_against_the_others() -> None:
    """Of two, the median of both would be half as far away."""
    one = dict.fromkeys(doctor.ALIKE, "1") | {"seconds": 1.0}
    slow = one | {"seconds": 2.9}
    assert doctor.describe_differences([one, slow]) == [
        ("speed", "process 1 takes 2.9 times as long")
    ]
    assert doctor.describe_differences([slow]) == []


def test_of_three_versions_none_is_that_of_all_others() -> None:
    one = dict.fromkeys(doctor.ALIKE, "1") | {"seconds": 1.0}
    every = [one, one, *(one | {"torch": version} for version in "232")]
    assert doctor.describe_differences(every) == [
        ("torch", "process 2, 4 has 2, process 3 has 3, the others have 1")
    ]
