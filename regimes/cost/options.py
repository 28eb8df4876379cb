"""The options of `regimes cost --model`; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from regimes.base.console.metavars import LEFT_OUT, named


@dataclass(frozen=True)
class JobOptions:
    """Describes a job that has not been run.

    Attributes:
        model: a known model (gpt2-124m, llama-1b, llama-7b, resnet50, vit-b), a .toml of shapes,
            package.module:function, or the folder of a Hugging Face config.json.
        step: seconds of one device's step without communication, as measured; with --items they
            also say how fast the device compresses, where --device does not. Default from the
            operations of the model, the items of a step, the device and its utilisation.
        items: tokens or samples of one device's step.
        flops: operations of the forward pass for one token or sample; default of known models, and
            two for each parameter and token.
        device: a name (a100, h100, h200, ...), or its speed, as 312TFLOP/s,2039GB/s; without
            it, and without --step and --items together, an a100 is assumed.
        utilisation: share of the device's operations per second that the step reaches.
        nodes: machines; where a domain of fast links has several, count it as one.
        gpus: devices in each.
        within: bandwidth of a device's link within a node, and latency of a message; default
            400Gbit/s,5us.
        between: bandwidth of a node's link to the others, which its devices share; default
            10Gbit/s,50us.
        links: file of both, which torchrun ... -m regimes doctor --links FILE writes; --within and
            --between replace what it has.
        worker: what compresses a gradient of its own: each device, or a node, whose devices average
            their gradients first (attach(..., nodes=...)); default what attach chooses.
        dtype: in which a dense gradient travels.
        bucket_mb: MiB of the gradient that are reduced together during the backward pass.
        methods: COMPRESSOR:LEVEL, and /PERIOD for local steps, e.g. powersgd:4 dense/32.
        json: file for the numbers.
        figure: file for a figure of seconds against bandwidth, .png, .svg or .pdf.
    """

    model: Annotated[str | None, named("MODEL"), LEFT_OUT] = None
    step: Annotated[str | None, named("SECONDS"), LEFT_OUT] = None
    items: Annotated[int | None, LEFT_OUT] = None
    flops: Annotated[float | None, LEFT_OUT] = None
    device: Annotated[str | None, named("DEVICE|SPEED"), LEFT_OUT] = None
    utilisation: float = 0.4
    nodes: int = 2
    gpus: int = 8
    within: Annotated[str | None, named("BANDWIDTH,LATENCY"), LEFT_OUT] = None
    between: Annotated[str | None, named("BANDWIDTH,LATENCY"), LEFT_OUT] = None
    links: Annotated[Path | None, LEFT_OUT] = None
    worker: Annotated[Literal["node", "device"] | None, LEFT_OUT] = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_mb: float = 25.0
    methods: Annotated[tuple[str, ...] | None, named("METHOD"), LEFT_OUT] = None
    json: Annotated[Path | None, LEFT_OUT] = None
    figure: Annotated[Path | None, LEFT_OUT] = None


def changed_options(options: JobOptions, usual: JobOptions) -> list[str]:
    """List the options that differ from others, as a user writes them."""
    names = [field.name for field in fields(options)]
    differing = [name for name in names if getattr(options, name) != getattr(usual, name)]
    return [name.replace("_", "-") for name in differing]
