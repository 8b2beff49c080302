"""Faults of `fp.Amp` that the sequences leave out: take a line out when what it names is mended."""

from __future__ import annotations

MIXED_REASON = "a gradient too large for SGD is said to have no square if another optimizer squares"
ALL_DROPPED_REASON = "a step whose forwards all failed and were dropped is said to overflow at its scale"
UNDONE_FOR_OTHERS = "skip() of one window forgets the statistics to go back to of another that is open"
LOAD_CLEARS_WINDOWS = "load_state_dict of a window clears gradients of those that share an optimizer"
NO_STATISTICS = "load_state_dict of a state without statistics raises a KeyError"
REFUSED_STATISTICS = "load_state_dict that refuses statistics has dropped those to go back to"
UNDONE_BY_REFUSED = "a refused step with a function undoes the statistics of a micro-batch that is open"
SAVED_IN_MICRO_BATCH = "a state that is saved in a micro-batch lacks the statistics from before it"
SAVED_UNSCALED = "the step of an unscaled window that was loaded into a fresh Amp does not move the scale"

KNOWN_FAULTS = frozenset(
    {
        MIXED_REASON,
        ALL_DROPPED_REASON,
        UNDONE_FOR_OTHERS,
        LOAD_CLEARS_WINDOWS,
        NO_STATISTICS,
        REFUSED_STATISTICS,
        UNDONE_BY_REFUSED,
        SAVED_IN_MICRO_BATCH,
        SAVED_UNSCALED,
    }
)
