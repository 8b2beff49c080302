"""HOW a training is kept: one file, written whole or not at all, from which it goes on bit by bit."""

from floatplan.checkpoint.loader import ResumableLoader
from floatplan.checkpoint.training import load, save

__all__ = ["ResumableLoader", "load", "save"]
