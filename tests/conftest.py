"""One thread per test process, shape checks on, real processes for the tests that need them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import shapes
from hypothesis import settings

shapes.install()  # before any test imports a regimes module
settings.register_profile("untimed", deadline=None)  # a test is no benchmark
settings.load_profile("untimed")


SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ``slow.txt``: further cases of tests of which others stay, and tests whose
    subject shorter ones cover."""
    names = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.slow)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # the whole suite
        unknown = sorted(names - {item.nodeid for item in items})
        if unknown:
            raise pytest.UsageError(f"tests/slow.txt names no test: {unknown[0]}")


@pytest.fixture(autouse=True)
def _checked_shapes() -> None:
    shapes.begin_test()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """Files survive a killed process without ``fsync``; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


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
