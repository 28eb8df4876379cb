"""Hessian-vector products and eigenvalues against PyHessian, hessian-eigenthings and curvlinops.

    make .venv/bench.stamp
    OMP_NUM_THREADS=1 taskset -c 1 .venv/bin/python -m benchmarks.curvature \\
        --report benchmarks/curvature.json                # and curvature.md; ~12 min, one core

Two probes: `small` = ResNet-8 at 16 x 16, 250 images; `resnet18` = CIFAR ResNet-18 at 32 x 32, 32
images for products, 16 for eigenvalues. The images are synthetic (a random prototype per class
plus noise), and each net first takes 60 SGD steps on them: after far fewer, the running statistics
of BatchNorm still mix in their initial values, and the loss in eval mode is 1e5.

Times are CPU seconds of one thread, which other load on the machine moves little; everything runs
interleaved in one process. Those of eigenvalues include building the graph and the objects; those
of products do not, because the first round does not count. Medians over `runs` runs; one run of
what takes minutes. Warm starts come from a measurement taken `BETWEEN` SGD steps earlier. Errors
are against float64 with torch's own operations (see `reference`). PyHessian finds the largest in
magnitude, and is compared with those; all others the largest algebraically. A peer that is not
installed is left out and listed as missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from benchmarks.curvature_report import markdown
from benchmarks.harness import interleaved
from regimes.base.seeding import derive_seed, make_generator
from regimes.data.models import build_model
from regimes.instruments.hessian import Eigenpairs, HessianProduct, cross_entropy, eigenvalues
from regimes.instruments.hessian.eigenvalues import warm_start
from regimes.instruments.hessian.lanczos import Krylov, lanczos, random_direction
from regimes.records import write_output
from regimes.records.provenance import processor_name

DISTRIBUTIONS = {
    "pyhessian": "pyhessian",
    "hessian_eigenthings": "hessian-eigenthings",
    "curvlinops": "curvlinops-for-pytorch",
}  # by module
BETWEEN = 5  # SGD steps
Batch = tuple[Tensor, Tensor]
Product = Callable[[Tensor], Tensor]


def declare_torchvision_operators() -> None:
    """torchvision's Python part fails to import beside a CPU torch without these two."""
    for name in ("nms", "qnms"):
        try:
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        except RuntimeError:
            return


def peers() -> dict[str, Any]:
    """The installed peers by name."""
    found: dict[str, Any] = {}
    declare_torchvision_operators()
    for name in DISTRIBUTIONS:
        try:
            found[name] = __import__(name)
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    return found


def images(n: int, size: int, *key: str | int) -> Batch:
    """Ten noisy prototypes."""
    prototypes = torch.randn(10, 3, size, size, generator=make_generator("prototypes", size))
    generator = make_generator("images", *key)
    labels = torch.randint(0, 10, (n,), generator=generator)
    return prototypes[labels] + 2 * torch.randn(n, 3, size, size, generator=generator), labels


def train(model: nn.Module, size: int, steps: int, first: int, batch: int, lr: float) -> None:
    """SGD with momentum from step `first` on."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    for step in range(first, first + steps):
        optimiser.zero_grad()
        cross_entropy(model, images(batch, size, "step", step)).backward()
        optimiser.step()
    optimiser.zero_grad()
    model.eval()


def plain_product(model: nn.Module, batch: Batch) -> Product:
    """Double backward through a retained graph of torch's own operations."""
    parameters = list(model.parameters())
    g = torch.autograd.grad(cross_entropy(model, batch), parameters, create_graph=True)

    def product(v: Tensor) -> Tensor:
        pieces = v.split([p.numel() for p in parameters])
        shaped = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        out = torch.autograd.grad(g, parameters, shaped, retain_graph=True)
        return torch.cat([h.reshape(-1) for h in out])

    return product


