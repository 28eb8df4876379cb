"""How exactly a GPU computes: ``deterministic`` and ``precision`` of a configuration.

torch keeps this in flags of the whole process. A run on a GPU sets them at its start and puts them
back at its end; a run on the CPU, whose numbers they could change, leaves them alone. Whatever the
precision, TF32 is allowed in training steps only (forward, backward, compression: the flags hold
for all threads, and processes must round alike). Instruments, evaluation and optimisers have full
float32, and only the forward and backward passes are under autocast (`training.gradients`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from regimes.config import RunConfig
from regimes.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS is not deterministic; read at first use


class Numerics:
    """The flags of one run, set until ``close``."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._flags = ExitStack()
        gpu = device.type == "cuda"
        self.tf32 = gpu and config.precision == "tf32"
        if gpu:
            with warnings.catch_warnings():  # some versions advise against the flags, once
                warnings.simplefilter("ignore")
                self._flags.enter_context(_allow_tf32(False))
        if gpu and config.deterministic:
            self._flags.enter_context(_deterministic())

    def training(self) -> AbstractContextManager[None]:
        """Around a training step."""
        return _allow_tf32(True) if self.tf32 else nullcontext()

    def close(self) -> None:
        self._flags.close()


@contextmanager
def _deterministic() -> Iterator[None]:
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    wanted = [
        (cudnn, "deterministic", True),
        (cudnn, "benchmark", False),
        (filling, "fill_uninitialized_memory", False),
    ]
    on, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with _set(wanted):
            yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn)
        if workspace is None:
            del os.environ[WORKSPACE]


@contextmanager
def _allow_tf32(allowed: bool) -> Iterator[None]:
    """In products of matrices and in cuDNN.

    torch has two interfaces for it: flags (``allow_tf32``, ``set_float32_matmul_precision``) and
    words (``fp32_precision``). Both are set, because a flag that contradicts the words raises when
    it is asked, which ``cudnn.flags`` does in models.
    """
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    # wider words first: a word "none" stands for the wider one, and is read as that
    words = [backends, cudnn, cudnn.conv, cudnn.rnn, matmul, backends.mkldnn.matmul]
    with _set([(place, "fp32_precision", "none") for place in words]):  # now no flag contradicts
        ours, word = ("high", "tf32") if allowed else ("highest", "ieee")
        precision, cudnn_flag = torch.get_float32_matmul_precision(), _cudnn_allows_tf32()
        try:
            torch.set_float32_matmul_precision(ours)
            cudnn.allow_tf32 = allowed
            for place in words[1:]:
                place.fp32_precision = word
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = cudnn_flag


def _cudnn_allows_tf32() -> bool:
    """The flag, while no word allows it; torch refuses to read a flag that does."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return True


@contextmanager
def _set(wanted: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """(place, attribute, value) while inside."""
    before: list[Any] = []
    try:
        for place, name, value in wanted:
            before.append(getattr(place, name))
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(wanted, before, strict=False):
            setattr(place, name, value)


@contextmanager
def explain_nondeterminism() -> Iterator[None]:
    """ConfigError for an operation that cannot be had deterministically."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        what = str(error).splitlines()[0].partition(", but")[0]
        raise ConfigError(f"{what}: set deterministic = false, or use another model") from error
