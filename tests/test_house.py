"""The house: who may import whom, read from the source; what is imported when; the command line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = [
    "records/__init__",
    "records/archive",
    "records/files",
    "records/reader",
    "records/writer",
    "config",
    "detectors/__init__",
    "detectors/base",
    "detectors/change",
    "detectors/controls",
    "detectors/cusum",
    "detectors/msdr",
    "learning_rate",
    "network",
    "cost",
    "gpus",
    "grace",
    "policies/__init__",
    "policies/base",
    "policies/detected",
    "policies/ladders",
    "policies/schedules",
    "history",
    "replay",
    "agreement",
    "bench",
    "spelt",
    "errors",
    "presets/__init__",
    "presets/cpu",
    "presets/families",
    "presets/paper",
    "presets/registry",
    "quirks",
    "launch",
    "cli",
    "progress",
    "terminal",
    "watch",
    "watchers",
    "drawing/bands",
    "drawing/levels",
    "drawing/metrics",
    "drawing/numbers",
    "drawing/panels",
    "drawing/style",
    "report/__init__",
    "report/content",
    "report/origin",
    "report/pictures",
    "__init__",
    "__main__",
]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, outside `if TYPE_CHECKING`."""
    found = set()
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def uses(modules: set[str], name: str) -> bool:
    return any(m == name or m.startswith(name + ".") for m in modules)


def test_only_world_talks_to_torch_distributed() -> None:
    users = {p.relative_to(ROOT).as_posix() for p in sources("regimes") + sources("analysis")
             if uses(imports(p), "torch.distributed")}  # fmt: skip
    assert users == {"regimes/world.py", "regimes/doctor.py"}  # doctor tries the backends


def test_regimes_never_imports_analysis() -> None:
    assert not [p for p in sources("regimes") if uses(imports(p), "analysis")]


def test_analysis_reads_records_only() -> None:
    for path in sources("analysis"):
        used = imports(path)
        assert not uses(used, "torch"), path
        assert not uses(used, "regimes.train"), path
        assert not uses(used, "regimes.world"), path


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_imports_none(name: str) -> None:
    assert not uses(imports(ROOT / "regimes" / f"{name}.py", top_level_only=True), "torch")


def test_compression_and_instruments_stand_below_the_loop() -> None:
    for package in ("regimes/compression", "regimes/instruments", "regimes/models"):
        for path in sources(package):
            used = imports(path)
            for above in ("train", "policies", "cli", "presets", "launch", "records"):
                assert not uses(used, f"regimes.{above}"), (path, above)


def test_import_and_presets_do_without_torch() -> None:
    code = "import sys, regimes; regimes.get_preset('smoke'); regimes.RunConfig; regimes.load; "
    code += "assert not {'torch', 'pandas', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    import regimes

    for name in regimes.__all__:
        assert getattr(regimes, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = regimes.trane  # type: ignore[attr-defined]


# -- the command line ------------------------------------------------------------------------


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "regimes", *words)
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, check=False)


def test_run_resume_watch_and_ablate(tmp_path: Path) -> None:
    short = ["--set", "epochs=2", "--set", "data.train_size=100"]
    done = command("run", "smoke", *short, "--seed", "5", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "runs/smoke/seed-5: accuracy" in done.stdout
    again = command("run", "smoke", *short, "--seed", "5", "--workers", "2", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    again = command("run", "smoke", *short, "--seed", "5", "--workers", "2", "--resume",
                    cwd=tmp_path)  # fmt: skip
    assert again.returncode == 0, again.stderr
    seen = command("watch", "runs/smoke/seed-5", "--once", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    ablate = [
        "ablate",
        "smoke",
        *short,
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--schedules",
        "low",
        "--schedules",
        "high",
    ]
    done = command(*ablate, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 runs in runs/smoke, 0 already finished" in done.stdout
    (tmp_path / "runs/smoke/low/seed-1/epochs.jsonl").write_text("")
    for name in ("epoch-0001", "epoch-0002"):
        for file in (tmp_path / "runs/smoke/low/seed-1/checkpoints" / name).iterdir():
            file.unlink()
        (tmp_path / "runs/smoke/low/seed-1/checkpoints" / name).rmdir()
    done = command(*ablate, cwd=tmp_path)
    assert "4 runs in runs/smoke, 3 already finished" in done.stdout
    assert "[1/1] low/seed-1" in done.stdout


def test_presets_and_doctor(tmp_path: Path) -> None:
    listed = command("presets", cwd=tmp_path)
    assert "paper-vgg19bn-cifar10" in listed.stdout
    toml = command("presets", "smoke/high", cwd=tmp_path)
    (tmp_path / "mine.toml").write_text(toml.stdout)
    done = command("run", "mine.toml", "--set", "epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "runs/mine/seed-0" in done.stdout
    checked = command("doctor", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "gloo" in checked.stdout


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("run", "smoke", "--out", "file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to file/run: Not a directory\n"


def test_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "regimes", "run", "smoke",
             "--set", "epochs=2", "--out", "run"]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: accuracy" in done.stdout
    assert len((tmp_path / "run/epochs.jsonl").read_text().splitlines()) == 2