def forward_over_reverse(model: nn.Module, batch: Batch) -> Product:
    """A forward derivative of the gradient (torch.func)."""
    named = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (batch[0],))
        return nn.functional.cross_entropy(logits, batch[1])

    def product(v: Tensor) -> Tensor:
        pieces = v.split([p.numel() for p in named.values()])
        tangent = {n: piece.view_as(p) for (n, p), piece in zip(named.items(), pieces, strict=True)}
        detached = {n: p.detach() for n, p in named.items()}
        out = torch.func.jvp(torch.func.grad(loss), (detached,), (tangent,))[1]
        return torch.cat([h.reshape(-1) for h in out.values()])

    return product


def curvlinops_product(library: Any, model: nn.Module, batch: Batch) -> Product:
    return library.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [batch], check_deterministic=False
    ).__matmul__


def eigenthings_operator(library: Any, model: nn.Module, batch: Batch) -> Any:
    return library.HessianOperator(model, [batch], cross_entropy)


def products(model: nn.Module, batch: Batch, libraries: dict, repetitions: int) -> dict[str, Any]:
    """Seconds of one product over one forward + backward pass, by method."""
    parameters = list(model.parameters())
    nhwc = (batch[0].contiguous(memory_format=torch.channels_last), batch[1])
    d = sum(p.numel() for p in parameters)
    v = torch.randn(d, generator=make_generator("vector"))

    def step(b: Batch) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(cross_entropy(model, b), parameters)

    made: dict[str, Product] = {
        "double backward, retained (as PyHessian)": plain_product(model, batch),
        "forward over reverse": forward_over_reverse(model, batch),
        "regimes": HessianProduct(model, cross_entropy, [batch]),
        "regimes, graph rebuilt": HessianProduct(model, cross_entropy, [batch], memory=0),
        "regimes, batch statistics": HessianProduct(
            model, cross_entropy, [batch], mode="batch-statistics"
        ),
        "regimes, Gauss-Newton": HessianProduct(model, cross_entropy, [batch], kind="gauss-newton"),
    }
    if "hessian_eigenthings" in libraries:
        operator = eigenthings_operator(libraries["hessian_eigenthings"], model, batch)
        made["hessian-eigenthings"] = operator.matvec
    if "curvlinops" in libraries:
        made["curvlinops"] = curvlinops_product(libraries["curvlinops"], model, batch)
    tasks = {name: (lambda f=f: f(v)) for name, f in made.items()}
    steps = {"forward + backward": step(batch), "forward + backward, channels-last": step(nhwc)}
    seconds = interleaved(steps | tasks, repetitions)  # the first round builds what is retained
    unit = statistics.median(seconds["forward + backward"])
    best = min(unit, statistics.median(seconds["forward + backward, channels-last"]))
    return {
        name: {
            "seconds": statistics.median(times),
            "over_forward_backward": statistics.median(times) / unit,
            "over_fastest_layout": statistics.median(times) / best,
        }
        for name, times in seconds.items()
    }


def reference(model: nn.Module, batch: Batch, cheap: bool) -> tuple[list[float], list[float]]:
    """Top five algebraically and by magnitude, in float64 with torch's own operations.

    `cheap`: vectors from float32, values from eight float64 products (Rayleigh-Ritz). A value's
    error is of the order of the printed residual's square over its gap.
    """
    d, double = sum(p.numel() for p in model.parameters()), copy.deepcopy(model).double()
    product = plain_product(double, (batch[0].double(), batch[1]))
    found = lanczos(
        plain_product(model, batch) if cheap else product,
        d,
        largest=5,
        smallest=3,
        tolerance=1e-3 if cheap else 1e-5,
        max_products=60,
        generator=make_generator("reference"),
        dtype=torch.float32 if cheap else torch.float64,
    )
    q = torch.linalg.qr(found.vectors.double().mT).Q
    hq = torch.stack([product(column.contiguous()) for column in q.mT], dim=1)
    values, y = torch.linalg.eigh(q.mT @ hq)
    left = float(((hq - q @ (q.mT @ hq)) @ y).norm(dim=0).div(values.abs()).max())
    print(f"reference: {found.products} products, relative residual {left:.1e}", file=sys.stderr)
    ordered = values.flip(0).tolist()
    return ordered[:5], sorted(ordered, key=abs, reverse=True)[:5]


Answer = tuple[list[float], int]  # values, products
Runs = tuple[int, int]  # of the slow peers; of PyHessian and regimes


