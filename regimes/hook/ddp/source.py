"""The gradients of a DistributedDataParallel model: a ``GradientSource`` of ``ddp.steps``.

``fsdp.replicas`` has the source of a model which FSDP2 divides. Each calls the steps in one order.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, finalize, proxy, ref

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from regimes.base.capabilities import Mode
from regimes.base.errors import ConfigError
from regimes.base.precision import HALF
from regimes.base.torch_compat import (
    COMPILED,
    allows_uneven_inputs,
    comm_hooks,
    queue_callback,
    reduces_in_python,
    tensor_parallel_part,
    uncompiled,
    used_parameters,
)
from regimes.collectives.group import on_group, on_nodes
from regimes.collectives.layers import Layer
from regimes.collectives.process_group import Group
from regimes.collectives.processes import ProcessWorld
from regimes.hook.ddp.applied import remove_hooks
from regimes.hook.ddp.nodes import GivenNodes, choose_nodes
from regimes.hook.ddp.steps import HookSteps
from regimes.job.choices import Choice
from regimes.job.process_states import ProcessStates

_SAME = (  # attributes of DDP that decide the collectives, or which layers a step leaves alone
    "bucket_bytes_cap",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
)
_WRAP = "wrap it first, model = DistributedDataParallel(model)"
_SHARDED = (
    "it keeps a part of the parameters on each process: shard it with fully_shard(model, "
    'mesh=mesh["shard"]) of a mesh with two dimensions, and attach_replicas(model, mesh['
    '"replicate"]) compresses what replicas exchange'
)
_NOT_DDP = {  # by the name of a class, so that none is imported
    "compiled DDP": "attach before compiling, hook = regimes.attach(ddp), then torch.compile(ddp)",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": "it keeps a part of the parameters on each process: attach_shards(model, "
    'mesh) compresses what these exchange, attach_replicas(model, mesh["replicate"]) what replicas '
    "do",
    "DataParallel": "it is one process with several devices, between which nothing is exchanged "
    "that could be compressed: start a process per device (torchrun) and use "
    "DistributedDataParallel",
    "DeepSpeedEngine": "it exchanges gradients by itself: use DistributedDataParallel",
    "OptimizedModule": _WRAP,
}


# what each DDP model calls with its buckets, once a hook was attached; torch registers one for good
_places: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def layers_of(parameters: Mapping[str, nn.Parameter]) -> list[Layer]:
    """Make a layer of each parameter, with its name and its whole shape."""
    return [Layer(name, tuple(p.shape)) for name, p in parameters.items()]


@dataclass
class BucketViews:
    """Holds the gradients in a bucket of DDP.

    Attributes:
        address: of the bucket's memory.
        parameters: in their order in the bucket; another order may come at the same address.
        gradients: by layer, ``[1, *shape]``.
    """

    address: int
    parameters: Sequence[Tensor]
    gradients: dict[int, Tensor]

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether these are the bucket's parameters, in their order."""
        return len(parameters) == len(self.parameters) and all(
            map(operator.is_, parameters, self.parameters)
        )


