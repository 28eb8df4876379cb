"""Runs a user's unchanged model on the operations of `double_backward.py`.

torch's modules reach convolution and batch normalisation through functional calls, which a
`TorchFunctionMode` intercepts. So nothing is replaced in the model: while `NativeDoubleBackward` is
active, those calls build a graph that is cheap to differentiate twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regimes.curvature.double_backward import Affine, BatchNorm, Convolution, Geometry

_DIRECT = ("bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("bias", "stride", "padding", "output_padding", "groups", "dilation")
_CONVOLUTIONS: dict[Callable, tuple[str, ...]] = {  # arguments behind input and weight, in order
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _DIRECT),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED
    ),
}
_LAYOUT_MATTERS = {torch.Tensor.view, torch.Tensor.as_strided, torch.as_strided}


class NativeDoubleBackward(TorchFunctionMode):
    """While active, convolutions and batch norms are those of `double_backward.py`.

    `batch_statistics`: every batch norm uses its batch's statistics and updates none.
    `channels_last`: 2-d convolutions ask for that layout where their input is larger than their
    kernel (faster on CPUs in float32; kernels, which torch would copy each time, cost more than it
    gains elsewhere). Values do not depend on it beyond rounding; `view` and `as_strided`, which do,
    see the layout that the model expects.
    """

    def __init__(self, *, batch_statistics: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.batch_statistics, self.channels_last = batch_statistics, channels_last
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
        dilation, beyond = per_dimension("dilation", 1), per_dimension("output_padding", 0)
        transposed, groups = names is _TRANSPOSED, given.get("groups", 1)
        geometry = Geometry(stride, padding, dilation, transposed, beyond, groups)
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
        if self.batch_statistics or training or running_mean is None or running_var is None:
            return BatchNorm.apply(input, weight, bias, eps)
        scale = weight * torch.rsqrt(running_var + eps)
        shift = bias - running_mean * scale
        if self._last is None or self._last[0] is not input or input._version:
            return Affine.apply(input, scale, shift)
        _, x, w, b, geometry = self._last
        if geometry.transposed:  # its output channels are the second axis of the weights
            return Affine.apply(input, scale, shift)
        self._last = None
        folded = w * scale.view((-1,) + (1,) * (w.ndim - 1))
        known = (input.detach(), scale.detach(), shift.detach())
        shift = shift if b is None else shift + b * scale
        return Convolution.apply(x, folded, shift, geometry, known)
