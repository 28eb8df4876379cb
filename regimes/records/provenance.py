"""Where a record comes from: code, libraries, machine. No torch at import."""

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
    """The digest of sources, each a path within the package and its content, in any order."""
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
    """Files of the package that are not as in the checkout's last commit: changed, deleted, or
    sources that git does not have, ignored ones as well; None where the package is no checkout."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        changed = _git("diff", "--name-only", "--relative", "HEAD", "--", ".")
        others = _git("ls-files", "--others", "--", ":(glob)**/*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return sorted({*changed.splitlines(), *others.splitlines()})


def _git(*words: str) -> str:
    git = ["git", "-C", str(PACKAGE), *words]
    return subprocess.run(git, capture_output=True, text=True, timeout=30, check=True).stdout


def code() -> dict[str, Any]:
    """Version, commit and digest of this package."""
    from regimes import __version__

    return {"version": __version__, "commit": commit(), "digest": code_digest()}


def machine() -> dict[str, Any]:
    """Python, libraries, processor, threads; of the GPU and its libraries if one is in use."""
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
        **({"gpu": _gpu()} if torch.cuda.is_initialized() else {}),
        "command": _printable(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
    }


def peers() -> list[list[int]]:
    """Of each GPU that this process sees: which others read its memory, the host not between."""
    import torch

    every = range(torch.cuda.device_count())
    reads = torch.cuda.can_device_access_peer
    return [[other for other in every if other != gpu and reads(other, gpu)] for gpu in every]


def _gpu() -> dict[str, Any]:
    """The current GPU, the libraries that compute and send there, and who reads whose memory."""
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


def _printable(text: str) -> str:
    """Bytes of a command line that are no letters, spelt out."""
    return text.encode(errors="backslashreplace").decode()


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
