"""The data sent in every static row of the paper's Tables 1-4 for ResNet-18 and VGG-19bn: from the
compressors' formulas, and from the meter over real training steps.

The printed numbers are floats of one whole training: 300 epochs of 98 steps (a CIFAR epoch is
ceil(12,500 / 128) steps of 4 workers x 128).
"""

from __future__ import annotations

import pytest
import torch

from regimes import models
from regimes.compression import compressor
from regimes.compression.reducer import Reducer, traffic_table
from regimes.config import DENSE
from regimes.gradients import Gradients, layer_table
from regimes.setup import cross_entropy
from regimes.world import World

STEPS = 300 * 98
ROWS = [  # table, network, classes, compressor, level, floats printed, its last digit's worth
    (1, "resnet18-cifar10", 10, "powersgd", 2, 2418.4e6, 0.1e6),
    (1, "resnet18-cifar10", 10, "powersgd", 1, 1350.4e6, 0.1e6),
    (1, "vgg19bn-cifar10", 10, "powersgd", 4, 6752.0e6, 0.1e6),
    (1, "vgg19bn-cifar10", 10, "powersgd", 1, 2074.9e6, 0.1e6),
    (2, "resnet18-cifar100", 100, "powersgd", 2, 2426.3e6, 0.1e6),
    (2, "resnet18-cifar100", 100, "powersgd", 1, 1355.7e6, 0.1e6),
    (3, "resnet18-cifar10", 10, "topk", 10, 262.8e9, 0.1e9),
    (4, "resnet18-cifar100", 100, "topk", 25, 659.4e9, 0.1e9),
    # Printed as "99 %", but these two are K = 100 % (2599.9 and 2610.6 G would be 99 %).
    (3, "resnet18-cifar10", 10, "topk", 100, 2626.1e9, 0.1e9),
    (4, "resnet18-cifar100", 100, "topk", 100, 2636.9e9, 0.1e9),
]


@pytest.mark.parametrize(("table", "network", "classes", "name", "level", "printed", "digit"), ROWS)
def test_the_formula_gives_the_printed_number(
    table: int, network: str, classes: int, name: str, level: float, printed: float, digit: float
) -> None:
    layers = layer_table(models.build(network, classes=classes, channels=3, image_size=32))
    floats, _ = traffic_table(compressor({"name": name}), layers, level, workers=4)
    assert floats * STEPS == pytest.approx(printed, abs=1.01 * digit)  # the paper truncates


@pytest.mark.parametrize("network", ["resnet18-cifar10", "vgg19bn-cifar10"])
def test_the_meter_over_real_steps_equals_the_formula(network: str) -> None:
    torch.manual_seed(0)
    model = models.build(network, classes=10, channels=3, image_size=32)
    world = World(4)
    gradients = Gradients(model, cross_entropy, world, union=False, seed=0)
    layers = layer_table(model)
    x, y = torch.randn(2, 4, 3, 32, 32).transpose(0, 1), torch.randint(0, 10, (2, 4)).T
    losses = gradients.compute(x, y, epoch=0, step=0)
    rows = {(n, level, name) for _, n, _, name, level, *_ in ROWS if n == network}
    for _, level, name in sorted(rows, key=str):
        chosen = compressor({"name": name})
        reducer = Reducer(chosen, layers, world, seed=0)
        levels = [level if layer.compressed else DENSE for layer in layers]
        reducer.step(gradients.layers, levels, losses, gradients.stack)  # type: ignore[arg-type]
        meter = world.meter.take()
        floats, sent = traffic_table(chosen, layers, level, workers=4)
        assert sum(meter.layers[i].floats for i in range(len(layers))) == floats
        assert sum(meter.layers[i].bytes for i in range(len(layers))) == sent
