"""The optimiser of a run: torch's own, over groups of parameters. Its gradients are the shared
updates, so that every process takes the same step.

Muon (Jordan et al., "Muon", 2024) updates the matrices of hidden layers; AdamW updates embeddings,
the output layer and vectors, as its authors advise, and convolutions (where they use Muon for all
but the first: README of github.com/KellerJordan/Muon). Its step is scaled to the size of AdamW's
(Liu et al., "Muon is scalable for LLM training", 2025), so that one rate serves both.
Its iteration runs in bfloat16, so runs on different processors agree to that precision only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from regimes.base.config import OptimizerConfig, Registry
from regimes.base.errors import ConfigError, TrainingError

CLASSES = Registry("optimizer", dict.fromkeys(("sgd", "adamw", "muon")))  # built by name


class Optimizers:
    """Steps one or more torch optimisers together, at one rate.

    Attributes:
        parts: the optimisers; each trainable parameter is in one of them.
        lr: the rate of the next step; while instruments see a synchronisation after local steps,
            the sum of the rates since the last one.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], lr: float) -> None:
        self.parts, self.lr = list(parts), lr

    def step(self) -> None:
        """Move the weights along their ``.grad``.

        Raises:
            TrainingError: a factor of the step is too large for the weights' type.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.lr
            try:
                part.step()
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                raise TrainingError(
                    f"a step at the rate {self.lr:g} overflows: lower optimizer.lr, "
                    "optimizer.weight_decay or what optimizer.options has; the record up to the "
                    "last epoch is intact"
                ) from None

    def decoupled_decay(self, parameters: Sequence[nn.Parameter]) -> list[float]:
        """Return the decoupled weight decay of each parameter, 0 where decay is part of the
        gradient."""
        decay = {
            id(p): float(group["weight_decay"])
            for part in self.parts
            for group in part.param_groups
            if isinstance(part, torch.optim.Muon) or group.get("decoupled_weight_decay")
            for p in group["params"]
        }
        return [decay.get(id(p), 0.0) for p in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def mean_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average the states of several workers' optimisers into one: each momentum's mean; all else,
    and momenta that not all have yet, from the first."""
    return cast("dict[str, Any]", _mean_of_states(states))


def _mean_of_states(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {
            key: _mean_of_states([v[key] for v in values]) if all(key in v for v in values) else own
            for key, own in first.items()
        }
    if isinstance(first, list):
        return [_mean_of_states(list(column)) for column in zip(*values, strict=True)]
    averaged = isinstance(first, Tensor) and first.ndim and first.is_floating_point()
    return torch.stack(list(values)).mean(0) if averaged else first


def build_optimizers(
    config: OptimizerConfig, model: nn.Module, classes: int, *, fused: bool = False
) -> Optimizers:
    """Build the configured optimiser over the trainable parameters of a model.

    Args:
        classes: outputs of the model, see ``_output_layer``.
        fused: SGD and AdamW step in one kernel, as torch offers on a GPU: other last bits.

    Raises:
        ConfigError: an unknown optimiser, options that its class does not take, or a momentum
            beside one that has none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    usual = OptimizerConfig.momentum
    if config.name not in ("sgd", "muon") and config.momentum != usual:
        raise ConfigError(
            f"optimizer.momentum = {config.momentum!r}: it has no effect with {config.name}: leave "
            f"it out ({usual}), or write it into optimizer.options, as its class names it"
        )
    try:
        match config.name:
            case "sgd":
                sgd = torch.optim.SGD(
                    _parameter_groups(config, parameters, vectors=True),
                    lr=config.lr,
                    momentum=config.momentum,
                    nesterov=config.nesterov and config.momentum > 0,
                    foreach=not fused,
                    fused=fused,
                    **config.options,
                )
                return Optimizers([sgd], config.lr)
            case "adamw":
                return Optimizers([_build_adamw(config, parameters, fused)], config.lr)
            case "muon":
                return Optimizers(_build_muon(config, model, parameters, classes, fused), config.lr)
        groups = _parameter_groups(config, parameters, vectors=False)
        made = CLASSES.load(config.name)(groups, lr=config.lr, **config.options)
    except (TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"the optimizer {config.name!r} cannot be built: {why}") from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer {config.name!r} is no torch.optim.Optimizer")
    _check_steps(config, type(made))
    return Optimizers([made], config.lr)


def _build_adamw(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], fused: bool
) -> torch.optim.Optimizer:
    groups = _parameter_groups(config, parameters, vectors=False)
    return torch.optim.AdamW(groups, lr=config.lr, foreach=not fused, fused=fused, **config.options)


def _build_muon(
    config: OptimizerConfig,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    classes: int,
    fused: bool,
) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for the rest; ``options`` are AdamW's betas and eps."""
    output = _output_layer(model, classes)
    outer = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or module is output
        for parameter in module.parameters(recurse=False)
    }
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    others = [_build_adamw(config, rest, fused)] if rest else []
    if not hidden:
        return others
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *others]


def _output_layer(model: nn.Module, classes: int) -> nn.Linear | None:
    """The linear layer that gives the logits.

    The last linear layer of the attribute ``head``; None where that is None (logits are products
    with the embedding). In a model without the attribute, its last linear layer, if it has
    ``classes`` outputs.
    """
    head = getattr(model, "head", model)
    if head is None:
        return None
    declared = isinstance(head, nn.Module) and head is not model
    linear = [m for m in (head if declared else model).modules() if isinstance(m, nn.Linear)]
    return linear[-1] if linear and (declared or linear[-1].out_features == classes) else None


def _parameter_groups(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], vectors: bool
) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay; one where all have it or none.

    Args:
        vectors: whether 1-D parameters decay.
    """
    decay = config.weight_decay
    if vectors or not decay:
        return [{"params": list(parameters), "weight_decay": decay}]
    parts = {
        decay: [p for p in parameters if p.ndim > 1],
        0.0: [p for p in parameters if p.ndim <= 1],
    }
    return [{"params": ps, "weight_decay": decay} for decay, ps in parts.items() if ps]


def _check_steps(config: OptimizerConfig, kind: type[torch.optim.Optimizer]) -> None:
    """Raise ConfigError unless it takes a step along a dense gradient, without a closure."""
    probe = nn.Parameter(torch.ones(2, 2))
    probe.grad = torch.ones(2, 2)
    try:
        with torch.random.fork_rng([]):
            kind([probe], lr=config.lr, **config.options).step()  # type: ignore[call-arg]
    except Exception as error:  # a class of another package may raise anything
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the optimizer {config.name!r} cannot be used: {why}") from None
