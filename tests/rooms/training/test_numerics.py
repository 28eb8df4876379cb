"""What a GPU's flags are during a run, and that they are put back. torch has them without a GPU,
where they change nothing; only that is seen here."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError
from regimes.cli import machine as doctor
from regimes.data import classification
from regimes.instruments.base import EndOfEpochGauge, Reading
from regimes.records import provenance
from regimes.training import loop
from regimes.training.torch_flags import WORKSPACE, Numerics, explain_nondeterminism

pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def asked(*questions: Callable[[], Any]) -> list[Any]:
    """The answers; None where torch refuses one, because its two interfaces contradict."""
    answers: list[Any] = []
    for question in questions:
        answers.append(None)
        with contextlib.suppress(RuntimeError):
            answers[-1] = question()
    return answers


def flags() -> dict[str, Any]:
    backends = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    tf32 = [place.fp32_precision for place in (cudnn.conv, cudnn.rnn, matmul)]
    tf32 += asked(
        torch.get_float32_matmul_precision, lambda: matmul.allow_tf32, lambda: cudnn.allow_tf32
    )
    others = [place.fp32_precision for place in (backends, cudnn, backends.mkldnn.matmul)]
    return {
        "tf32": tf32,
        "others": others,
        "cudnn": [cudnn.deterministic, cudnn.benchmark],
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "only warned of": torch.is_deterministic_algorithms_warn_only_enabled(),
        "workspace": os.environ.get(WORKSPACE),
    }


def allowed() -> bool:
    tf32 = flags()["tf32"]
    assert len({word in ("tf32", "high", True) for word in tf32}) == 1, tf32  # all say the same
    return tf32[0] in ("tf32", True)


def precisions(conv: str, rnn: str, everything: str, matmul: str = "highest") -> None:
    torch.backends.fp32_precision, torch.backends.cudnn.fp32_precision = everything, "none"
    torch.set_float32_matmul_precision(matmul)
    for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        if matmul == "highest":
            place.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = conv
    torch.backends.cudnn.rnn.fp32_precision = rnn


def legacy(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


SET: dict[str, Callable[[], Any]] = {
    "torch's own": lambda: None,
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn alone": lambda: precisions("ieee", "tf32", "none"),
    "cudnn by the old interface": lambda: legacy(False),
    "everything by one word": lambda: precisions("none", "none", "tf32"),
    "everything strict by one word": lambda: precisions("none", "none", "ieee"),
    "warnings": lambda: torch.use_deterministic_algorithms(False, warn_only=True),
}


@pytest.fixture(params=SET)
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """What a user may have set."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    precisions("tf32", "tf32", "none")  # as torch begins
    SET[request.param]()
    yield flags()
    torch.use_deterministic_algorithms(False)
    legacy(True)
    precisions("tf32", "tf32", "none")


def test_the_flags_of_a_gpu_are_set_and_put_back(before: dict[str, Any]) -> None:
    numerics = Numerics(GPU, precision="tf32")
    during = flags()
    assert not allowed()
    assert during["cudnn"] == [True, False]
    assert during["algorithms"]
    assert during["workspace"] == ":4096:8"
    with numerics.training():
        assert allowed()
    assert flags() == during
    numerics.close()
    assert flags() == before


def test_without_determinism_torch_is_left_to_choose(before: dict[str, Any]) -> None:
    numerics = Numerics(GPU, deterministic=False)
    precision = {"tf32": None, "others": None}
    assert flags() | precision == before | precision
    with numerics.training():
        assert not allowed()
    numerics.close()
    assert flags() == before


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("precision", ["strict", "tf32", "bfloat16"])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_channels_last_of_strict_numbers_is_warned_of_on_a_gpu(
    device: torch.device, precision: Any, dtype: Any
) -> None:
    given = {"precision": precision, "dtype": dtype}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        Numerics(device, channels_last=True, **given).close()
        Numerics(device, **given).close()
    said = [str(w.message) for w in heard if "channels_last" in str(w.message)]
    slow = device == GPU and precision == "strict" and dtype != "bfloat16"
    assert len(said) == slow
    assert all("leave it out, or set precision" in sentence for sentence in said)


