"""The shapes of a user's model, for `regimes cost --model`: no parameter memory is allocated.

A model is named by one of

- a name of `KNOWN`: its shapes are a TOML file in ``shapes/``,
- such a file of the user's,
- ``package.module:callable``, which builds the module (on the meta device) or is one,
- a Hugging Face ``config.json``, or its folder (with transformers; on the meta device).

A file of shapes has ``[[layers]]`` with ``name``, ``shape`` and, for equal layers, ``times``; and
may have ``flops``, the floating-point operations of the forward pass for one ``item``, and
``item``, "token" or "sample".
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from regimes.base.config import Registry
from regimes.base.config.registry import required_arguments
from regimes.base.config.toml import read_tables
from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest
from regimes.collectives.layers import Layer

if TYPE_CHECKING:
    from torch import nn

SHAPES = Path(__file__).with_name("shapes")
KNOWN = tuple(sorted(path.stem for path in SHAPES.glob("*.toml")))
MAX_LAYERS_PER_ENTRY = 10**6  # layers of one line of a file
MOST_NUMBERS, MOST_FLOPS = 10**16, 1e30  # in all layers; of the forward pass for one item
Item = Literal["token", "sample"]


@dataclass(frozen=True)
class Model:
    """Holds what a prediction needs of a model.

    Attributes:
        name: as the user wrote it.
        layers: its trainable parameters; one that several modules share appears once.
        item: what its input is counted in.
        flops: floating-point operations of the forward pass for one item; None: unknown.
    """

    name: str
    layers: tuple[Layer, ...]
    item: Item = "sample"
    flops: float | None = None

    @functools.cached_property
    def size(self) -> int:
        """Return the number of numbers in all layers."""
        return sum(layer.size for layer in self.layers)

    @property
    def counted(self) -> bool:
        """Answer whether the operations of an item are known."""
        return self.flops is not None or self.item == "token"

    def step_flops(self, items: int) -> float:
        """Count the floating-point operations of a forward and a backward pass over ``items``.

        A backward pass takes twice the operations of a forward pass. A forward pass for a token
        takes, where nothing is known, twice the number of parameters (Kaplan et al., 2020, table 1,
        without attention).

        Raises:
            ConfigError: nothing is known of a model of samples.
        """
        forward = self.flops
        if forward is None and self.item == "token":
            forward = 2.0 * self.size
        if forward is None:
            raise ConfigError(
                f"the seconds of a step of {self.name} do not follow from its shapes: give them, "
                "e.g. --step 0.4s, or the operations of a sample's forward pass, e.g. --flops 8e9"
            )
        return 3 * forward * items


def read_model(text: str) -> Model:
    """Read the model that ``text`` names, in one of the four ways above.

    Raises:
        ConfigError: no model of that name, or it cannot be built or read.
    """
    if text in KNOWN:
        return _from_file(SHAPES / f"{text}.toml", text)
    if text.endswith(".toml"):
        return _from_file(Path(text), text)
    path = Path(text)
    if path.name == "config.json" or (path / "config.json").is_file():
        return _from_transformers(path)
    if ":" in text:
        return _from_callable(text)
    raise ConfigError(
        f"--model {text}: no such model, {suggest_nearest(text, KNOWN)} Or give a .toml of shapes, "
        "package.module:function, or the folder of a Hugging Face config.json"
    )


# -- a file of shapes ------------------------------------------------------------------------


def _from_file(path: Path, name: str) -> Model:
    """The model of a TOML file."""
    try:
        table = read_tables(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the shapes {name} cannot be read: {error}") from None
    known = {"layers", "flops", "item"}
    for key in table.keys() - known:
        raise ConfigError(f"{name}: unknown field {key!r}, {suggest_nearest(key, known)}")
    item, flops = table.get("item", "sample"), table.get("flops")
    require(item in get_args(Item), f"{name}: item", item, '"token" or "sample"')
    good = flops is None or (type(flops) in (int, float) and 0 < flops <= MOST_FLOPS)
    require(good, f"{name}: flops", flops, f"a number above 0, up to {MOST_FLOPS:g}")
    lines = table.get("layers")
    require(isinstance(lines, list) and bool(lines), f"{name}: layers", lines, "[[layers]] tables")
    layers = [
        layer
        for i, line in enumerate(lines or [])
        for layer in _repeat_layers(line, f"{name}: {i}")
    ]
    return _require_size(Model(name, tuple(layers), item, flops))


def _require_size(model: Model) -> Model:
    """The model, if it has from 1 to `MOST_NUMBERS` parameters.

    Raises:
        ConfigError: it has none, or more.
    """
    good = 0 < model.size <= MOST_NUMBERS
    require(good, f"{model.name}: parameters", model.size, f"1 to {MOST_NUMBERS:.0e}")
    return model


def _repeat_layers(line: Any, where: str) -> list[Layer]:
    """The layers of one ``[[layers]]``; ``{}`` in the name is the layer's number."""
    good = isinstance(line, dict) and line.keys() <= {"name", "shape", "times"}
    require(good, f"{where}. layer", line, "a table with name, shape and times")
    name, shape, times = line.get("name"), line.get("shape"), line.get("times", 1)
    require(isinstance(name, str), f"{where}. layer's name", name, "a text")
    good = isinstance(shape, list) and bool(shape) and all(is_integer(side, 1) for side in shape)
    require(good, f"{where}. layer's shape", shape, "a list of whole numbers from 1")
    good = is_integer(times, 1) and times <= MAX_LAYERS_PER_ENTRY
    require(
        good, f"{where}. layer's times", times, f"a whole number from 1 to {MAX_LAYERS_PER_ENTRY}"
    )
    return [Layer(name.replace("{}", str(i)), tuple(shape)) for i in range(times)]


