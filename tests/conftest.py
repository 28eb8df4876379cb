"""One thread per test process, shape checks on, real processes for the tests that need them."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import durations
import pytest
import shapes
from hypothesis import settings

gc.disable()  # nothing of what is imported is garbage; until `pytest_collection_finish`
shapes.install()  # before any test imports a regimes module
import read_once  # noqa: E402

read_once.install()

TESTS = Path(__file__).parent
# Processes that a test starts import what tests share, and this checkout, wherever they are.
FOUND = [str(TESTS / "shared"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, FOUND))
settings.register_profile("untimed", deadline=None)  # a test is no benchmark
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="run all cases that are not marked slow, and write tests/durations.txt",
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests leave behind stays, as what they have imported: no later collection, of
    which some tests ask for many, looks at it again."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out; on several workers the longest files go first."""
    seconds = durations.read()
    names = [item.nodeid for item in items if not item.get_closest_marker("slow")]
    left_out: set[str] = set()
    if not config.getoption("--record-durations"):
        left_out = durations.cases_left_out(seconds, names)
        left_out -= {item.nodeid for item in items if item.get_closest_marker("whole")}
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        running = [name for name in names if name not in left_out]  # in one order on all workers
        files = durations.seconds_of_files(seconds, running)
        items.sort(key=lambda item: -files.get(item.nodeid.partition("::")[0], 0.0))


def pytest_sessionstart(session: pytest.Session) -> None:
    """The server of processes and what each optimizer imports are there before the first test is
    measured, which would pay for them."""
    if session.config.getoption("--record-durations"):
        from ddp_scripts import group

        group.run(operator.index, 1)


_measured = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_measured] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.config.getoption("--record-durations"):
        return (yield)
    start = durations.cpu_seconds()
    answer = yield
    item.config.stash[_measured][item.nodeid] = durations.cpu_seconds() - start
    return answer


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_measured] |= node.workeroutput.get("durations", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    measured = session.config.stash[_measured]
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["durations"] = measured
    elif measured:
        durations.write(measured)


@pytest.fixture(autouse=True)
def _checked_shapes() -> None:
    shapes.begin_test()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """Files survive a killed process without ``fsync``; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _committed_archives_are_read_once() -> Iterator[None]:
    """Each archive of ``data/`` is unpacked once per worker, and its records, which are read only,
    are shared: half the time of the study's tests goes into reading them."""
    from regimes.base import inputs
    from regimes.records import archive

    data, original = Path(__file__).parents[1] / "data", archive.unpack_records
    folders: dict[Path, Path] = {}
    load = functools.lru_cache(maxsize=300)(archive.load)

    @contextlib.contextmanager
    def unpacked(place: str | Path) -> Iterator[Path]:
        path = Path(place).resolve()
        if not path.is_file() or data not in path.parents:
            with original(place) as folder:
                yield folder
            return
        if path not in folders:
            folders[path] = kept.enter_context(original(place))
        inputs.add_input(Path(place))
        yield folders[path]

    def shared(folder: Path) -> Any:
        known = any(root in folder.parents for root in folders.values())
        return load(folder) if known else load.__wrapped__(folder)

    with contextlib.ExitStack() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "unpack_records", unpacked)
        patch.setattr(archive, "load", shared)
        yield


@pytest.fixture(autouse=True, scope="session")
def _pictures_have_few_pixels() -> Iterator[None]:
    """Of the same size on paper, and laid out as ever: no test counts their pixels, which take
    more than half the time of a saved figure. Only where some test file draws, as all together do;
    one file that draws none does not import matplotlib."""
    style = sys.modules.get("regimes.plotting.style")
    if style is None:
        yield
        return
    render = style.render_figure

    @functools.wraps(render)
    def coarse(*arguments: Any, **options: Any) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(style, "DPI", 50)
            return render(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "render_figure", coarse)
        yield


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield
    dist.destroy_process_group()


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
