"""The processes of `regimes run --processes` (oracle: the interfaces that this machine has)."""

from __future__ import annotations

import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regimes.presets import get_preset
from regimes.search import processes


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_each_is_told_what_the_first_was(
    resume: bool, quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    def start(command: list[str], *_: Any) -> subprocess.Popen[bytes]:
        told.append(command)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    spawn = partial(processes.spawn_processes, get_preset("smoke"), tmp_path / "run")
    spawn(2, resume=resume, quiet=quiet)
    assert len(told) == 2
    for command in told:
        assert (("--resume" in command), ("--quiet" in command)) == (resume, quiet)
        assert command[command.index("--out") + 1] == str(tmp_path / "run")


@pytest.mark.parametrize("own", [None, "eth7"])
def test_they_meet_on_an_interface_that_there_is(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the machine to itself, unless the user has named one."""
    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> None:
        started.append(env)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if own is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", own)
    processes._start(["true"], 0, 2, str(tmp_path), tmp_path / "log")
    name = started[0]["GLOO_SOCKET_IFNAME"]
    if own is not None:
        assert name == own
        return
    assert name in {name for _, name in socket.if_nameindex()}
    flags = Path("/sys/class/net", name, "flags")
    assert not flags.exists() or int(flags.read_text(), 16) & 8, "it is the loopback's flag"
