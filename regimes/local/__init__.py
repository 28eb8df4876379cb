"""Local steps in a user's own training loop: see ``regimes.local.steps``."""

from regimes.local.starting import local_steps
from regimes.local.steps import LocalSteps

__all__ = ["LocalSteps", "local_steps"]
