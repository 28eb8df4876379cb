"""Convolution and batch normalisation with a *second* derivative that runs on native kernels only.

A Hessian-vector product costs, at best, six convolutions per layer where a training step needs
three. torch's own second derivative of a convolution needs more (slices per group, transposed
copies, kernels as large as the image), and its second derivative of batch normalisation needs some
twenty passes. Here:

* a convolution is bilinear, so every derivative of it is one of three native kernels;
* batch normalisation with running statistics is an affine map per channel; directly after a
  convolution it is folded into the weights, and costs nothing;
* batch normalisation with the batch's statistics has the closed form in `_BatchNormGradient`.

`NativeDoubleBackward` replaces torch's functional calls of both while the user's model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regimes.base.torch_compat import version_of


class Geometry(NamedTuple):
    """Holds the arguments of `aten.convolution` after the weights."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _convolve(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    return torch.ops.aten.convolution(x, w, b, *geometry)


def _gradients(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, mask: Iterable[bool]) -> Any:
    """The gradients of x and w (None where the mask says so) in one native call."""
    mask = [*mask, False]
    return torch.ops.aten.convolution_backward(g, x, w, None, *geometry, mask)[:2]


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, known: Any = None
    ) -> Tensor:
        """Convolve; with `known` = (y, scale, shift) the value is y * scale + shift, without a
        convolution."""
        ctx.geometry, ctx.biased = geometry, b is not None
        ctx.save_for_backward(x, w)
        if known is None:
            return _convolve(x, w, b, geometry)
        y, scale, shift = known
        return _combine(y, (y, scale), shift=shift)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        gx, gw = _ConvolutionGradient.apply(g, x, w, ctx.geometry, need_x, need_w)
        gb = g.sum(_all_but_channels(g)) if ctx.biased and need_b else None
        return gx, gw, gb, None, None


class _ConvolutionGradient(torch.autograd.Function):
    """(g, x, w) -> gradients of x and w. It is bilinear in each pair, too, so that its own
    derivatives are of the same three kernels."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, need_x: bool, need_w: bool
    ) -> Any:
        ctx.geometry = geometry
        ctx.save_for_backward(g, x, w)
        ctx.set_materialize_grads(False)
        return _gradients(g, x, w, geometry, (need_x, need_w))

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, p: Tensor | None) -> Any:
        (g, x, w), geometry = ctx.saved_tensors, ctx.geometry
        need_g, need_x, need_w = ctx.needs_input_grad[:3]
        to_g = to_x = to_w = None
        if u is not None:
            to_g = _convolve(u, w, None, geometry) if need_g else None
            to_w = _gradients(g, u, w, geometry, (False, True))[1] if need_w else None
        if p is not None:
            if need_g:
                along = _convolve(x, p, None, geometry)
                to_g = along if to_g is None else to_g + along
            to_x = _gradients(g, x, p, geometry, (True, False))[0] if need_x else None
        return to_g, to_x, to_w, None, None, None


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != 1)


def _column(a: Tensor, x: Tensor) -> Tensor:
    """A vector over channels, shaped to broadcast against x."""
    return a.view((1, -1) + (1,) * (x.ndim - 2))


def _combine(x: Tensor, *terms: tuple[Tensor, Tensor], shift: Tensor) -> Tensor:
    """Sum of (per-channel factor) * (tensor) plus a per-channel shift, one pass per term."""
    (first, a), *rest = terms
    out = torch.addcmul(_column(shift, x), first, _column(a, x))
    for tensor, factor in rest:
        out.addcmul_(tensor, _column(factor, x))
    return out


class Affine(torch.autograd.Function):
    """Computes y = a x + b with a and b per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return _combine(x, (x, a), shift=b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, a = ctx.saved_tensors
        return _AffineGradient.apply(g, x, a)


class _AffineGradient(torch.autograd.Function):
    """(g, x, a) -> gradients of x, a and b."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, a: Tensor) -> Any:
        ctx.save_for_backward(g, x, a)
        dims = _all_but_channels(g)
        return g * _column(a, g), (g * x).sum(dims), g.sum(dims)

    @staticmethod
    def backward(ctx: Any, u: Tensor, p: Tensor, q: Tensor) -> Any:
        g, x, a = ctx.saved_tensors
        to_g = _combine(g, (u, a), (x, p), shift=q)
        to_x = g * _column(p, g) if ctx.needs_input_grad[1] else None
        return to_g, to_x, (u * g).sum(_all_but_channels(g))


class BatchNorm(torch.autograd.Function):
    """Computes y = w (x - mean) r + b with the batch's own mean and r = 1 / sqrt(var + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        var, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
        r = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, w, mean, r)
        return _combine(x, (x, w * r), shift=b - w * r * mean)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (*_BatchNormGradient.apply(g, *ctx.saved_tensors), None)


