"""HOW a training is kept: one file, written whole or not at all, from which it goes on bit by bit.

And how one step is kept that went wrong: a bundle, from which it can be run again.
"""

from floatplan.checkpoint.bundle import Bundle, read_bundle, write_bundle
from floatplan.checkpoint.loader import ResumableLoader
from floatplan.checkpoint.training import load, save

__all__ = ["Bundle", "ResumableLoader", "load", "read_bundle", "save", "write_bundle"]
