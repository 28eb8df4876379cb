"""A hook's state continued under another configuration: a branch of the job that has saved it.

What becomes of the parts is as in a branch of the trainer (`regimes.training.changes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regimes.compression.bucket import restart_memories
from regimes.job.refit import list_names, refuse_state
from regimes.job.state import State, by_layer, get_column, layer_shapes, own_part, with_column

if TYPE_CHECKING:
    from regimes.ddp.unit_steps import UnitSteps
    from regimes.job.choices import Choice
    from regimes.job.job import Job


def continue_as_branch(
    state: State, here: dict[str, Any], job: Job, chosen: Choice, hook_steps: UnitSteps
) -> State:
    """A saved state as this hook continues it, which has another policy, level or compressor.

    Args:
        state: a copy, with the layers' names of now.
        here: what the hook would save of itself.

    Raises:
        ConfigError: it was saved within a unit, its layers are others, or the policy reads a
            statistic that the trunk's policy did not.
    """
    steps, rows = state["steps"][0], state["rows"]
    if steps and not job.schedule.is_over(steps):
        refuse_state(
            f"it was saved after {steps} steps of a unit; branch where a unit has just ended"
        )
    saved, own = get_column(state["layers"], "shape"), own_part(state)
    if saved != (mine := layer_shapes(job.layers)):
        odd = sorted(saved.keys() ^ mine.keys())
        refuse_state(
            f"branch and trunk must train the same layers, one has frozen {list_names(odd)}"
        )
    if (rows or steps) and (unread := sorted(job.panel.gauges.keys() - state["gauges"].keys())):
        refuse_state(f"the policy reads {', '.join(unread)}, which the trunk's policy did not read")
    same_values = here["compressor"] == state["compressor"] and chosen.values == state["values"]
    gauges = job.panel.state_dict()
    for name in gauges.keys() & state["gauges"].keys():
        if same_values or name != "error":  # that of the levels
            gauges[name] = state["gauges"][name]
    memories = get_column(state["layers"], "memory")
    residuals = get_column(own["layers"], "residual")
    kind = type(chosen.compressor).__qualname__
    if state["compressor"].partition("(")[0] != kind:
        memories = restart_memories(memories, hook_steps.reducer.state_dict()[0])
    if not chosen.keeps_residuals:
        residuals = dict.fromkeys(residuals)
    if job.schedule.optimizer is None and any(
        residuals[name] is not None and memory["residual_rate"] is not None
        for name, memory in memories.items()
    ):
        refuse_state(
            "its residuals are movements of the weights, and the learning rate makes gradients of "
            "them: attach with optimizer=optimizer"
        )
    layers = with_column(state["layers"], "memory", memories)
    parts = [{**own, "layers": by_layer(residual=residuals)}]
    branched = len(rows) + bool(steps)
    return state | {"layers": layers, "parts": parts, "gauges": gauges, "branched": branched}
