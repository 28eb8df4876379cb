"""Networks: the paper's printed parameter counts, shapes, and what a user can get wrong."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from regimes.errors import ConfigError
from regimes.models import MODELS, build

COUNTS = [  # name, classes, channels, image size, width, parameters
    ("resnet18-cifar10", 10, 3, 32, None, 11_173_962),  # Table 8
    ("vgg19bn-cifar10", 10, 3, 32, None, 20_565_834),  # Table 8
    ("resnet18-cifar100", 100, 3, 32, None, 11_220_132),  # Table 9
    ("vgg19bn-cifar100", 100, 3, 32, None, 39_327_652),  # Table 9
    ("vgg7", 10, 1, 8, 8, 18_482),  # the docstrings
    ("vgg7", 10, 3, 16, 16, 74_874),
    ("resnet8", 10, 3, 32, None, 78_042),
]


@pytest.mark.parametrize(("name", "classes", "channels", "size", "width", "expected"), COUNTS)
def test_parameter_count(name, classes, channels, size, width, expected):
    with torch.device("meta"):  # shapes only
        model = build(name, classes=classes, channels=channels, image_size=size, width=width)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, classes)


@pytest.mark.parametrize("name", ["resnet18-cifar10", "vgg19bn-cifar10"])
def test_floats_of_one_powersgd_step_reproduce_table_1(name):
    """(n + m) min(r, n, m) per matrix + 1-D parameters, 98 steps, 300 epochs (reading notes)."""
    printed = {"resnet18-cifar10": {2: 2418.44, 1: 1350.49}, "vgg19bn-cifar10": {4: 6752.06}}[name]
    with torch.device("meta"):
        shapes = [p.shape for p in build(name, classes=10, channels=3, image_size=32).parameters()]
    matrices = [(s[0], s.numel() // s[0]) for s in shapes if len(s) > 1]
    for rank, millions in printed.items():
        step = sum((n + m) * min(rank, n, m) for n, m in matrices)
        step += sum(s.numel() for s in shapes if len(s) == 1)
        assert round(step * 98 * 300 / 1e6, 2) == millions


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_parameter_learns_and_the_seed_decides_the_start(name):
    def make(seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build(name, classes=3, channels=2, image_size=32, width=4)

    model = make(1)
    model(torch.randn(4, 2, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    same, other = make(1).state_dict(), make(2).state_dict()
    assert all(torch.equal(v, same[k]) for k, v in model.state_dict().items() if "weight" in k)
    assert any(not torch.equal(v, other[k]) for k, v in same.items())


def test_initialisation_of_the_vgg_variants():
    """Convolutions of the CIFAR-10 one: N(0, 2 / (9 out)), bias 0; the CIFAR-100 one: default."""
    ten, hundred = (
        list(build(n, classes=10, channels=3, image_size=32, width=32).modules())
        for n in ("vgg19bn-cifar10", "vgg19bn-cifar100")
    )
    last = [[m for m in model if isinstance(m, nn.Conv2d)][-1] for model in (ten, hundred)]
    assert last[0].weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)
    assert not last[0].bias.any()
    bound = (9 * 256) ** -0.5  # PyTorch's default is uniform in +- 1 / sqrt(fan in)
    assert 0.99 * bound < last[1].weight.abs().max().item() <= bound
    assert last[1].bias.any()
    assert [sum(isinstance(m, nn.Dropout) for m in model) for model in (ten, hundred)] == [2, 2]


def test_a_block_adds_its_shortcut():
    block = build("resnet8", classes=2, channels=1, image_size=8, width=4).blocks[0].eval()
    nn.init.zeros_(block.conv2.weight)  # nothing but the shortcut is left
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'resnet18-cifar10'\?"):
        build("resnet18-cifar1", classes=10, channels=3, image_size=32)


def test_an_image_size_that_the_pools_cannot_halve():
    with pytest.raises(ConfigError, match="divisible by 8, got 12"):
        build("vgg7", classes=10, channels=3, image_size=12)
    with pytest.raises(ConfigError, match="divisible by 32, got 0"):
        build("vgg19bn-cifar10", classes=10, channels=3, image_size=0)


@pytest.fixture
def plugin(monkeypatch):
    module = types.ModuleType("their_models")
    monkeypatch.setitem(sys.modules, "their_models", module)
    return module


def test_a_users_callable_gets_the_same_keywords(plugin):
    seen = {}
    plugin.make = lambda **keywords: seen.update(keywords) or nn.Linear(2, 2)
    assert isinstance(
        build("their_models:make", classes=5, channels=3, image_size=16, width=7), nn.Linear
    )
    assert seen == {"classes": 5, "channels": 3, "image_size": 16, "width": 7}
    seen.clear()
    build("their_models:make", classes=5, channels=3, image_size=16)
    assert "width" not in seen


def test_a_users_callable_that_is_not_there_or_gives_no_module(plugin):
    plugin.make = lambda **keywords: None
    sizes = {"classes": 5, "channels": 3, "image_size": 16}
    with pytest.raises(ConfigError, match=r"gave a NoneType, expected an nn\.Module"):
        build("their_models:make", **sizes)
    for missing in ("their_models:other", "no_such_package.module:make", ":make"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            build(missing, **sizes)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        build("vgg7", **sizes, width=0)