class DDPGradients:
    """Takes the gradients of a DDP model, one for each whole layer; a ``GradientSource``.

    Attributes:
        nodes: the ranks of each, where a node is a worker; None: each process is.
    """

    mesh: None = None
    nodes: Sequence[Sequence[int]] | None = None
    follows = False  # nor does DDP

    def __init__(self, model: nn.Module, nodes: GivenNodes = None) -> None:
        """
        Args:
            nodes: as `regimes.attach` is given them.

        Raises:
            ConfigError: the hook cannot serve the model, or it has a communication hook already.
        """
        self.given = nodes
        # Weak: DDP keeps the hook in C++, where the garbage collector sees no cycle. A strong
        # reference would keep the model, and its process group, for ever.
        self.model, self._model = proxy(ddp := _ddp_model(model)), ref(ddp)
        self.parameters = _ddp_parameters(ddp)
        self.ignored: Collection[str] = frozenset(ddp.parameters_to_ignore)
        # DDP's tensor parallelism has other parameters in the module within a pass
        self.replicated = all(tensor_parallel_part(p) is None for p in self.parameters.values())
        self.layers = layers_of(self.parameters)
        self.local: list[Tensor] = list(self.parameters.values())
        self.index = {parameter: i for i, parameter in enumerate(self.parameters.values())}
        self.device = next(iter(self.index)).device
        self.bucket_bytes = ddp.bucket_bytes_cap
        self.pending: list[tuple[Future[Tensor], Tensor]] = []  # and their buffers
        self.views: dict[int, BucketViews] = {}
        self.lock = threading.Lock()
        self.config: dict[str, Any] = {}

    @property
    def network(self) -> nn.Module:
        return self.model.module

    def make_world(self, timeout: float) -> ProcessWorld:
        group = self.model.process_group
        if self.nodes is not None:
            return on_nodes(group, self.nodes, self.device, timeout)
        tensor = _tensor_parallel([*self.parameters.values()])
        return on_group(group, self.device, timeout, tensor=tensor)

    def choose_nodes(self, chosen: Choice, modes: Collection[Mode], timeout: float) -> None:
        """Decide whether a node is a worker, see `ddp.nodes.choose_nodes`."""
        ranks = Group.of_torch(self.model.process_group).ranks
        divided = _tensor_parallel([*self.parameters.values()]) is not None
        dtype = next(iter(self.parameters.values())).dtype
        self.nodes = choose_nodes(self.given, ranks, chosen, modes, divided, timeout, dtype)
        self.config = {} if self.nodes is None else {"nodes": len(self.nodes)}

    def shared_facts(self) -> dict[str, Any]:
        return {"ddp": {name: getattr(self.model, name) for name in _SAME}, **self.config}

    def make_state(self, hook: Any, branch: bool, saved: Any) -> ProcessStates:
        return ProcessStates(hook, branch, saved)

    def connect_receiver(self, receiver: HookSteps) -> None:
        """Register the hook with DDP, or put it into the place that an earlier hook has left. DDP
        keeps this place as long as the model lives; ``close`` empties it."""
        self.receiver = receiver
        self.leave_parameters = _before_accumulation([*self.parameters.values()], receiver)
        ddp = self._model()
        self.place: Any = _places.get(ddp)
        if self.place is None:
            self.place = _places[ddp] = _place_for_hook()
            self.model.register_comm_hook(self._model, self.place)
        else:
            comm_hooks(self.model).append((self.place, self._model))
        self.place.receive = self._receive_bucket

    def _receive_bucket(self, bucket: Any) -> Future[Tensor]:
        """Take one bucket (``torch.distributed.GradBucket``); its buffer is overwritten with the
        aggregated gradient, which the future announces."""
        if bucket.index() == 0:
            self._begin_pass()
        future: Future[Tensor] = Future(
            devices=[self.device] if self.device.type == "cuda" else None
        )
        self.pending.append((future, buffer := bucket.buffer()))
        self.receiver.add_gradients(self._gradients_in(bucket, buffer))
        return future

    def _gradients_in(self, bucket: Any, buffer: Tensor) -> dict[int, Tensor]:
        """The gradients in a bucket. The views are made once, until DDP makes other buckets."""
        parameters, kept = bucket.parameters(), self.views.get(bucket.index())
        if kept is not None and kept.address == buffer.data_ptr() and kept.is_of(parameters):
            return kept.gradients
        if kept is not None:
            self.views.clear()  # or views would keep the memory of buckets that are gone
        gradients = {
            self.index[p]: _in_memory_order(g, p)[None]
            for g, p in zip(bucket.gradients(), parameters, strict=True)
        }
        self.views[bucket.index()] = BucketViews(buffer.data_ptr(), parameters, gradients)
        return gradients

    def _begin_pass(self) -> None:
        uneven = allows_uneven_inputs(self.model)
        try:
            # Queued at the first bucket, so before DDP queues its own callback at the last: the
            # results are complete when DDP copies them to the parameters.
            after_backward(self._finish_pass)
        except RuntimeError:  # not within backward: join() replays collectives outside of it
            uneven = True
        if uneven:
            raise ConfigError(
                "the hook works inside backward() only: uneven inputs (model.join()) are not "
                "supported, let every process take the same number of steps"
            )
        self.receiver.begin_step()
        self.pending.clear()  # of a backward pass that has failed

    def _finish_pass(self) -> None:
        """The end of backward, just before DDP copies the results to the parameters."""
        self.receiver.finish_step()
        after_backward(self.receiver.settle_step)  # queued after DDP's callback

    def release_gradients(self) -> None:
        """Resolve all futures. Any thread may call it: after an error the thread of backward,
        too."""
        # Two threads may come at once after an error; a future takes one result only.
        with self.lock:
            while self.pending:
                future, buffer = self.pending.pop()
                future.set_result(buffer)

    def mark_unused(self, layers: Sequence[int]) -> Tensor | None:
        return None

    def note_unused(self, shares: Mapping[int, float]) -> None:
        pass

    def unwritten_layers(self) -> set[int]:
        """Return the layers that no process has used: DDP does not write their ``.grad``, unless it
        is a view of the bucket."""
        model = self.model
        if not (model.find_unused_parameters or model.static_graph):
            return set()
        used = used_parameters(model).tolist()
        inside = model.gradient_as_bucket_view
        return {
            i for p, i in self.index.items() if not used[i] and not (inside and p.grad is not None)
        }

    def close(self) -> None:
        self.views.clear()
        self.leave_parameters()
        self.place.receive = None
        if (model := self._model()) is not None:
            hooks = comm_hooks(model)
            hooks[:] = [x for x in hooks if x[0] is not self.place]

    def detach(self) -> None:
        """Do nothing more: DDP keeps the empty place, which no list shows."""