# -- a module --------------------------------------------------------------------------------


def _from_callable(text: str) -> Model:
    """The model that ``package.module:callable`` is, or returns where it is built on the meta
    device."""
    from torch import nn

    if "" not in sys.path:
        sys.path.append("")  # modules of the current folder, after installed packages
    target = _import_object(text)
    if isinstance(target, nn.Module):
        return from_module(target, text)
    require(callable(target), f"--model {text}", target, "a module, or a function that returns one")
    return from_module(_build_on_meta(text, target), text)


def _import_object(text: str) -> Any:
    """The object ``package.module:name``.

    Raises:
        ConfigError: it cannot be imported.
    """
    if text.startswith("torchvision."):
        from regimes.data.sources import torchvision_datasets

        torchvision_datasets()  # imports torchvision, even if it was built for another torch
    return Registry("model").load(text)


def _build_on_meta(name: str, build: Callable[[], Any]) -> Any:
    """What ``build()`` returns, without memory for its parameters.

    Raises:
        ConfigError: it needs arguments, or raises.
    """
    import torch

    if needed := required_arguments(build):
        raise ConfigError(
            f"--model {name} needs {', '.join(needed)}: name a function without arguments that "
            "returns the model"
        )
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"--model {name} cannot be built on the meta device: {error!r}"
        ) from error


def from_module(model: nn.Module, name: str) -> Model:
    """Take the trainable parameters of a module, on any device: of one with an embedding per token,
    of another per sample.

    Raises:
        ConfigError: it is no module, or has no trainable parameter, or one without a shape (lazy)
            or of complex numbers.
    """
    from torch import nn
    from torch.nn.parameter import is_lazy

    from regimes.training.gradients import layer_table

    require(isinstance(model, nn.Module), f"--model {name}", type(model), "an nn.Module")
    for key, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"--model {name}: parameter {key!r} has no shape before the first batch: return "
                "the model after one forward pass, or write its sizes"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"--model {name}: parameter {key!r} is complex: methods are predicted for real "
                "gradients"
            )
    reads_text = any(isinstance(module, nn.Embedding) for module in model.modules())
    item: Item = "token" if reads_text else "sample"
    return _require_size(Model(name, tuple(layer_table(model)), item))


def _from_transformers(path: Path) -> Model:
    """The causal language model of a Hugging Face configuration; where transformers has none, the
    bare model."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"--model {path} needs transformers: pip install transformers") from None
    folder = path.parent if path.name == "config.json" else path
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path} is no configuration of transformers: {error}") from error
    kinds: Sequence[Any] = (transformers.AutoModelForCausalLM, transformers.AutoModel)
    mappings: Sequence[Mapping[Any, Any]] = [kind._model_mapping for kind in kinds]
    kind = kinds[0] if type(config) in mappings[0] else kinds[1]
    return from_module(_build_on_meta(str(path), lambda: kind.from_config(config)), str(path))