def by_pyhessian(library: Any, model: nn.Module, batch: Batch, k: int, seed: int) -> Answer:
    module, calls = sys.modules["pyhessian.hessian"], [0]
    product = module.hessian_vector_product

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return product(*args)

    torch.manual_seed(derive_seed(seed))
    with warnings.catch_warnings(), patch.object(module, "hessian_vector_product", counted):
        warnings.simplefilter("ignore")
        peer = library.hessian(model, nn.CrossEntropyLoss(), data=batch, cuda=False)
        values, _ = peer.eigenvalues(top_n=k)
    model.zero_grad(set_to_none=True)
    return values, calls[0]


def by_eigenthings(
    library: Any, model: nn.Module, batch: Batch, k: int, seed: int, steps: int | None
) -> Answer:
    operator = eigenthings_operator(library, model, batch)
    found = library.lanczos(operator, k=k, max_iter=steps, which="LA", seed=seed)
    return sorted(found.eigenvalues.tolist(), reverse=True), steps or 2 * k


def by_eigsh(library: Any, model: nn.Module, batch: Batch, k: int, seed: int) -> Answer:
    product, calls = curvlinops_product(library, model, batch), [0]
    d = sum(p.numel() for p in model.parameters())

    def matvec(v: np.ndarray) -> np.ndarray:
        calls[0] += 1
        return product(torch.from_numpy(v.reshape(-1).astype(np.float32))).numpy()

    operator = LinearOperator((d, d), matvec=matvec, dtype=np.float32)
    start = np.random.default_rng(seed).standard_normal(d).astype(np.float32)
    values = eigsh(operator, k=k, which="LA", tol=1e-3, v0=start, return_eigenvectors=False)
    return sorted(values.tolist(), reverse=True), calls[0]


def by_regimes(
    model: nn.Module, batch: Batch, k: int, seed: int, start: Eigenpairs | None = None
) -> Answer:
    product = HessianProduct(model, cross_entropy, [batch])
    found = eigenvalues(product, largest=k, start=start, seed=seed)
    return found.largest.tolist(), found.products


def top(
    model: nn.Module, batch: Batch, before: Eigenpairs, k: int, libraries: dict, runs: Runs
) -> Iterator[dict[str, Any]]:
    """Seconds, products and values of the top k, by method, as far as known after each run."""
    methods: dict[str, Callable[[int], Answer]] = {
        "regimes cold": lambda s: by_regimes(model, batch, k, s),
        "regimes warm": lambda s: by_regimes(model, batch, k, s, before),
    }
    if "hessian_eigenthings" in libraries:
        library = libraries["hessian_eigenthings"]
        methods["hessian-eigenthings, default"] = lambda s: by_eigenthings(
            library, model, batch, k, s, None
        )
        methods["hessian-eigenthings, 20 steps"] = lambda s: by_eigenthings(
            library, model, batch, k, s, 20
        )
    if "curvlinops" in libraries:
        methods["curvlinops + eigsh"] = lambda s: by_eigsh(
            libraries["curvlinops"], model, batch, k, s
        )
    if "pyhessian" in libraries:
        methods["PyHessian"] = lambda s: by_pyhessian(libraries["pyhessian"], model, batch, k, s)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers: dict[str, list[Answer]] = {name: [] for name in methods}
    for seed in range(max(runs)):
        for name, method in methods.items():
            if seed >= runs[name == "PyHessian" or name.startswith("regimes")]:
                continue
            began = time.process_time()
            answer = method(seed)
            seconds[name].append(time.process_time() - began)
            answers[name].append(answer)
            print(f"top-{k} {name}: {seconds[name][-1]:.1f} s, {answer[1]}", file=sys.stderr)
            yield {name: row(seconds[name], answers[name]) for name in methods if seconds[name]}


def row(seconds: list[float], answers: list[Answer]) -> dict[str, Any]:
    """What is reported of one method."""
    return {
        "seconds": statistics.median(seconds),
        "runs": len(seconds),
        "spread": [min(seconds), max(seconds)],
        "products": statistics.median(n for _, n in answers),
        "values": [values for values, _ in answers],
    }


