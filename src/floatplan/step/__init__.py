"""HOW gradients become weights."""

from floatplan.step.rollback import Statistics

__all__ = ["Statistics"]
