"""From a configuration to the parts of a run: all is checked and built before any work starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from regimes.base import capabilities, reduction
from regimes.base.capabilities import Mode
from regimes.base.config import DENSE, AnyLevel, RunConfig, to_dict
from regimes.base.precision import full_precision, is_half
from regimes.collectives.connect import connect_world
from regimes.collectives.devices import pick_device
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange, buckets_with_loss
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import check_order
from regimes.data import Task, load_task
from regimes.data.models import check_real
from regimes.data.objects import ObjectTask
from regimes.instruments import make_instruments
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import PER_WORKER
from regimes.instruments.panel import choose_instruments
from regimes.job.job import Job
from regimes.job.move_residuals import Residuals, residuals_for
from regimes.job.state import Part, State, by_layer, get_column, of_workers
from regimes.policies.controller import ModelController
from regimes.records import OWN, Header, provenance
from regimes.training.batch_sizes import check_batch_of_one, check_parts, check_samples
from regimes.training.gradients import (
    Gradients,
    carries_state,
    draws_random_numbers,
    layer_table,
    new_stack,
)
from regimes.training.graphs import Graphs
from regimes.training.learning_rate import LearningRate
from regimes.training.local_rounds import Rounds
from regimes.training.optimizers import build_optimizers
from regimes.training.phases import Phase
from regimes.training.plug_ins import PlugIns
from regimes.training.replicas import Replicas
from regimes.training.torch_flags import Numerics
from regimes.training.union import TRIED, one_pass_serves
from regimes.training.units import Units


class Run(Job):
    """Holds all parts of a run, and what it has recorded so far.

    Attributes:
        local: the rounds of local steps; None without a sync policy.
        build_optimizer: makes the optimiser of a further worker.
        phase: where in the run this configuration holds.
        saved: time of the start, or of the last checkpoint.
    """

    def __init__(
        self,
        plug_ins: PlugIns,
        world: World,
        device: torch.device,
        numerics: Numerics,
        task: Task | None = None,
    ) -> None:
        """Build what depends on data and model; all processes check that they agree on it."""
        config, sizes = plug_ins.config, plug_ins.batch_sizes
        self.config, self.plug_ins = config, plug_ins
        self.phase = Phase(config, config)
        self.device, self.numerics = device, numerics
        dtype = getattr(torch, config.dtype)
        world.meter.dtype = full_precision(torch.empty(0, dtype=dtype)).dtype
        plug_ins.check(plug_ins.modes(device, world.processes))
        self.task = task or load_task(config)
        if not self.task.splits:
            plug_ins.check([capabilities.TEXT])
        check_samples(sizes, config.workers, self.task.size)
        world.check_agreement(
            **to_dict(config),
            data_digest=self.task.digest,
            code=provenance.code_digest(),
            own_code=provenance.own_code(to_dict(config)),
            torch=torch.__version__,
        )
        model = self.task.build(config)
        check_real(model)
        self.model = model.to(device, dtype)
        super().__init__(world, layer_table(self.model))
        chosen, signal = plug_ins.compressor, config.signal
        check_order(chosen, config.levels, self.layers, config.workers)
        self.batches = self.task.batches(config, device, dtype)
        if config.graphs is not None:  # they alone ask what a model does
            plug_ins.check(self._model_modes())
        check_parts(sizes, self.task.loss, self.model, self.batches)
        check_batch_of_one(sizes, self.model, self.batches)
        self.gradients = self._make_gradients()
        parameters = self.gradients.parameters
        clips = config.optimizer.clip is not None
        buckets = buckets_with_loss(parameters, config.bucket_mb, single=clips)
        self.reducer = Reducer(chosen, self.layers, world, config.seed)
        overlaps = world.processes > 1 and buckets is not None
        self.exchange = Exchange(self.reducer, buckets, background=device if overlaps else None)
        if overlaps:  # a bucket leaves while the last backward pass of a step goes on
            self.gradients.on_layer_complete(self.exchange.add_rows)
        batch, sync = plug_ins.batch_policy, plug_ins.sync_policy
        self.controller = self.make_controller(plug_ins.policy, signal, (chosen, config.levels))
        self.batch_controller = None if batch is None else ModelController(batch, signal, "batch")
        self.sync_controller = None if sync is None else ModelController(sync, signal, "sync")
        self.batch_size, self.batch_sizes = config.batch_size, config.batch_levels
        self.periods = config.sync_levels
        self.units = Units.from_config(config, len(self.batches))
        plug_ins.check_units(len(self.units))
        self.learning_rate = LearningRate(config.optimizer, self.units.per_epoch, self.units.total)
        self.controller.decide([])  # what a policy refuses, it refuses here
        fused = device.type == "cuda" and not config.deterministic
        settings = config.optimizer, self.model, self.task.classes
        self.build_optimizer = functools.partial(build_optimizers, *settings, fused=fused)
        self.optimizer = self.build_optimizer()
        self.local: Rounds | None = None
        if sync is not None:
            # pseudo-gradients have residuals apart from those of shared steps
            outer = Reducer(chosen, self.layers, world, config.seed)
            # They are measured in the gradients' own tensors, unless a fragment's must outlive the
            # next gradient.
            storage = self.gradients.stack, self.gradients.layers
            if config.outer.leaves_apart:
                storage = new_stack(parameters, len(storage[0]))
            self.local = Rounds(parameters, outer, config.outer, storage, inner=self.optimizer)
        self.context = self._make_context()
        self.panel = choose_instruments(
            config.instruments, plug_ins.policy_needs, signal, self.context
        )
        self.graphs: Graphs | None = None
        if config.graphs is not None:
            self.gradients.seeded = False
            self.graphs = Graphs(self.gradients, self.reducer, config.graphs)
        self.header = cast("Header", {})
        self.saved = time.monotonic()

    def _make_gradients(self) -> Gradients:
        config = self.config
        gradients = Gradients(
            self.model,
            self.task.loss,
            self.world,
            union=self._decide_union(),
            seed=config.seed,
            micro_batch=config.batch_size,
            clip=config.optimizer.clip,
            autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
            compiled=config.compile,
        )
        if config.compile:
            gradients.check_compiles(*next(iter(self.batches.epoch(0, self.world.hosted))))
        return gradients

    def _decide_union(self) -> bool:
        """May one pass serve all hosted workers? The configuration alone decides, so that the
        numbers do not depend on how many processes share the workers."""
        config = self.config
        per_worker = config.signal in PER_WORKER or config.optimizer.clip is not None
        per_worker |= config.sync_policy is not None
        # Half precision would round the workers' mean once, and not each worker's gradient.
        per_worker |= is_half(getattr(torch, config.dtype))
        own = config.data.name == OWN
        per_worker |= own and (config.workers == 1 or self._asks_for_workers())
        if not config.union_pass or not self.plug_ins.compressor.linear or per_worker:
            return False
        # In one pass all terms of all workers count alike.
        joins = reduction.declared_reduction(self.task.loss)
        if joins is not None and not isinstance(joins, reduction.SampleMean):
            return False
        if own:
            return self._serves_own()
        x, _ = next(iter(self.batches.epoch(0, [0])))
        return not draws_random_numbers(self.model, x[0])

    def _asks_for_workers(self) -> bool:
        """Does an instrument or a policy read each worker's gradient, or may do so unsaid?"""
        tools = make_instruments(self.config.instruments).values()
        needs = [part.needs for part in self.plug_ins.parts()]
        unsaid = any(not hasattr(tool, "requires") for tool in tools)
        return unsaid or any(capabilities.WORKER_GRADIENTS in own for own in needs)

    def _serves_own(self) -> bool:
        """Is one pass over all workers exact, and cheaper, with a model and a loss of a program's
        own? All processes try the same samples, and agree."""
        config, dtype, task = self.config, self.batches.dtype, cast("ObjectTask", self.task)
        some = range(min(TRIED, config.workers))
        x, y = next(iter(self.batches.epoch(0, some)))
        samples = config.workers * config.batch_size
        found = task.is_sample_mean(self.model) and one_pass_serves(
            self.model, task.loss, x, y, samples, dtype
        )
        return all(self.world.gather_object(found))

    def _model_modes(self) -> list[Mode]:
        """What the model does to the steps, found by trying it on a worker's first batch."""
        x, y = (t[0] for t in next(iter(self.batches.epoch(0, [0]))))
        found = {
            capabilities.RANDOM_MODEL: draws_random_numbers(self.model, x),
            capabilities.STATEFUL_MODEL: carries_state(self.model, self.task.loss, x, y),
        }
        return [mode for mode, applies in found.items() if applies]

    def _make_context(self) -> MeasurementContext:
        """What instruments see of the run: probes of the training set, and an epoch's batches."""
        task, config, world, local = self.task, self.config, self.world, self.local
        batches, optimizer = self.batches, self.optimizer
        decays = optimizer.decoupled_decay(self.gradients.parameters)
        return MeasurementContext(
            self.model,
            loss=task.loss,
            world=world,
            layers=self.layers,
            seed=config.seed,
            union=self.gradients.union,
            probe=lambda size, batch: task.probe(batches, world, size, batch),
            samples=lambda epoch, count, batch: task.samples(
                batches, config.seed, epoch, count, batch
            ),
            compressor=self.plug_ins.compressor,
            levels=config.levels,
            optimizer=lambda: (optimizer.lr, decays),
            is_local=(lambda: local.is_local) if local else None,
            residuals=self._residuals,
        )

    def _residuals(self) -> list[Tensor | None]:
        """What the exchange in use owes: movements and gradients have other units, so that the
        other one's cannot be added."""
        local = self.local
        return (local.reducer if local and local.is_local else self.reducer).residuals()

    def separate_workers(self) -> Replicas:
        """Give every hosted worker a model and an optimiser of its own."""
        assert self.local is not None
        others = (self.build_optimizer() for _ in range(self.world.hosted_count - 1))
        buffers = list(self.model.buffers())
        replicas = Replicas(self.gradients.parameters, buffers, [self.optimizer, *others])
        self.local.replicas = self.gradients.replicas = replicas
        return replicas

    def level_value(self, level: str) -> AnyLevel:
        """Return the level that a name stands for: ``levels`` of the configuration."""
        return DENSE if level == DENSE else self.config.levels[level]

    def rate_scale(self, multiple: int) -> int:
        """Return the factor of the learning rate where the batch is so many times as large."""
        return multiple if self.config.optimizer.scale_with_batch else 1

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return this process's state. ``checkpoint`` reads the states of all processes."""
        memories, residuals = self.reducer.state_dict()
        own = {"layers": by_layer(residual=residuals), "hidden": self.gradients.hidden_states()}
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gauges": self.panel.state_dict(),
            "union": self.gradients.union,  # one residual row for all workers of a process
        }
        if (local := self.local) is not None:
            shared["outer"], own["outer"] = local.state_dict()
            own["replicas"] = local.replicas.state_dict() if local.replicas else []
        return self.lay_out_state({"memory": memories}, shared, own)

    def load_state_dict(self, state: State) -> None:
        """Restore the state of all processes, of which there may have been others."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.panel.load_state_dict(state["gauges"])
        parts, hosted = state["parts"], self.world.hosted
        self.reducer.load_state_dict(
            get_column(state["layers"], "memory"), self._own_residuals(parts)
        )
        self.reducer.to(self.device)
        if self.local is not None:
            outer = [{**part["outer"], "workers": part["workers"]} for part in parts]
            movements = of_workers(outer, "movements", hosted)
            self.local.load_state_dict(state["outer"], self._own_residuals(outer), movements)
            if replicas := of_workers(parts, "replicas", hosted):
                self.separate_workers().load_state_dict(replicas)
        if hidden := of_workers(parts, "hidden", hosted):
            states = [tuple(tensor.to(self.device) for tensor in worker) for worker in hidden]
            self.gradients.load_hidden_states(states)

    def _own_residuals(self, parts: Sequence[Part]) -> Residuals:
        """Each layer's residual rows of this process's workers, or their mean in a union pass."""
        count, names = self.config.workers, [layer.name for layer in self.layers]
        mean = self.gradients.union
        return residuals_for(self.world.hosted, count, parts, count, names, mean=mean)

    def close(self) -> None:
        """Leave the other processes, and give torch's flags back."""
        # their threads before the group: they may be inside a collective
        self.exchange.close()
        if self.local is not None:
            self.local.close()
        self.world.close()
        self.numerics.close()


def prepare_run(config: RunConfig, task: Task | None = None) -> Run:
    """Check the whole configuration and build the parts.

    Args:
        task: in place of the one that the configuration names.

    Raises:
        ConfigError, DataError: one sentence.
    """
    plug_ins = PlugIns.from_config(config)
    device = pick_device(config.device)
    world = connect_world(config.workers, device, config.timeout)
    numerics = Numerics(
        device,
        dtype=config.dtype,
        precision=config.precision,
        evaluate_precision=config.evaluate_precision,
        deterministic=config.deterministic,
        channels_last=config.channels_last,
    )
    try:
        return Run(plug_ins, world, device, numerics, task)
    except BaseException:
        world.abort()  # or closing would wait for processes that have not failed
        world.close()
        numerics.close()
        raise