def frontier(
    model: nn.Module, batch: Batch, before: Eigenpairs, exact: float, unit: float, most: int
) -> dict[str, list]:
    """Error of the top eigenvalue after each number of products, cold and warm.

    `over_forward_backward`: their cost, graph included, in forward + backward passes.
    """
    found: dict[str, list] = {}
    for name, start in (("cold", None), ("warm", warm_start(before))):
        began = time.process_time()
        product = HessianProduct(model, cross_entropy, [batch])
        d = product.dimension
        first = random_direction(d, make_generator(0, "lanczos"), torch.float32, "cpu")
        space, found[name] = Krylov(first if start is None else start, most), []
        for n in range(1, most + 1):
            space.step(product)
            values, residuals = space.ritz()
            value = float(values[-1])
            found[name].append(
                {
                    "products": n,
                    "error": abs(value - exact) / abs(exact),
                    "residual": float(residuals[-1]) / abs(value),
                    "over_forward_backward": (time.process_time() - began) / unit,
                }
            )
    return found


def errors(rows: dict[str, Any], algebraic: list[float], magnitude: list[float], k: int) -> None:
    """Adds the worst relative error over the k values (median over repetitions), and ratios."""
    for name, row in rows.items():
        exact = magnitude if name == "PyHessian" else algebraic
        worst = []
        for values in row["values"]:
            ordered = sorted(values, key=abs, reverse=True) if name == "PyHessian" else values
            pairs = zip(ordered, exact[:k], strict=True)
            worst.append(max(abs(a - b) / abs(b) for a, b in pairs))
        row["error"] = statistics.median(worst)
        if "PyHessian" in rows:
            row["over_pyhessian"] = row["seconds"] / rows["PyHessian"]["seconds"]


def run(name: str, libraries: dict) -> Iterator[dict[str, Any]]:
    """All measurements of one probe, as far as they have come after each part."""
    small = name == "small"
    size, batch_size = (16, 64) if small else (32, 16)
    torch.manual_seed(derive_seed("benchmark", name))
    model = build_model(
        "resnet8" if small else "resnet18-cifar10", classes=10, channels=3, image_size=size
    )
    train(model, size, 60, 0, batch_size, 0.05)
    batch = images(250 if small else 32, size, "probe")
    probe = batch if small else images(16, size, "probe")
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": len(batch[1]),
        "eigenvalue_images": len(probe[1]),
        "steps_between": BETWEEN,
        "products": products(model, batch, libraries, 6 if small else 3),
    }
    yield result
    first = HessianProduct(model, cross_entropy, [probe])
    before = {k: eigenvalues(first, largest=k) for k in (1, 5)}
    del first
    train(model, size, BETWEEN, 100, batch_size, 0.05)
    algebraic, magnitude = reference(model, probe, cheap=not small)
    result["reference"] = {"algebraic": algebraic, "magnitude": magnitude}
    parameters = list(model.parameters())
    unit = interleaved(
        {"": lambda: torch.autograd.grad(cross_entropy(model, probe), parameters)}, 5
    )[""]
    result["frontier"] = frontier(
        model, probe, before[1], algebraic[0], statistics.median(unit), 12 if small else 7
    )
    yield result
    for k in (1, 5):
        runs = (3, 3) if small else (1, 3) if k == 1 else (1, 1)
        for rows in top(model, probe, before[k], k, libraries, runs):
            errors(rows, algebraic, magnitude, k)
            result[f"top{k}"] = rows
            yield result


def main() -> None:
    """Measures, prints, and writes the report, as JSON and Markdown, after each part."""
    parser = argparse.ArgumentParser(description="Benchmark of products and eigenvalues.")
    parser.add_argument("--report", type=Path, help="where to write the results as JSON")
    chosen = parser.parse_args()
    libraries = peers()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "peers": {name: version(DISTRIBUTIONS[name]) for name in sorted(libraries)},
        "probes": {},
    }
    for name in ("small", "resnet18"):
        for result in run(name, libraries):
            report["probes"][name] = result
            if chosen.report:
                write_output(chosen.report, json.dumps(report, indent=1) + "\n")
                write_output(chosen.report.with_suffix(".md"), markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
