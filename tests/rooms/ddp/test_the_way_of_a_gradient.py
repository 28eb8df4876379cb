"""From a backward pass to the collective, "go to definition" leads on at each call: asked of jedi,
which JupyterLab and many editors ask. Some names have several definitions: how a bucket is
exchanged (a hook's steps write over gradients), how a module's gradients are reduced, what a
compressor does, and the world (one process, or several)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jedi  # type: ignore[import-untyped]
import pytest

import regimes

HOME = Path(regimes.__file__).parent
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


def hops() -> Iterator[str]:
    caller = ""
    for line in "".join((DDP, SIMULATED, FSDP2, BUCKET)).splitlines():
        if line.startswith(" "):
            yield f"{caller} {line.strip()}"
        elif line:
            caller = line


def function_at(path: Path, name: str) -> ast.AST:
    """The definition with this qualified name."""
    node: ast.AST = ast.parse(path.read_text("utf-8"))
    for part in name.split("."):
        node = next(x for x in ast.iter_child_nodes(node) if getattr(x, "name", None) == part)
    return node


@pytest.mark.parametrize("hop", [*hops()])
def test_go_to_definition_leads_on(hop: str) -> None:
    file, caller, call, target, callee = hop.split()
    path = HOME / file
    names = [x for x in ast.walk(function_at(path, caller)) if isinstance(x, ast.expr)]
    here = next(x for x in names if ast.unparse(x) == call.removesuffix(":"))
    assert here.end_lineno is not None
    assert here.end_col_offset is not None
    script = jedi.Script(path=path, project=jedi.Project(HOME.parent))
    found = script.goto(here.end_lineno, here.end_col_offset - 1, follow_imports=True)
    module = target.removesuffix(".py").replace("/", ".")
    assert (HOME / target, f"regimes.{module}.{callee}") in [
        (x.module_path, x.full_name) for x in found
    ]
    assert {x.name for x in found} == {callee.rpartition(".")[2]}