@pytest.mark.parametrize("precision", ["strict", "tf32"])
def test_both_of_torchs_interfaces_answer_during_a_run(
    precision: str, before: dict[str, Any]
) -> None:
    """They contradict each other where only one is set, and then torch raises: also in
    ``cudnn.flags``, by which models leave cuDNN out."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    numerics = Numerics(GPU, precision=precision)
    steps = numerics.training()
    for context, on in ((contextlib.nullcontext(), False), (steps, precision == "tf32")):
        with context:
            for _ in range(2):  # the second time after the flags of the first are put back
                with cudnn.flags(enabled=False):
                    assert not cudnn.enabled
                assert allowed() == on
                assert cudnn.allow_tf32 == matmul.allow_tf32 == on
    numerics.close()
    assert flags() == before


def test_what_was_left_to_a_wider_word_is_left_to_it_again(before: dict[str, Any]) -> None:
    def under(word: str) -> dict[str, Any]:
        torch.backends.fp32_precision = word
        found = flags()
        torch.backends.fp32_precision = before["others"][0]
        return found

    expected = [under("tf32"), under("ieee")]
    numerics = Numerics(GPU, precision="tf32")
    with numerics.training():
        pass
    numerics.close()
    assert [under("tf32"), under("ieee")] == expected


def test_on_the_cpu_no_flag_is_touched(before: dict[str, Any]) -> None:
    numerics = Numerics(CPU, precision="tf32")
    with numerics.training():
        assert flags() == before
    numerics.close()


inside: list[bool] = []  # not empty: in a training step


@dataclass(frozen=True)
class Looks:
    """An instrument that asks whether this is a training step."""

    every: int = 1

    def start(self, context: Any) -> Any:
        return LooksGauge()


class LooksGauge(EndOfEpochGauge):
    def step(self, stack: Any, updates: Any) -> None:
        assert not inside

    def read(self, epoch: int) -> Reading:
        assert not inside
        return Reading(model={"looked": 1.0})


def test_instruments_and_evaluation_are_not_in_a_training_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def training(self: Numerics) -> Iterator[None]:
        inside.append(True)
        yield
        inside.clear()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert inside
        return torch.nn.functional.cross_entropy(model(x), y)

    evaluate = classification.ImageTask.evaluate

    def outside(*arguments: Any, **named: Any) -> tuple[float, float]:
        assert not inside
        return evaluate(*arguments, **named)

    monkeypatch.setattr(Numerics, "training", training)
    monkeypatch.setattr(classification, "classification_loss", loss)
    monkeypatch.setattr(classification.ImageTask, "evaluate", outside)
    short = [
        "epochs=1",
        "data.train_size=120",
        "data.test_size=100",
        "device=cpu",
        "instruments.test_numerics:Looks.every=1",
    ]
    row = regimes.run(override(regimes.get_preset("smoke"), short), tmp_path / "run").rows[0]
    assert row["model"]["looked"] == 1.0


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_float64_with_less_than_that_is_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"precision = '{precision}': expected \"strict\", as"):
        override(RunConfig(), ["dtype=float64", f"precision={precision}"])


def test_an_operation_that_is_not_deterministic_is_one_sentence() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with (
            pytest.raises(ConfigError, match=r"^put_ does not .* set deterministic = false"),
            explain_nondeterminism(),
        ):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(RuntimeError, match="another"), explain_nondeterminism():
        raise RuntimeError("another")
    assert loop.explain_nondeterminism is explain_nondeterminism


def test_cublas_that_was_used_before_is_named() -> None:
    words = (
        "Deterministic behavior was enabled, but this operation is not deterministic because it "
        f"uses CuBLAS. Set {WORKSPACE}=:4096:8 before running your PyTorch application."
    )
    with pytest.raises(ConfigError, match="too late for cuBLAS"), explain_nondeterminism():
        raise RuntimeError(words)


def test_a_record_names_the_gpu_that_is_in_use_and_its_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "gpu" not in provenance.describe_machine()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (2, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch._C, "_nccl_version", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    found = provenance.describe_machine()["gpu"]
    assert found == {
        "name": "pretended",
        "cuda": "13.0",
        "cudnn": "91002",
        "nccl": "2.27.7",
        "peers": [[1], [0, 2], [0, 1]],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = "pretended, pretended, pretended"
    assert doctor._cuda() == f"{names}; direct access in 5 of 6 ordered pairs"