class _BatchNormGradient(torch.autograd.Function):
    """With h = (x - mean) r and m() the mean over all but channels, the gradients are

        x: w r (g - m(g) - h m(g h)),    w: n m(g h),    b: n m(g).

    Against cotangents u, p, q their inner product is w r n A + n p m(g h) + n q m(g), where
    A = m(u g) - m(u) m(g) - m(u h) m(g h); deriving it with dh = r (dx - m(dx) - h m(h dx)) and
    dr = -r^2 m(h dx) gives the backward below. It treats x, w and g as the only variables: mean
    and r are functions of x, and their part is in the formula.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, mean: Tensor, r: Tensor) -> Any:
        dims = _all_but_channels(g)
        mg = g.mean(dims)
        mgh = ((g * x).mean(dims) - mean * mg) * r
        ctx.save_for_backward(g, x, w, mean, r, mg, mgh)
        a, n = w * r, g.numel() // g.shape[1]
        gx = _combine(g, (g, a), (x, -a * mgh * r), shift=a * (mgh * r * mean - mg))
        return gx, n * mgh, n * mg

    @staticmethod
    def backward(ctx: Any, u: Tensor, p: Tensor, q: Tensor) -> Any:
        g, x, w, mean, r, mg, mgh = ctx.saved_tensors
        dims, a, n = _all_but_channels(g), w * r, g.numel() // g.shape[1]
        mu = u.mean(dims)
        muh = ((u * x).mean(dims) - mean * mu) * r
        inner = (u * g).mean(dims) - mu * mg - muh * mgh  # A
        along_h = p - a * muh
        to_g = _combine(g, (u, a), (x, along_h * r), shift=q - a * mu - along_h * r * mean)
        # z = along_u u + along_g g is the cotangent of h
        along_u, along_g = -a * mgh, p - a * muh
        mz, mzh = along_u * mu + along_g * mg, along_u * muh + along_g * mgh
        factor = -r * mzh - a * inner * r  # of h in the cotangent of x
        terms = (u, along_u * r), (g, along_g * r), (x, factor * r)
        to_x = _combine(g, *terms, shift=-r * mz - factor * r * mean)
        return to_g, to_x, n * inner * r, None, None


# -- interception of a model's calls ---------------------------------------------------------

_DIRECT = ("bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("bias", "stride", "padding", "output_padding", "groups", "dilation")
_CONVOLUTIONS: dict[Callable, tuple[str, ...]] = {  # arguments after input and weight, in order
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _DIRECT),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED
    ),
}
_LAYOUT_MATTERS = {
    torch.Tensor.view,
    torch.Tensor.view_as,
    torch.Tensor.as_strided,
    torch.as_strided,
}


class NativeDoubleBackward(TorchFunctionMode):
    """Puts, while active, this file's convolutions and batch norms in place of torch's.

    `batch_statistics`: every batch norm uses its batch's statistics and updates none.
    `channels_last`: 2-d convolutions ask for that layout where their input is larger than their
    kernel (faster on CPUs in float32; kernels, which torch would copy each time, cost more than it
    gains elsewhere). Values do not depend on it beyond rounding; `view`, `view_as` and
    `as_strided`, which do, see the layout that the model expects.
    """

    def __init__(self, *, batch_statistics: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.batch_statistics, self.channels_last = batch_statistics, channels_last
        # a batch norm with running statistics was met: training mode does not use these
        self.mode_matters = False
        self._last: tuple[Any, ...] | None = None  # the last convolution: output, inputs

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func is torch.nn.functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if self.channels_last and func in _LAYOUT_MATTERS:
            x = args[0]
            if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
                args = (x.contiguous(), *args[1:])
        return func(*args, **kwargs)

    def __exit__(self, *exc: Any) -> None:
        self._last = None
        super().__exit__(*exc)

    def _convolution(
        self, func: Callable, input: Tensor, weight: Tensor, *args: Any, **kw: Any
    ) -> Any:
        n = weight.ndim - 2
        names = _CONVOLUTIONS[func]
        given = dict(zip(names, args, strict=False)) | kw
        usual = input.ndim == weight.ndim and input.is_floating_point()
        named = isinstance(given.get("padding"), str)  # "same", "valid"
        if not usual or named or torch.is_autocast_enabled(input.device.type):
            return func(input, weight, *args, **kw)

        def per_dimension(name: str, default: int) -> list[int]:
            value = given.get(name, default)
            values = [value] if isinstance(value, int) else list(value)
            return values * n if len(values) == 1 else values

        stride, padding = per_dimension("stride", 1), per_dimension("padding", 0)
        dilation, added = per_dimension("dilation", 1), per_dimension("output_padding", 0)
        transposed, groups = names is _TRANSPOSED, given.get("groups", 1)
        geometry = Geometry(stride, padding, dilation, transposed, added, groups)
        if self.channels_last and n == 2:
            wide = input.numel() > 2 * weight.numel()
            layout = torch.channels_last if wide else torch.contiguous_format
            input = input.contiguous(memory_format=layout)
        bias = given.get("bias")
        out = Convolution.apply(input, weight, bias, geometry)
        self._last = (out, input, weight, bias, geometry)
        return out

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        channels = input.shape[1]
        weight = input.new_ones(channels) if weight is None else weight
        bias = input.new_zeros(channels) if bias is None else bias
        if training or running_mean is None or running_var is None:
            return BatchNorm.apply(input, weight, bias, eps)
        self.mode_matters = True
        if self.batch_statistics:
            return BatchNorm.apply(input, weight, bias, eps)
        scale = weight * torch.rsqrt(running_var + eps)
        shift = bias - running_mean * scale
        # fold only directly after a convolution, whose output nothing has changed in place
        if self._last is None or self._last[0] is not input or version_of(input):
            return Affine.apply(input, scale, shift)
        _, x, w, b, geometry = self._last
        if geometry.transposed:  # its output channels are the second axis of the weights
            return Affine.apply(input, scale, shift)
        self._last = None
        folded = w * scale.view((-1,) + (1,) * (w.ndim - 1))
        known = (input.detach(), scale.detach(), shift.detach())
        shift = shift if b is None else shift + b * scale
        return Convolution.apply(x, folded, shift, geometry, known)