def _place_for_hook() -> Any:
    """What DDP calls with each bucket. DDP takes it once and never gives it back; its ``receive``
    is the hook that has the place now; None: gradients are averaged as DDP does by itself. (It is
    a function, so that a copy of the model does not copy what it leads to.)"""

    def place(model: Any, bucket: Any) -> Any:
        if taken.receive is not None:
            return taken.receive(bucket)
        group, buffer = Group.of_torch(model().process_group), bucket.buffer()
        # multiplied and first, as by DDP: other ways have other bits, or overflow in float16
        buffer.mul_(1.0 / len(group))
        return group.all_reduce(buffer).get_future().then(lambda done: done.value()[0])

    taken: Any = place
    taken.receive, taken.__annotations__ = None, {}  # torch wants its own classes there, or none
    return taken


def _tensor_parallel(parameters: Sequence[Any]) -> tuple[Any, list[float]] | None:
    """The group among which layers are divided and each layer's share, see ``TensorParallel``;
    None without tensor parallelism. DDP trains the local tensors of DTensors, and notes in each
    which part it is."""
    parts = [tensor_parallel_part(p) for p in parameters]
    meshes = [part.mesh for part in parts if part is not None]
    if not meshes or meshes[0].ndim > 1 or any(mesh != meshes[0] for mesh in meshes):
        return None
    copies = 1 / meshes[0].size()
    shares = [
        copies if part is None or part.placements[0].is_replicate() else 1.0 for part in parts
    ]
    return meshes[0].get_group(), shares


def _before_accumulation(
    parameters: Sequence[nn.Parameter], receiver: HookSteps
) -> Callable[[], Any]:
    """Call ``on_backward_start`` in each backward pass, before the first gradient is added to
    ``.grad``: a tensor's own hooks come before that, in any order of the layers. Returns what ends
    it."""
    # weak, or the parameters' hooks would keep the receiver, and its process group, for ever
    approach = WeakMethod(receiver.on_backward_start)

    def call(_: Tensor) -> None:
        if (alive := approach()) is not None:
            alive()

    return finalize(
        receiver, remove_hooks, [parameter.register_hook(call) for parameter in parameters]
    )


