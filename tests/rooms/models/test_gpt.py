"""The decoder-only Transformer: its formula for parameters, its equations written out, rotary
positions against the formula of the paper, and all instruments on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import gpt as config
from runs import weights
from torch import nn
from torch.nn import functional

import regimes
from regimes.base.errors import ConfigError
from regimes.data.models import build_model
from regimes.data.models.transformer import GPT, rotary_angles, rotate_pairs

torch.set_num_threads(1)


def make(**choice: Any) -> GPT:
    torch.manual_seed(0)
    model = build_model("gpt", **{"classes": 11, "sequence": 8, "width": 8, "depth": 2, **choice})
    assert isinstance(model, GPT)
    return model.double().eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_parameter_count(tied: bool, positions: str) -> None:
    def count(classes: int, **choice: Any) -> int:
        with torch.device("meta"):
            model = build_model("gpt", classes=classes, tied=tied, positions=positions, **choice)
        return sum(p.numel() for p in model.parameters())

    for c, w, depth, t in ((17, 48, 3, 5), (256, 64, 2, 64)):
        formula = c * w + depth * (12 * w * w + 2 * w) + w
        formula += 0 if tied else c * w
        formula += t * w if positions == "learned" else 0
        assert count(c, width=w, depth=depth, sequence=t) == formula
    if tied and positions == "rotary":
        assert formula == 115_008  # the docstring


def test_rotary_positions_are_the_papers_matrices() -> None:
    """Su et al. (2021), equation 15: blocks (cos, -sin; sin, cos) of t theta_k on the diagonal,
    theta_k = 10,000^(-2 k / d); and equation 16: only differences of times matter."""
    size, times = 6, 9
    x = torch.randn(2, times, size, dtype=torch.float64)
    found = rotate_pairs(x, rotary_angles(times, size, x))
    for t in range(times):
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for k in range(size // 2):
            angle = t * 10_000 ** (-2 * k / size)
            matrix[2 * k, 2 * k] = matrix[2 * k + 1, 2 * k + 1] = math.cos(angle)
            matrix[2 * k, 2 * k + 1] = -math.sin(angle)
            matrix[2 * k + 1, 2 * k] = math.sin(angle)
        torch.testing.assert_close(found[:, t], x[:, t] @ matrix.T)
    same = rotate_pairs(x[:, :1].expand(2, times, size), rotary_angles(times, size, x))
    scores = same[0] @ same[1].T
    for offset in range(-3, 4):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rotary_positions_have_heads_of_their_own() -> None:
    x = torch.randn(2, 5, 2, 3, 4)
    whole = rotate_pairs(x, rotary_angles(5, 4, x))
    torch.testing.assert_close(
        whole[:, :, 1, 2], rotate_pairs(x[:, :, 1, 2], rotary_angles(5, 4, x))
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_it_equals_its_equations(tied: bool, positions: str) -> None:
    model, x = make(depth=1, heads=2, tied=tied, positions=positions), tokens(2, 6)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    p = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        centred = y - y.mean(2, keepdim=True)
        return centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt() * p[name]

    y = p["embedding.weight"][x]
    if positions == "learned":
        y = y + p["places.weight"][:6]
    a = norm(y, "blocks.0.norm1.weight") @ p["blocks.0.qkv.weight"].T
    mixed = []
    for head in range(2):
        q, k, v = (a[..., 8 * i + 4 * head :][..., :4] for i in range(3))
        if positions == "rotary":
            q, k = rotate_pairs(q, rotary_angles(6, 4, q)), rotate_pairs(k, rotary_angles(6, 4, k))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        mixed.append(scores.softmax(2) @ v)
    y = y + torch.cat(mixed, 2) @ p["blocks.0.out.weight"].T
    inner = functional.gelu(norm(y, "blocks.0.norm2.weight") @ p["blocks.0.up.weight"].T)
    y = y + inner @ p["blocks.0.down.weight"].T
    expected = norm(y, "norm.weight") @ p["embedding.weight" if tied else "head.weight"].T
    torch.testing.assert_close(model(x)[0], expected)
    with torch.no_grad():
        torch.testing.assert_close(model.train()(x)[0], expected)  # the other kernel


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = GPT(classes=500, sequence=64, width=64, depth=8, positions="learned", tied=False)
    expected = {"out": 0.02 / 4, "down": 0.02 / 4}
    for name, parameter in model.named_parameters():
        layer = name.split(".")[-2]
        if parameter.dim() == 1:
            assert bool((parameter == 1).all())
        else:
            std = parameter.std().item()
            assert std == pytest.approx(expected.get(layer, 0.02), rel=0.05), name


def test_bad_choices_are_one_sentence() -> None:
    for choice, sentence in (
        ({"width": 12}, "width = 12: expected a multiple of 8"),
        ({"width": 10, "positions": "learned"}, "width = 10: expected a multiple of 4"),
        ({"heads": 0}, "model.heads = 0: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make(**choice)
    with pytest.raises(ConfigError, match="length = 9: expected at most 8"):
        make(positions="learned")(tokens(1, 9))
    with pytest.raises(ConfigError, match="'lstm' has no choice of heads"):
        build_model("lstm", classes=3, heads=2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_of_embedding_attention_and_both_halves(dropout: float) -> None:
    model, x = make(dropout=dropout).train(), tokens(2, 6)
    assert torch.equal(model(x)[0], model(x)[0]) == (dropout == 0)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [dropout] * 3


# -- a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_instruments_measure_it_and_leave_no_trace(tmp_path: Path) -> None:
    tables = [
        "curvature={images=8,batch=4,probes=2,max_products=20}",
        "noise={}",
        "error={}",
        "overlap={batches=[3],count=2}",
        "moments={}",
    ]
    plain = regimes.run(config(), tmp_path / "none")
    record = regimes.run(config(*(f"instruments.{t}" for t in tables)), tmp_path / "all")
    for name, tensor in weights(tmp_path / "none").items():
        assert torch.equal(tensor, weights(tmp_path / "all")[name]), name
    found = record.epochs[["eigenvalue", "hessian_trace", "noise_scale", "overlap:b3"]]
    assert found.notna().all(axis=None)
    assert record.layers.filter(like="error").notna().any(axis=None)
    assert plain.epochs["train_loss"].iloc[1] < plain.epochs["train_loss"].iloc[0]
