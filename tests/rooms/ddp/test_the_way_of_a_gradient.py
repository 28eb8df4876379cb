"""From a backward pass to the collective, "go to definition" leads on at each call: asked of jedi,
which JupyterLab and many editors ask. Some names have several definitions: how a bucket is
exchanged (a hook's steps write over gradients), how a module's gradients are reduced, what a
compressor does, and the world (one process, or several)."""

from __future__ import annotations

import definitions
import pytest

# functions; below each, what it calls on a gradient's way, and where that leads
DDP = """
hook/ddp/source.py DDPGradients._receive_bucket
    self.receiver.add_gradients: hook/ddp/steps.py HookSteps.add_gradients
hook/ddp/steps.py HookSteps.add_gradients
    self.add_rows: compression/exchange.py Exchange.add_rows
compression/exchange.py Exchange.add_rows
    self._mark_complete: compression/exchange.py Exchange._mark_complete
compression/exchange.py Exchange._mark_complete
    self._exchange_complete: compression/exchange.py Exchange._exchange_complete
compression/exchange.py Exchange._exchange_complete
    self.exchange_bucket: compression/exchange.py Exchange.exchange_bucket
hook/ddp/steps.py HookSteps.exchange_bucket
    self._reduce_and_write: hook/ddp/steps.py HookSteps._reduce_and_write
hook/ddp/steps.py HookSteps._reduce_and_write
    self._exchange_rows: hook/ddp/steps.py HookSteps._exchange_rows
hook/ddp/steps.py HookSteps._exchange_rows
    self.reducer.reduce: compression/reducer.py Reducer.reduce
"""
SIMULATED = """
training/loop.py _step_together
    take_step: training/loop.py take_step
training/loop.py take_step
    _finish_step: training/loop.py _finish_step
training/loop.py _finish_step
    exchange.add_rows: compression/exchange.py Exchange.add_rows
    exchange.finish_transfer: compression/exchange.py Exchange.finish_transfer
compression/exchange.py Exchange.finish_transfer
    self.wait_for_transfers: compression/exchange.py Exchange.wait_for_transfers
compression/exchange.py Exchange.wait_for_transfers
    self._exchange_complete: compression/exchange.py Exchange._exchange_complete
compression/exchange.py Exchange._exchange_complete
    self.exchange_bucket: compression/exchange.py Exchange.exchange_bucket
compression/exchange.py Exchange.exchange_bucket
    self.reducer.reduce: compression/reducer.py Reducer.reduce
"""
BUCKET = """
compression/reducer.py Reducer.reduce
    self._plan: compression/reducer.py Reducer._plan
    exchange_layers: compression/reducer.py exchange_layers
compression/reducer.py exchange_layers
    compressor.add_residual: compression/base.py Compressor.add_residual
compression/base.py Compressor.add_residual
    bucket.take_turn: compression/bucket.py Bucket.take_turn
compression/reducer.py exchange_layers
    compressor.exchange: compression/base.py Compressor.exchange
compression/powersgd.py PowerSGD.exchange
    left_product: compression/kernels.py left_product
    self._mean: compression/powersgd.py PowerSGD._mean
compression/powersgd.py PowerSGD._mean
    comm.mean: collectives/comm.py Comm.mean
collectives/comm.py Comm.mean
    self.world.mean_over_workers: collectives/world.py World.mean_over_workers
collectives/processes.py ProcessWorld.mean_over_workers
    self.across.all_reduce: collectives/process_group.py Group.all_reduce
    self._wait_for: collectives/processes.py ProcessWorld._wait_for
"""
FSDP2 = """
hook/fsdp/collectives.py _ReduceScatter.__call__
    self.steps.reduce_scatter: hook/fsdp/collectives.py _ModuleCollectives.reduce_scatter
hook/fsdp/collectives.py _ModuleCollectives.reduce_scatter
    self.reduce_module: hook/fsdp/collectives.py _ModuleCollectives.reduce_module
hook/fsdp/collectives.py ModuleSteps.reduce_module
    reduction.reduce_module: hook/fsdp/reductions.py WholeReduction.reduce_module
    reduction.reduce_module: hook/fsdp/reductions.py QuantisedReduction.reduce_module
hook/fsdp/reductions.py WholeReduction.reduce_module
    reducer.reduce: compression/reducer.py Reducer.reduce
compression/scatter.py QuantisedScatter.reduce
    self.sum_parts: compression/scatter.py QuantisedScatter.sum_parts
compression/scatter.py QuantisedScatter.sum_parts
    comm.all_to_all: collectives/comm.py Comm.all_to_all
"""


@pytest.mark.parametrize("hop", definitions.hops("".join((DDP, SIMULATED, FSDP2, BUCKET))))
def test_go_to_definition_leads_on(hop: str) -> None:
    definitions.check_hop(hop)
