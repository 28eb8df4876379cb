"""One thread per test process, shape checks on, real processes for the tests that need them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import shapes
from hypothesis import settings

shapes.install()  # before any test imports a regimes module
settings.register_profile("untimed", deadline=None)  # a test is no benchmark
settings.load_profile("untimed")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`regimes WORDS` in ``tmp_path``, in this process: starting Python costs more than it does."""
    from regimes.__main__ import main

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["regimes", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main()
        return subprocess.CompletedProcess(words, int(stop.value.code or 0), *capsys.readouterr())

    return call
