"""Where a record comes from: code, libraries, machine. No torch at import."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's source files; processes compare it at start-up."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """The commit of the checkout that the package runs from, with "+" if it has changes."""
    try:
        git = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty=+", "--abbrev=12"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def code() -> dict[str, Any]:
    """Version, commit and digest of this package."""
    from regimes import __version__

    return {"version": __version__, "commit": commit(), "digest": code_digest()}


def machine() -> dict[str, Any]:
    """Python, libraries, processor, threads."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [
            torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
