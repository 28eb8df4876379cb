"""Local steps in a user's own training loop: see ``regimes.local.steps``."""

from regimes.local.steps import LocalSteps, local_steps

__all__ = ["LocalSteps", "local_steps"]
