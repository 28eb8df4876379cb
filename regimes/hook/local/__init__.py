"""Local steps in a user's own training loop: see ``regimes.hook.local.steps``."""

from regimes.hook.local.starting import local_steps
from regimes.hook.local.steps import LocalSteps

__all__ = ["LocalSteps", "local_steps"]
