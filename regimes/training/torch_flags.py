"""How exactly a GPU computes: ``deterministic`` and ``precision`` of a configuration.

torch keeps both in flags of the whole process. A run on a GPU sets them at its start and restores
them at its end; a run on the CPU leaves them alone, because they could change its numbers. TF32 is
allowed in training steps only: in forward, backward and compression, which share the flags because
compression may run in another thread during backward.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from regimes.base.errors import ConfigError
from regimes.base.precision import is_half

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS is not deterministic; read at first use


class Numerics:
    """Sets torch's flags for one run, until ``close`` restores them.

    Args:
        dtype, precision, evaluate_precision, deterministic, channels_last: of the configuration.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        dtype: str = "float32",
        precision: str = "strict",
        evaluate_precision: str = "strict",
        deterministic: bool = True,
        channels_last: bool = False,
    ) -> None:
        self._flags = ExitStack()
        gpu = device.type == "cuda"
        self.tf32 = gpu and precision == "tf32"
        self.evaluates_as_trained = evaluate_precision == "training"
        half = precision == "bfloat16"
        self.autocast = partial(torch.autocast, device.type, torch.bfloat16) if half else None
        whole = precision == "strict" and not is_half(getattr(torch, dtype))
        if gpu and channels_last and whole:
            # cuDNN's kernels of this layout are for tensor cores, which strict numbers leave idle
            warnings.warn(
                f"channels_last = true with {dtype} numbers and precision = 'strict': on a "
                "GPU this layout is for 'tf32' and 'bfloat16', and without them may take several "
                "times as long, which was not measured: leave it out, or set precision",
                stacklevel=2,
            )
        if gpu:
            with warnings.catch_warnings():  # some versions advise against the flags, once
                warnings.simplefilter("ignore")
                self._flags.enter_context(_allow_tf32(False))
        if gpu and deterministic:
            self._flags.enter_context(_deterministic())

    def training(self) -> AbstractContextManager[None]:
        """Return the context of a training step, in which TF32 may be allowed."""
        return _allow_tf32(True) if self.tf32 else nullcontext()

    def evaluation(self) -> AbstractContextManager[Any]:
        """Return the context of an evaluation: strict, or as a training step if the configuration
        says so."""
        if not self.evaluates_as_trained:
            return nullcontext()
        return self.training() if self.autocast is None else self.autocast()

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
    on = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with _set_attributes(wanted):
            yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn)
        if workspace is None:
            del os.environ[WORKSPACE]


@contextmanager
def _allow_tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32, or forbid it, in matrix products and in cuDNN.

    torch has two interfaces: flags (``allow_tf32``, ``set_float32_matmul_precision``) and words
    (``fp32_precision``). Both are set: reading a flag that contradicts the words raises, and models
    read them through ``cudnn.flags``.
    """
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    # wider scopes first: a word "none" inherits from the wider scope, and is read as its word
    words = [backends, cudnn, cudnn.conv, cudnn.rnn, matmul, backends.mkldnn.matmul]
    with _set_attributes(
        [(place, "fp32_precision", "none") for place in words]
    ):  # now no flag contradicts
        ours, word = ("high", "tf32") if allowed else ("highest", "ieee")
        precision, cudnn_flag = torch.get_float32_matmul_precision(), True
        with contextlib.suppress(RuntimeError):  # the flag contradicts a word that allows TF32
            cudnn_flag = cudnn.allow_tf32
        try:
            torch.set_float32_matmul_precision(ours)
            cudnn.allow_tf32 = allowed
            for place in words[1:]:
                place.fp32_precision = word
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = cudnn_flag


@contextmanager
def _set_attributes(wanted: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, given as (object, name, value), while inside."""
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
    """Turn torch's error for an operation without a deterministic version into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        if WORKSPACE in str(error):  # cuBLAS has been used before the run set it
            raise ConfigError(
                "deterministic = true comes too late for cuBLAS, which this process has used: set "
                f"{WORKSPACE}=:4096:8 in the environment before Python starts"
            ) from error
        what = str(error).splitlines()[0].partition(", but")[0]
        raise ConfigError(f"{what}: set deterministic = false, or use another model") from error
