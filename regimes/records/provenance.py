"""Where a record comes from: code, libraries, machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's source files; processes compare it at start-up."""
    return digest_of((p.relative_to(PACKAGE), p.read_bytes()) for p in PACKAGE.rglob("*.py"))


def digest_of(files: Iterable[tuple[PurePath, bytes]]) -> str:
    """The digest of (path within the package, content) pairs, in any order."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(str(path).encode())
        digest.update(content)
    return digest.hexdigest()


def commit() -> str | None:
    """The commit of the checkout that the package runs from, with "+" if it has changes."""
    try:
        return _git("describe", "--always", "--dirty=+", "--abbrev=12").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def changes() -> list[str] | None:
    """Files of the package that differ from the checkout's last commit: changed, deleted, or
    unknown to git, ignored ones as well; None where the package is no checkout."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        changed = _git("diff", "--name-only", "--relative", "HEAD", "--", ".")
        untracked = _git("ls-files", "--others", "--", ":(glob)**/*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return sorted({*changed.splitlines(), *untracked.splitlines()})


def _git(*words: str) -> str:
    git = ["git", "-C", str(PACKAGE), *words]
    return subprocess.run(git, capture_output=True, text=True, timeout=30, check=True).stdout


def code() -> dict[str, str | None]:
    """Version, commit and digest of this package."""
    from regimes import __version__

    return {"version": __version__, "commit": commit(), "digest": code_digest()}


def machine() -> dict[str, Any]:
    """Python, libraries, processor and threads; the GPU and its libraries if one is in use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        **({"gpu": _gpu()} if torch.cuda.is_initialized() else {}),
        "command": command.encode(errors="backslashreplace").decode(),  # bytes that are no UTF-8
    }


def peers() -> list[list[int]]:
    """For each GPU of this process: the GPUs whose memory it can read directly."""
    import torch

    gpus = range(torch.cuda.device_count())
    reads = torch.cuda.can_device_access_peer
    return [[other for other in gpus if other != gpu and reads(other, gpu)] for gpu in gpus]


def _gpu() -> dict[str, Any]:
    """The current GPU, its libraries, and `peers`."""
    import torch

    cudnn = torch.backends.cudnn.version()
    nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None
    return {
        "name": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "peers": peers(),
    }


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
