"""The largest Hessian eigenvalue of a network on noise, by Lanczos or by PyHessian."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.place import numerics
from regimes.base.errors import ConfigError
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
        net.to(device)
        began = time.perf_counter()
        if backend == "pyhessian":
            value, products = by_pyhessian(net, batches)
        else:
            found = eigenvalues(HessianProduct(net, cross_entropy, batches, mode="eval"))
            value, products = float(found.largest[0]), found.products  # waits for the device
    return {"value": value, "products": products, "s": time.perf_counter() - began}


def by_pyhessian(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """The largest eigenvalue by magnitude, and the products that it took."""
    try:
        import pyhessian
    except ImportError:
        raise ConfigError("PyHessian is missing: pip install pyhessian.") from None
    cuda = batches[0][0].device.type == "cuda"
    peer = pyhessian.hessian(net, nn.CrossEntropyLoss(), dataloader=batches, cuda=cuda)
    product, products = peer.dataloader_hv_product, 0

    def counted(*args: Any) -> Any:
        nonlocal products
        products += 1
        return product(*args)

    peer.dataloader_hv_product = counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its backward(create_graph=True) warns of a cycle
        (value,), _ = peer.eigenvalues(maxIter=200)
    net.zero_grad(set_to_none=True)
    return float(value), products
