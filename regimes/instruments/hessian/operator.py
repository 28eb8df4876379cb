"""Products of the Hessian of a probe loss with vectors, without ever forming the Hessian.

How a product is made was chosen by measurement (`benchmarks/curvature.py`): double backward
(Pearlmutter 1994) through a *retained* graph, with the convolutions and batch norms of
`native.py`. A rebuilt graph costs one forward and backward pass more per product,
forward-over-reverse still more. As many micro-batches as fit a stated amount of memory retain their
graphs; the others' are rebuilt for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regimes.base.errors import ConfigError, TrainingError, require
from regimes.base.fingerprint import fingerprint
from regimes.base.torch_compat import TorchDispatchMode, version_of
from regimes.instruments.hessian.differentiable import (
    ROUNDINGS,
    OwnFunctions,
    asymmetry,
    fixed_vectors,
    named_operation,
    negligible_asymmetry,
    not_symmetric,
    rounding_error,
    twice_differentiable,
)
from regimes.instruments.hessian.native import NativeDoubleBackward
from regimes.instruments.hessian.probe import (
    Mode,
    ProbeLoss,
    ProcessMean,
    batch_size,
    check_loss,
    check_probe,
    no_random_draws,
    preserve_model,
)
from regimes.instruments.hessian.weights import Weight, weights_of

# names of parameters, a block for each; or by layer the names of the parameters that have one block
# together; None: each parameter
Layers = Sequence[str] | Mapping[str, Sequence[str]] | None
Kind = str  # "hessian" or "gauss-newton"
Product = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]  # (vectors, layers)


class HessianProduct:
    """Multiplies by the Hessian of a probe loss: vector [d] or block [k, d] in, the same out. The
    probe loss is the mean loss over a fixed set of samples. The Hessian is taken at the model's
    present weights, with respect to every parameter that requires a gradient.

    Args:
        model: unchanged by any measurement (see `preserve_model`).
        loss: `(model, batch) -> mean loss over the batch`, a scalar tensor; runs the model once.
        batches: the probe set, split in micro-batches; their losses together are the loss of one
            batch.
        mode: how to normalise and drop out. "eval": as in `model.eval()`. "batch-statistics": the
            same, but each BatchNorm uses the statistics of its micro-batch (and updates none).
            None: as the model's flags stand, which must then leave the loss deterministic.
        mean: averages a flat tensor over processes, which hold equally many samples each; the
            result is the Hessian over their union. None for a single process.
        kind: "hessian", or "gauss-newton" for J' H_L J, with J the Jacobian of the model's output
            and H_L the Hessian of the loss with respect to that output: positive semi-definite for
            losses that are convex in it, and the Fisher matrix for cross-entropy (Martens 2020).
        memory: bytes that retained graphs may hold; beyond it, graphs are rebuilt per call.
        weight: how much a micro-batch counts, ``weight(batch)``, if the loss is a mean over
            something else than samples (say, the tokens that are not ignored); "samples" if it is a
            mean over samples. None: found by trying the loss on parts of the batches, where there
            are several batches or processes.
        symmetric: True where an earlier product of this loss and these batches has shown it, which
            saves the two vectors below.

    The weights must not change while it is in use. `products` counts the vectors multiplied
    (a layer's own block counts as one), `gradient` and `loss_value` come free. The first use also
    multiplies two vectors that are not counted: they tell whether the matrix is symmetric.

    Attention runs by torch's kernel of plain matrix products, the only one that has a second
    derivative, and activation checkpoints store their activations. A parameter that only some
    micro-batches use counts as zero in the others.

    Raises:
        ConfigError: an empty probe set, a parameter that no micro-batch uses, a loss that is random
            or updates statistics, weights changed since the first product, a vector of a wrong
            shape, a loss where trying does not show how batches count; an operation without a
            second derivative, by name where torch or the graph has it.
        TrainingError: the gradient or a product is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: ProbeLoss,
        batches: Iterable[Any],
        *,
        mode: Mode | None = None,
        mean: ProcessMean | None = None,
        kind: Kind = "hessian",
        memory: int = 2 * 2**30,
        weight: Weight = None,
        symmetric: bool = False,
    ) -> None:
        modes, kinds = (None, "eval", "batch-statistics"), ("hessian", "gauss-newton")
        require(mode in modes, "mode", mode, f"one of {modes}")
        require(kind in kinds, "kind", kind, f"one of {kinds}")
        self.model, self.loss, self.batches = model, loss, list(batches)
        self.mode, self.mean, self.kind, self.memory = mode, mean, kind, memory
        self._weight, self._weights, self.symmetric = weight, list[float](), symmetric
        self._graphs: dict[int, Product] = {}  # of the micro-batches that are retained
        self.samples = sum(batch_size(batch) for batch in self.batches)
        named = check_probe(model, self.samples, mode)
        self.names, self.parameters = list(named), list(named.values())
        *starts, self.dimension = accumulate((p.numel() for p in self.parameters), initial=0)
        self.slices = [slice(a, b) for a, b in pairwise([*starts, self.dimension])]
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.products = 0
        self.mode_matters = False
        self.retained = 0  # micro-batches whose graph is retained
        self._first: tuple[float, Tensor] | None = None  # loss and gradient
        self._start = self._weights_now()

    @property
    def weights(self) -> list[float]:
        """Return how much each micro-batch counts (`weights_of`)."""
        if not self._weights:
            given = self._weight, self.mean
            self._weights = weights_of(self.model, self.loss, self.batches, *given)
        return self._weights

    @property
    def counted(self) -> dict[int, float]:
        """Return the weights that are not 0, by micro-batch: the loss of one whose targets are all
        ignored is NaN, also times 0."""
        return {index: weight for index, weight in enumerate(self.weights) if weight}

    @property
    def gradient(self) -> Float[Tensor, " d"]:
        """Return the gradient of the probe loss, over all processes."""
        return self._prepare()[1]

    @property
    def loss_value(self) -> float:
        """Return the probe loss, over all processes."""
        return self._prepare()[0]

    def check(self) -> None:
        """Raise as any use would, if this loss has no Hessian here."""
        self._prepare()

    def __call__(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """H v for a vector, or for every row of a block."""
        return self._multiply(vectors, range(len(self.parameters)))

    def block(self, *layers: int) -> Callable[[Float[Tensor, "*k n"]], Float[Tensor, "*k n"]]:
        """Return the product with the diagonal block of a layer, or of several together; it
        differentiates by these only."""
        return lambda vectors: self._multiply(vectors, layers)

    def split(self, flat: Float[Tensor, "*k d"]) -> dict[str, Float[Tensor, "*k _"]]:
        """Return views of a flat vector or block, by layer name."""
        return {n: flat[..., s] for n, s in zip(self.names, self.slices, strict=True)}

    def locate_layers(self, layers: Layers) -> dict[str, list[int]]:
        """Return by layer the indices of its parameters; ConfigError for a name that no parameter
        has."""
        if not isinstance(layers, Mapping):
            layers = {name: [name] for name in (self.names if layers is None else layers)}
        for name in (name for names in layers.values() for name in names):
            if name not in self.names:
                raise ConfigError(f"No layer {name!r} with a gradient; have {self.names}.")
        places = {name: i for i, name in enumerate(self.names)}
        # once each: the traces and products of a parameter that is named twice would be added up
        return {
            layer: [places[name] for name in dict.fromkeys(names)]
            for layer, names in layers.items()
        }

    def _weights_now(self) -> tuple[list[int], int]:
        """What a change of the weights changes. Versions are those of torch's in-place operations;
        writes through ``.data``, numpy or a fused optimiser leave them, and change the bits."""
        return [version_of(p) for p in self.parameters], fingerprint(self.parameters)

    def agree(self, number: float) -> float:
        """Return a number on which all processes agree (their mean), for decisions taken by the
        clock."""
        if self.mean is None:
            return number
        return float(self.mean(torch.tensor([number], dtype=torch.float64, device=self.device))[0])

    def _multiply(self, vectors: Tensor, layers: Sequence[int]) -> Tensor:
        sizes = [self.parameters[i].numel() for i in layers]
        shape, d = tuple(vectors.shape), sum(sizes)
        good = len(shape) in (1, 2) and shape[-1] == d
        require(good, "shape of vectors", shape, f"({d},) or (k, {d})")
        self._prepare()
        block = vectors.reshape(-1, d).to(self.device, self.dtype)
        out = torch.zeros_like(block)
        for index, weight in self.counted.items():
            product = self._graphs.get(index) or self._build(index)[0]
            self._add_products(out, block, product, weight, layers)
            del product  # frees its graph, unless it is retained
        if self.mean is not None:
            out = self.mean(out.view(-1)).view_as(block)
        self.products += len(block)
        if not bool(out.sum().isfinite()) and not bool(out.isfinite().all()):
            raise TrainingError("A Hessian-vector product is not finite; the loss has diverged.")
        return out.view_as(vectors)

    def _add_products(
        self, out: Tensor, block: Tensor, product: Product, weight: float, layers: Sequence[int]
    ) -> None:
        """Add a micro-batch's part of the products with the rows of ``block`` to ``out``."""
        sizes = [self.parameters[i].numel() for i in layers]
        for row, vector in zip(out, block, strict=True):
            split = zip(layers, vector.split(sizes), strict=True)
            pieces = [piece.view_as(self.parameters[i]) for i, piece in split]
            with named_operation():
                parts = product(pieces, layers)
            # torch below 2.10 refuses to add to one of several views while it records a graph
            with torch.no_grad():
                for slot, part in zip(row.split(sizes), parts, strict=True):
                    slot.view_as(part).add_(part, alpha=weight)

    def _prepare(self) -> tuple[float, Tensor]:
        """Loss and gradient, and as many graphs as memory allows, from the first pass. It checks
        that all parameters are used and that the matrix is symmetric."""
        if self._start != self._weights_now():
            raise ConfigError("The weights changed under a HessianProduct; make a new one.")
        if self._first is not None:
            return self._first
        graphs: dict[int, Product] = {}
        total = torch.zeros(self.dimension + 1, dtype=self.dtype, device=self.device)
        room, needed = self.memory, 0  # the next graph may need as much as the last one retained
        layers = range(len(self.parameters))
        marks = [0.0] * len(layers)  # on the host: an entry at a time would wait for a GPU
        pair = total.new_zeros(0, self.dimension)  # nothing to multiply
        if not self.symmetric:
            pair = fixed_vectors(self.dimension, total)
        images = torch.zeros_like(pair)
        for place, (index, weight) in enumerate(self.counted.items()):
            # once one was dropped, none after it is retained: `_graphs` holds the first ones
            keep = place == len(graphs) and needed <= room
            product, value, gradient, held = self._build(index, weigh=keep)
            if keep and held <= room:
                graphs[index] = product
                room, needed = room - held, held
            marks = [
                1.0 if part is not None else mark
                for mark, part in zip(marks, gradient, strict=True)
            ]
            filled = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(self.parameters, gradient, strict=True)
            ]
            flat = torch.cat([value.reshape(1), *(g.reshape(-1) for g in filled)])
            total.add_(flat, alpha=weight)
            self._add_products(images, pair, product, weight, layers)
            # Before the next graph is built, so that only one is added to those retained.
            del product
        # Each process checks its own part, and all learn of it with the gradient: an error on one
        # alone would leave the others in their next collective.
        marks.append(float(not self.symmetric and self._is_asymmetric(pair, images, graphs)))
        used = torch.tensor(marks, dtype=self.dtype, device=self.device)
        if self.mean is not None:
            total, used = self.mean(torch.cat([total, used])).split([len(total), len(used)])
        self._require_hessian(total, used.tolist())
        self._graphs, self.retained = graphs, len(graphs)
        self._first = float(total[0]), total[1:].clone()
        return self._first

    def _is_asymmetric(self, pair: Tensor, images: Tensor, graphs: dict[int, Product]) -> bool:
        """Whether this process's products are more asymmetric than rounding explains. A third
        product measures the rounding, only where the asymmetry is above `negligible_asymmetry`."""
        found = asymmetry(pair, images)
        if not found > negligible_asymmetry(self.dtype):  # also for NaN, which is reported as such
            return False
        both, of_sum = pair.sum(0, keepdim=True), torch.zeros_like(pair[:1])
        for index, weight in self.counted.items():
            product = graphs.get(index) or self._build(index)[0]
            self._add_products(of_sum, both, product, weight, range(len(self.parameters)))
        return found > ROUNDINGS * rounding_error(images, of_sum[0])

    def _require_hessian(self, total: Tensor, marks: list[float]) -> None:
        """``marks``: for each layer whether it was used, then whether products are asymmetric."""
        *used, asymmetric = marks
        for name, use in zip(self.names, used, strict=True):
            if use == 0:
                raise ConfigError(
                    f"Parameter {name!r} gets no gradient from the loss; "
                    "use it, or freeze it with requires_grad_(False)."
                )
        if not bool(torch.isfinite(total).all()):
            raise TrainingError("The probe loss or its gradient is not finite.")
        if asymmetric:
            with ExitStack() as stack:  # one more pass, which names the custom Functions
                self._enter_measurement(stack)
                functions = stack.enter_context(OwnFunctions(self.model))
                functions.collect(self.loss(self.model, self.batches[0]))
            raise not_symmetric(list(functions.found))

    def _enter_measurement(self, stack: ExitStack) -> None:
        """Enter what a pass with a second derivative needs; nothing of the model changes."""
        stack.enter_context(preserve_model(self.model, self.mode))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(twice_differentiable())
        native = NativeDoubleBackward(
            batch_statistics=self.mode == "batch-statistics",
            channels_last=self.device.type == "cpu" and self.dtype == torch.float32,
        )
        stack.enter_context(native)
        stack.callback(lambda: self._note_mode(native))

    def _note_mode(self, passed: NativeDoubleBackward) -> None:
        self.mode_matters |= passed.mode_matters

    def _build(
        self, index: int, weigh: bool = False
    ) -> tuple[Product, Tensor, list[Tensor | None], int]:
        """A micro-batch's product, loss, gradient (None for a parameter that it does not use), and
        the bytes that its graph holds (0 unless ``weigh``)."""
        with ExitStack() as stack:
            self._enter_measurement(stack)
            live = stack.enter_context(LiveBytes()) if weigh else None
            outputs: list[Any] = []
            hook = self.model.register_forward_hook(lambda *call: outputs.append(call[-1]))
            stack.callback(hook.remove)
            with no_random_draws():
                value = self.loss(self.model, self.batches[index])
            check_loss(value)
            with named_operation():
                gradient: list[Tensor | None] = [None] * len(self.parameters)
                if value.requires_grad:
                    # create_graph: products are derivatives of this gradient
                    options: Any = {"create_graph": True, "allow_unused": True}
                    gradient = list(torch.autograd.grad(value, self.parameters, **options))
                if self.kind == "hessian":
                    product = _hessian_product(gradient, self.parameters)
                else:
                    product = _gauss_newton_product(value, outputs, self.parameters)
            held = live.held() if live else 0
        return product, value.detach(), [g if g is None else g.detach() for g in gradient], held


