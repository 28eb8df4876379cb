"""Networks: the paper's printed parameter counts, shapes, and what a user can get wrong."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from regimes.base.errors import ConfigError
from regimes.data.models import MODELS, build_model, input_kind
from regimes.training.gradients import draws_random_numbers

COUNTS = [  # name, classes, channels, image size, width, parameters
    ("resnet18-cifar10", 10, 3, 32, None, 11_173_962),  # Table 8
    ("vgg19bn-cifar10", 10, 3, 32, None, 20_565_834),  # Table 8
    ("resnet18-cifar100", 100, 3, 32, None, 11_220_132),  # Table 9
    ("vgg19bn-cifar100", 100, 3, 32, None, 39_327_652),  # Table 9
    ("senet18-cifar10", 10, 3, 32, None, 11_260_354),  # Table 8
    ("se-resnet18-cifar10", 10, 3, 32, None, 11_389_726),  # the SENet of Tables 1 and 3
    ("senet18-cifar100", 100, 3, 32, None, 11_436_256),  # Table 9
    ("wideresnet28-10-cifar10", 10, 3, 32, None, 36_489_290),  # Table 8
    ("wideresnet28-10-cifar100", 100, 3, 32, None, 36_546_980),  # Table 9
    ("densenet-cifar10", 10, 3, 32, None, 1_000_618),  # Table 8
    ("densenet-cifar100", 100, 3, 32, None, 1_035_268),  # Table 9
    ("googlenet-cifar10", 10, 3, 32, None, 6_166_250),  # Table 8
    ("googlenet-cifar100", 100, 3, 32, None, 6_258_500),  # Table 9
    ("vgg7", 10, 1, 8, 8, 18_482),  # the docstrings
    ("vgg7", 10, 3, 16, 16, 74_874),
    ("resnet8", 10, 3, 32, None, 78_042),
    ("speednet", 10, 3, 32, None, 497_816),
    ("speednet", 10, 3, 32, 64, 1_972_504),
    ("resnet20", 10, 3, 32, None, 272_474),  # 0.27 M in the authors' Table 6, which pads shortcuts
]


MAPS = {  # channels and pixels of the last map of a 32x32 image (the architectures' papers)
    "resnet18-cifar10": (512, 4),
    "senet18-cifar10": (512, 4),
    "senet18-cifar100": (516, 4),
    "wideresnet28-10-cifar10": (640, 8),
    "densenet-cifar10": (384, 4),
    "googlenet-cifar10": (1024, 8),
}


@pytest.mark.parametrize(("name", "classes", "channels", "size", "width", "expected"), COUNTS)
def test_parameter_count(name, classes, channels, size, width, expected):
    with torch.device("meta"):  # shapes only
        model = build_model(name, classes=classes, channels=channels, image_size=size, width=width)
    assert sum(p.numel() for p in model.parameters()) == expected
    x = torch.empty(2, channels, size, size, device="meta")
    assert model(x).shape == (2, classes)
    if name in MAPS:
        features, pixels = MAPS[name]
        assert model.blocks(model.stem(x)).shape == (2, features, pixels, pixels)


@pytest.mark.parametrize("name", [n for n in sorted(MODELS) if input_kind(n) == "images"])
def test_every_parameter_learns_and_the_seed_decides_the_start(name):
    width, size = (1, 8) if name.startswith("wide") else (4, 32 if "vgg" in name else 16)

    def make(seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(name, classes=3, channels=2, image_size=size, width=width)

    model = make(1)
    model(torch.randn(4, 2, size, size)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    same, other = make(1).state_dict(), make(2).state_dict()
    assert all(torch.equal(v, same[k]) for k, v in model.state_dict().items() if "weight" in k)
    assert any(not torch.equal(v, other[k]) for k, v in same.items())


def test_the_patches_that_a_speednet_starts_from_are_white():
    """Uncorrelated and of variance 1; then the same with the other sign. All starts are alike."""
    torch.manual_seed(0)
    x = torch.nn.functional.avg_pool2d(4 * torch.randn(64, 3, 18, 18), 3, 1)  # neighbours alike
    model = build_model("speednet", classes=4, channels=3, image_size=16, width=2)
    model.start_from(x)
    white = torch.nn.functional.conv2d(x, model.whitening).permute(1, 0, 2, 3).flatten(1)
    first, second = white.chunk(2)
    assert torch.equal(first, -second)
    torch.testing.assert_close(first @ first.T / first.shape[1], torch.eye(12), atol=0.02, rtol=0)
    before = model.whitening.clone()
    model.start_from(x)
    assert torch.equal(model.whitening, before)
    assert "whitening" in model.state_dict()


def test_a_speednet_evaluates_an_image_and_its_mirror_image_alike():
    model = build_model("speednet", classes=4, channels=3, image_size=16, width=2)
    x = torch.randn(5, 3, 16, 16)
    assert not torch.allclose(model(x), model(x.flip(-1)))
    model.eval()
    torch.testing.assert_close(model(x), model(x.flip(-1)))


DROPOUT = [
    ("googlenet-cifar10", 0.0),
    ("googlenet-cifar100", 0.4),
    ("vgg19bn-cifar10", 0.5),
    ("vgg19bn-cifar100", 0.5),
    ("wideresnet28-10-cifar10", 0.0),
]


@pytest.mark.parametrize(("name", "default"), DROPOUT)
def test_dropout_is_a_choice(name, default):
    def make(**choice):
        return build_model(name, classes=2, channels=1, image_size=32, width=1, **choice)

    def probabilities(model):
        return {m.p for m in model.modules() if isinstance(m, nn.Dropout)} - {0.0}

    x = torch.randn(2, 1, 32, 32)
    assert probabilities(make()) == {default} - {0.0}
    assert draws_random_numbers(make(), x) == (default > 0)
    assert probabilities(make(dropout=0.25)) == {0.25}
    assert draws_random_numbers(make(dropout=0.25), x)
    assert not draws_random_numbers(make(dropout=0.0), x)


def test_initialisation_of_the_vgg_variants():
    """Convolutions of the CIFAR-10 one: N(0, 2 / (9 out)), bias 0; the CIFAR-100 one: default."""
    ten, hundred = (
        list(build_model(n, classes=10, channels=3, image_size=32, width=32).modules())
        for n in ("vgg19bn-cifar10", "vgg19bn-cifar100")
    )
    last = [[m for m in model if isinstance(m, nn.Conv2d)][-1] for model in (ten, hundred)]
    assert last[0].weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)
    assert not last[0].bias.any()
    bound = (9 * 256) ** -0.5  # PyTorch's default is uniform in +- 1 / sqrt(fan in)
    assert 0.99 * bound < last[1].weight.abs().max().item() <= bound
    assert last[1].bias.any()
    assert [sum(isinstance(m, nn.Dropout) for m in model) for model in (ten, hundred)] == [2, 2]


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'resnet18-cifar10'\?"):
        build_model("resnet18-cifar1", classes=10, channels=3, image_size=32)


def test_an_image_size_that_the_pools_cannot_halve():
    with pytest.raises(
        ConfigError, match=r"image_size = 12: expected divisible by 8.*data\.resize"
    ):
        build_model("vgg7", classes=10, channels=3, image_size=12)
    with pytest.raises(ConfigError, match="image_size = 0: expected divisible by 32"):
        build_model("vgg19bn-cifar10", classes=10, channels=3, image_size=0)


@pytest.fixture
def plugin(monkeypatch):
    module = types.ModuleType("their_models")
    monkeypatch.setitem(sys.modules, "their_models", module)
    return module


def test_a_users_callable_gets_the_same_keywords(plugin):
    seen = {}
    plugin.make = lambda **keywords: seen.update(keywords) or nn.Linear(2, 2)
    assert isinstance(
        build_model("their_models:make", classes=5, channels=3, image_size=16, width=7), nn.Linear
    )
    assert seen == {"classes": 5, "channels": 3, "image_size": 16, "width": 7}
    seen.clear()
    build_model("their_models:make", classes=5, channels=3, image_size=16)
    assert "width" not in seen


def test_a_users_callable_that_is_not_there_or_gives_no_module(plugin):
    plugin.make = lambda **keywords: None
    sizes = {"classes": 5, "channels": 3, "image_size": 16}
    with pytest.raises(ConfigError, match=r"gave a NoneType, expected an nn\.Module"):
        build_model("their_models:make", **sizes)
    plugin.number = 3
    with pytest.raises(ConfigError, match="is of type int, expected a callable"):
        build_model("their_models:number", **sizes)

    def fail(error):
        raise error

    for error, says in (
        (ValueError(), "ValueError"),
        (RuntimeError("\nlong"), "RuntimeError"),
        (TypeError("no\nlong"), "no"),
    ):
        plugin.make = lambda error=error, **keywords: fail(error)
        with pytest.raises(ConfigError, match=rf"cannot be built with .*: {says}$"):
            build_model("their_models:make", **sizes)
    for missing in ("their_models:other", "no_such_package.module:make", ":make"):
        with pytest.raises(ConfigError, match="cannot import the model"):
            build_model(missing, **sizes)


def test_a_choice_that_the_family_has_not_or_that_is_out_of_range():
    sizes = {"classes": 5, "channels": 3, "image_size": 16}
    with pytest.raises(ConfigError, match=r"no choice of depth: .* --set model\.depth=none$"):
        build_model("resnet8", **sizes, depth=3)
    with pytest.raises(ConfigError, match="'vgg7' has no choice of dropout"):
        build_model("vgg7", **sizes, dropout=0.1)
    with pytest.raises(ConfigError, match="width = 0: expected at least 1"):
        build_model("vgg7", **sizes, width=0)
    with pytest.raises(ConfigError, match="depth = 0: expected at least 1"):
        build_model("lstm", classes=5, depth=0)
    for wrong in (1.0, -0.1):
        with pytest.raises(
            ConfigError, match=f"dropout = {wrong}: expected at least 0 and below 1"
        ):
            build_model("lstm", classes=5, dropout=wrong)


def test_sizes_that_a_densenet_cannot_have():
    with pytest.raises(ConfigError, match="width = 7: expected an even one"):
        build_model("densenet-cifar10", classes=2, channels=1, image_size=8, width=7)
    with pytest.raises(ConfigError, match="image_size = 7: expected at least 8"):
        build_model("densenet-cifar10", classes=2, channels=1, image_size=7)


def test_images_and_text_do_not_mix(plugin):
    with pytest.raises(ConfigError, match="'lstm' takes text, the data are images"):
        build_model("lstm", classes=5, channels=3, image_size=16)
    with pytest.raises(ConfigError, match="'vgg7' takes images, the data are text"):
        build_model("vgg7", classes=5)
    plugin.make = lambda classes, depth=2: nn.Linear(depth, classes)
    with pytest.raises(ConfigError, match="takes images"):
        build_model("their_models:make", classes=5)
    plugin.make.text = True
    assert build_model("their_models:make", classes=5, depth=7).in_features == 7
    assert input_kind("their_models:make") == "text"
    assert [name for name in MODELS if input_kind(name) == "text"] == ["lstm", "transformer", "gpt"]
