"""Faults of `fp.Amp` that the sequences leave out: take a line out when what it names is mended."""

from __future__ import annotations

ALL_DROPPED_IS_NO_SKIP = (
    "a window all of whose micro-batches were dropped counts no skip and leaves the scale"
)
DROPPED_STATISTICS = "running statistics keep the forward of a micro-batch that was dropped"
SKIPPED_STATISTICS = "running statistics keep the forward of a window that skip() threw away"
MIXED_REASON = "a gradient too large for SGD is said to have no square if another optimizer squares"
LOAD_KEEPS_WINDOWS = "load_state_dict leaves windows as they are that the state does not have"
LOAD_CLEARS_WINDOWS = "load_state_dict of a window clears gradients of those that share an optimizer"
NEW_WINDOW_CLEARS = "a call refused for another window clears the gradients of that window, if its own is new"
SAVED_IN_MICRO_BATCH = (
    "a state saved between backward or unscale and step does not tell that they were called"
)
DROPPED_FUNCTION = (
    "a step with a function takes gradients that are not finite where micro-batches are dropped"
)
FLUSH_TAKES_ANY_NORM = "flush() does not refuse a clip_norm of 0 or less, which step() refuses"
REFUSED_STATISTICS = "load_state_dict that refuses statistics has dropped those to go back to"
BROKEN_STATES = "load_state_dict of a state that is broken raises other errors, or changes a part"
FAULTY_SETTING = "a setting that is NaN counts as an overflow: the scale backs off, and the reason is another"

KNOWN_FAULTS = frozenset(
    {
        ALL_DROPPED_IS_NO_SKIP,
        DROPPED_STATISTICS,
        SKIPPED_STATISTICS,
        MIXED_REASON,
        LOAD_KEEPS_WINDOWS,
        LOAD_CLEARS_WINDOWS,
        NEW_WINDOW_CLEARS,
        SAVED_IN_MICRO_BATCH,
        DROPPED_FUNCTION,
        FLUSH_TAKES_ANY_NORM,
        REFUSED_STATISTICS,
        BROKEN_STATES,
        FAULTY_SETTING,
    }
)