def _hessian_product(gradient: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Product:
    """Pearlmutter's product: the derivative of <gradient, v> by the chosen layers."""
    return lambda v, layers: _derivative(
        [gradient[i] for i in layers], v, [parameters[i] for i in layers]
    )


def _derivative(
    outputs: Sequence[Tensor | None], cotangents: Sequence[Tensor], targets: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The derivative of <outputs, cotangents> by the targets.

    If a parameter enters the loss linearly, its gradient is a constant without a graph. If the loss
    does not use a parameter, its gradient is None. Both add nothing.
    """
    pairs = [
        (output, u)
        for output, u in zip(outputs, cotangents, strict=True)
        if output is not None and output.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(t) for t in targets]
    varying, along = zip(*pairs, strict=True)
    return _vjp(varying, targets, along)


def _gauss_newton_product(
    value: Tensor, outputs: list[Any], parameters: Sequence[Tensor]
) -> Product:
    """J' H_L J v. J v is the derivative of J' s by s (the double-backward trick)."""
    if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
        raise ConfigError("Gauss-Newton needs a loss that runs the model once, to one tensor.")
    z = outputs[0]
    if not z.requires_grad:  # this micro-batch uses no parameter, so J is zero
        return lambda v, layers: [torch.zeros_like(parameters[i]) for i in layers]
    s = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, parameters, s, create_graph=True, allow_unused=True)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)

    def product(v: Sequence[Tensor], layers: Sequence[int]) -> Sequence[Tensor]:
        (pushed,) = _derivative([pulled[i] for i in layers], v, [s])
        (curved,) = _vjp([slope], [z], [pushed]) if slope.requires_grad else (torch.zeros_like(z),)
        return _vjp([z], [parameters[i] for i in layers], [curved])

    return product


def _vjp(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
    return torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were created under it and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[Any, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                # A weak reference to the storage, not the tensor: views share it, and autograd
                # saves storages in new tensor objects.
                ref = StorageWeakRef(storage)
                self._storages[ref.cdata] = (ref, storage.nbytes())
        return out

    def held(self) -> int:
        return sum(size for ref, size in self._storages.values() if not ref.expired())
