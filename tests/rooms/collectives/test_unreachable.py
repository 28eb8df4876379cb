"""Processes that do not connect, because one announces the address of its node for itself.

Oracle: gloo's own texts, of two processes in network namespaces of their own, both on ``lo``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from regimes.base.errors import TrainingError
from regimes.collectives import connect, group, lost_processes
from regimes.collectives.process_group import Group

PLACE = "Gloo connectFullMesh failed with [/pytorch/gloo/transport/tcp/pair"
REFUSED = (
    f"{PLACE}.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:4"
)
SILENT = f"{PLACE}.h:311] Connect timeout [none]"
CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0"
)
WAY = "on several nodes set GLOO_SOCKET_IFNAME on each to its interface to the others"
OURS = "that one announces 127.0.0.1, where every node finds itself: " + WAY


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.mark.parametrize(
    ("text", "there", "said"),
    [
        (REFUSED, "1", OURS),
        (REFUSED.replace("127.0.0.1", "::1"), "1", OURS.replace("127.0.0.1", "::1")),
        (SILENT, "1", f"lost contact with the others here (nobody): {WAY}"),
        (CLOSED, "1", f"lost contact with the others here (nobody): {CLOSED}"),
        (REFUSED, "2", f"lost contact with the others here (nobody): {REFUSED}"),
    ],
)
def test_the_interface_is_named_where_it_can_be_the_cause(
    text: str, there: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", there)  # 2: all processes are on one node
    error = lost_processes.describe_loss("process 0 of 2", "here", "nobody", RuntimeError(text))
    assert said in str(error)
    assert str(error).endswith(text)  # last, what torch says
    assert ("GLOO_SOCKET_IFNAME" in str(error)) == (WAY in said)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError(REFUSED)


def test_at_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("REGIMES_RENDEZVOUS", (tmp_path / "meet").as_uri())
    monkeypatch.setattr(connect, "_init_process_group", fails)
    monkeypatch.setattr(connect, "name_silent", lambda *_: "nobody")
    with pytest.raises(TrainingError, match=r"process 0 of 2 does not reach .* GLOO_SOCKET_IFNAME"):
        connect.connect_world(2, torch.device("cpu"), 5.0)


def test_in_attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), world_size=1, rank=0)
    monkeypatch.setattr(Group, "of_some", fails)
    try:
        with pytest.raises(
            TrainingError, match=r"does not reach another one in attach\(\), .*eth0"
        ):
            group.on_group(dist.group.WORLD, torch.device("cpu"), 5.0)
    finally:
        dist.destroy_process_group()
