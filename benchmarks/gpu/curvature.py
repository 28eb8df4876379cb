"""The largest Hessian eigenvalue of a network on noise, by Lanczos or by PyHessian."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.place import numerics
from regimes.base.seeding import make_generator
from regimes.data.models import build_model
from regimes.instruments.hessian import HessianProduct, cross_entropy, eigenvalues


def largest(
    device: str, backend: str, model: str, width: int | None, images: int, side: int
) -> dict[str, Any]:
    """The value, the products with a vector and the seconds; in strict float32, with the weights
    of a seed and two batches of images of side x side.

    Raises:
        ConfigError: PyHessian is not installed.
    """
    torch.manual_seed(0)
    net = build_model(model, classes=10, channels=3, image_size=side, width=width)
    random = make_generator("noise")
    x = torch.randn(images, 3, side, side, generator=random).to(device)
    y = torch.randint(0, 10, (images,), generator=random).to(device)
    batches = [*zip(x.split(images // 2), y.split(images // 2), strict=True)]
    with numerics(device, "strict"):
        hessian = HessianProduct(net.to(device), cross_entropy, batches, mode="eval")
        began = time.perf_counter()
        found = eigenvalues(hessian, backend=backend)
        value = float(found.largest[0])  # waits for the device
    return {"value": value, "products": found.products, "s": time.perf_counter() - began}
