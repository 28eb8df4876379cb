"""Where a record comes from: code, libraries, machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from regimes.base.config.recorded import RECORDED
from regimes.base.config.registry import find_imported

PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """Compute SHA-256 over the package's source files; processes compare it at start-up."""
    return digest_of((p.relative_to(PACKAGE), p.read_bytes()) for p in PACKAGE.rglob("*.py"))


def digest_of(files: Iterable[tuple[PurePath, bytes]]) -> str:
    """Digest (path within the package, content) pairs, in any order."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(str(path).encode())
        digest.update(content)
    return digest.hexdigest()


def find_commit() -> str | None:
    """Find the commit of the checkout that the package runs from, with "+" if it has changes; None
    without a checkout."""
    try:
        return _run_git("describe", "--always", "--dirty=+", "--abbrev=12").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def find_changes() -> list[str] | None:
    """List the files of the package that differ from the checkout's last commit: changed, deleted,
    or unknown to git, ignored ones as well; None where the package is no checkout."""
    try:
        _run_git("ls-files", "--error-unmatch", "__init__.py")
        changed = _run_git("diff", "--name-only", "--relative", "HEAD", "--", ".")
        untracked = _run_git("ls-files", "--others", "--", ":(glob)**/*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return sorted({*changed.splitlines(), *untracked.splitlines()})


def _run_git(*words: str) -> str:
    git = ["git", "-C", str(PACKAGE), *words]
    return subprocess.run(git, capture_output=True, text=True, timeout=30, check=True).stdout


def describe_code(
    config: Mapping[str, Any] | None = None, objects: Iterable[Any] = ()
) -> dict[str, str | None]:
    """Describe this package by version, commit and digest, and further code by `own_code`."""
    from regimes import __version__

    ours = {"version": __version__, "commit": find_commit(), "digest": code_digest()}
    return ours | own_code(config or {}, objects)


# -- code of a user's own ----------------------------------------------------------------------

# The machine's entry of a record has the versions of these.
NOT_OWN = {*sys.stdlib_module_names, "regimes", "torch", "numpy"}


def own_code(config: Mapping[str, Any], objects: Iterable[Any] = ()) -> dict[str, str]:
    """Compute SHA-256 of the file of each module that a run takes classes or functions from and
    that is none of this package: ``{"mine.digest": "3f1a..."}``. A file that cannot be read is
    ``{"mine": "source unreadable"}``. Modules that these import are not read.

    Args:
        config: plain; classes in it are named ``package.module:Class``, or as `RECORDED` says.
        objects: further classes and functions.
    """
    kinds = RECORDED.values()  # several kinds may have one name
    named = [known.get(name, name) for name in _find_plug_in_names(config) for known in kinds]
    table: dict[str, str] = {}
    for thing in [*filter(None, map(find_imported, named)), *objects]:
        thing = getattr(thing, "func", thing)  # of functools.partial
        kind = thing if hasattr(thing, "__qualname__") else type(thing)
        for part in getattr(kind, "__mro__", (kind,)):
            module = getattr(part, "__module__", None) or ""
            if module.partition(".")[0] not in NOT_OWN:
                table |= _digest_source(module, part)
    return dict(sorted(table.items()))


def _find_plug_in_names(config: Mapping[str, Any]) -> Iterator[str]:
    """The names of the plug-ins of a configuration, at any depth."""
    for key, value in config.items():
        if key == "instruments" and isinstance(value, Mapping):
            yield from value
        for table in value if isinstance(value, list | tuple) else [value]:
            if isinstance(table, Mapping):
                if isinstance(name := table.get("name"), str):
                    yield name
                yield from _find_plug_in_names(table)


def _digest_source(module: str, thing: Any) -> dict[str, str]:
    try:
        if module == "__main__":  # the rest of a script or notebook differs from run to run
            text = inspect.getsource(thing).encode()
        else:
            text = Path(inspect.getsourcefile(sys.modules[module]) or "").read_bytes()
    except (OSError, TypeError, KeyError):
        return {module: "source unreadable"}
    name = f"{module}.{thing.__qualname__}" if module == "__main__" else module
    return {f"{name}.digest": hashlib.sha256(text).hexdigest()}


def describe_machine() -> dict[str, Any]:
    """Describe Python, libraries, processor and threads; the GPU and its libraries if one is in
    use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        **({"gpu": _describe_gpu()} if torch.cuda.is_initialized() else {}),
        "command": command.encode(errors="backslashreplace").decode(),  # bytes that are no UTF-8
    }


def find_peers() -> list[list[int]]:
    """List, for each GPU of this process, the GPUs with memory that it can read directly."""
    import torch

    gpus = range(torch.cuda.device_count())
    reads = torch.cuda.can_device_access_peer
    return [[other for other in gpus if other != gpu and reads(other, gpu)] for gpu in gpus]


def _describe_gpu() -> dict[str, Any]:
    """The current GPU, its libraries, and `find_peers`."""
    import torch

    from regimes.base.torch_compat import has_nccl

    cudnn = torch.backends.cudnn.version()
    nccl = torch.cuda.nccl.version() if has_nccl() else None
    return {
        "name": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "peers": find_peers(),
    }


def processor_name() -> str:
    """Name the processor, as far as the system knows it; a name without a number, as virtual
    machines give it, has family and model beside it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    parts = [line.partition(":") for line in reversed(lines)]
    # reversed above, so that the first processor's values are the ones that stay
    fields = {key.strip(): value.strip() for key, _, value in parts}
    name = fields.get("model name", platform.processor())
    if any(letter.isdigit() for letter in name) or not {"cpu family", "model"} <= fields.keys():
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"