def after_backward(callback: Callable[[], None]) -> None:
    """Queue a callback of the autograd engine for the end of backward. Callbacks run in the order
    in which they were queued; DDP queues its own when the last bucket is full."""
    queue_callback(callback)


def _in_memory_order(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A parameter's part of the bucket, ``[*shape]``. It is stored in the parameter's own memory
    order if that has no gaps; ``bucket.gradients()`` gives it as if it were contiguous."""
    if parameter.is_contiguous():
        return flat
    extent = sum(s * (n - 1) for s, n in zip(parameter.stride(), parameter.shape, strict=True)) + 1
    if extent != parameter.numel():
        return flat
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _ddp_model(model: nn.Module) -> DistributedDataParallel:
    """The model itself, a DDP model without a communication hook.

    Raises:
        ConfigError: the hook cannot serve it.
    """
    if not isinstance(model, DistributedDataParallel):
        kinds, got = {kind.__name__ for kind in type(model).__mro__}, type(model).__name__
        if (inner := uncompiled(model)) is not model:
            got = f"a compiled {type(inner).__name__}"
        elif "FSDPModule" in kinds:
            got = "a model of fully_shard (FSDP2)"
        if isinstance(inner, DistributedDataParallel):
            kinds = {"compiled DDP"}
        advice = next((words for kind, words in _NOT_DDP.items() if kind in kinds), _WRAP)
        raise ConfigError(f"attach needs a DistributedDataParallel model, got {got}: {advice}")
    if reduces_in_python(model):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which reduces gradients one '
            "by one and not in buckets: set it to True before wrapping the model"
        )
    hooks = comm_hooks(model)
    # A deep copy of a hooked model lists the original's hook, but its new reducer has none.
    hooks[:] = [(hook, of) for hook, of in hooks if not isinstance(of, ref) or of() is model]
    if any(getattr(hook, "receive", hook) is not None for hook, _ in hooks):
        raise ConfigError(
            "this model has a communication hook already: DDP takes one, attach it once, right "
            "after wrapping the model, or call close() of the first one before"
        )
    return model


def check_parameters(parameters: Mapping[str, nn.Parameter], half: bool = True) -> None:
    """Raise ConfigError unless compressors can handle all these parameters.

    Args:
        half: bfloat16 and float16 are supported.
    """
    kinds = (torch.float32, torch.float64, *(HALF.values() if half else ()))
    listed = "float32, float64, bfloat16 or float16" if half else "float32 or float64"
    if len({p.device for p in parameters.values()}) > 1:
        raise ConfigError("the model's parameters are on several devices: the hook needs one")
    for name, parameter in parameters.items():
        if parameter.dtype not in kinds:
            raise ConfigError(
                f"parameter {name!r} is of type {parameter.dtype}: expected {listed} parameters"
            )


def _ddp_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, by their names in the bare model, compiled or not. A tensor
    that several modules share appears once.

    Raises:
        ConfigError: there is none, or compressors cannot handle one.
    """
    parameters = {
        name: p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    }
    if not parameters:
        raise ConfigError("the model has no parameter to train: DDP has nothing to reduce")
    check_parameters(parameters)
    for name, module in model.module.named_modules():
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if trained and getattr(module, "sparse", False) is True:
            raise ConfigError(f"module {name!r} makes sparse gradients: build it with sparse=False")
    parallel = (nn.DataParallel, DistributedDataParallel)
    wrappers = {path for path, m in model.module.named_modules() if isinstance(m, parallel)}
    plain = plain_names(parameters, wrappers)
    return {plain[name]: parameter for name, parameter in parameters.items()}


def plain_names(names: Iterable[str], wrappers: Collection[str] = ()) -> dict[str, str]:
    """Return each name without the parts that wrappers add: the part of torch.compile, and "module"
    right below a path in ``wrappers``. Names stay as they are if two would become one."""
    plain = {}
    for name in names:
        parts = name.split(".")
        plain[name] = ".".join(
            part
            for i, part in enumerate(parts)
            if part != COMPILED and not (part == "module" and ".".join(parts[:i]) in wrappers)
        )
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in plain}
