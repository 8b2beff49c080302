"""One tree of exceptions. A message says what was wrong, what was got, and what to do.

FloatplanError
├── PolicyError (also ValueError)        a policy or an operator name that does not fit
├── PlanError (also ValueError)          a plan that cannot be read or does not fit the model
├── RegionError (also RuntimeError)      a region that cannot be entered, or cannot tell its policy
├── CheckpointError (also RuntimeError)  a checkpoint that cannot be written, read or loaded
│   └── CheckpointMissingError (also FileNotFoundError)   there is no file
├── BundleError (also RuntimeError)      a replay bundle that cannot be written, read or replayed
├── DeviceError (also RuntimeError)      a device or a format that this machine does not have
├── StepError (also RuntimeError)        calls of a training step in an order that would corrupt it
├── ScalingError (also RuntimeError)     step after step is refused, so that nothing is learned
├── TaskError (also ValueError)          a task, row or option of a command that does not exist
├── DataError (also OSError)             data that is missing or cannot be read
└── RunFolderError (also OSError)        a run folder that cannot be written or read

Protocol mistakes of ``GradScaler`` raise torch's own types (``RuntimeError``, ``AssertionError``,
``ValueError``), so that code written against ``torch.amp.GradScaler`` keeps working.

FloatplanWarning (a UserWarning)
└── PrecisionWarning                     the precision in force is not the one that was asked for
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


class FloatplanError(Exception):
    """Base of every error that floatplan raises by itself."""


class PolicyError(FloatplanError, ValueError):
    """A policy, operator class or operator name that does not fit."""


class PlanError(FloatplanError, ValueError):
    """A plan that cannot be read, or that does not fit the model it is put on."""


class RegionError(FloatplanError, RuntimeError):
    """A region that cannot be entered, or whose policy cannot be told."""


class CheckpointError(FloatplanError, RuntimeError):
    """A checkpoint that cannot be written, read, or loaded into the objects it is given."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class BundleError(FloatplanError, RuntimeError):
    """A replay bundle that cannot be written, read, or run again."""


class DeviceError(FloatplanError, RuntimeError):
    """A device, or a number format on a device, that is not available here."""


class StepError(FloatplanError, RuntimeError):
    """A training step that cannot go on, or calls in an order that would corrupt it."""


class ScalingError(FloatplanError, RuntimeError):
    """Step after step is refused: the run looks alive and learns nothing."""


class TaskError(FloatplanError, ValueError):
    """A task, row or option of a command that does not exist or does not fit."""


class DataError(FloatplanError, OSError):
    """Data that is missing or cannot be read."""


class RecordingError(FloatplanError, RuntimeError):
    """A recording that is used for what it cannot be."""


class RunFolderError(FloatplanError, OSError):
    """A run folder that cannot be written or read."""


class FloatplanWarning(UserWarning):
    """Base of every warning that floatplan gives."""


class PrecisionWarning(FloatplanWarning):
    """The precision in force differs from the one that was asked for."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A hint for an error message: ``"; did you mean 'a' or 'b'?"``, or ``""`` when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    if not matches:
        return ""
    return "; did you mean " + " or ".join(repr(match) for match in matches) + "?"


def users_line(*further: str) -> int:
    """``stacklevel`` for a warning of the caller, such that it points at the user's line.

    Args:
        further: packages, besides this one, whose lines are not the user's.
    """
    ours = (__name__.partition(".")[0], *further)
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        above = frame.f_back
        if above is None:
            break
        level, frame = level + 1, above
    return level
