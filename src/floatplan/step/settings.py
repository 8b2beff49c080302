"""What an `Amp` does where its arguments do not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from floatplan.policy import Policy
from floatplan.records import StepResult

OnSkips = Literal["raise", "warn"] | Callable[[StepResult], None]


@dataclass(frozen=True)
class Settings:
    """What an `Amp` does where its arguments do not say.

    Attributes:
        init_scale: first loss scale of fp16.
        growth_factor: by which it grows.
        backoff_factor: by which it is multiplied after an overflow.
        growth_interval: good steps in a row before it grows.
        min_scale: backing off goes no lower; None: 2**-14.
        max_scale: growth goes no higher; None: 2**24.
        hysteresis: overflows until the scale backs off.
        regrowth_interval: good steps in a row before the scale grows while it is below one that has worked;
            None: ``growth_interval``.
        max_consecutive_skips: so many skipped steps in a row are too many; None: never.
        on_skips: what happens then: "raise" a `ScalingError`, "warn", or call this with the `StepResult`.
        on_bad_micro_batch: "skip" the whole window, or "drop" the micro-batch alone: it is checked before it
            is added, which costs one more pass over the gradients.
        buffers: names of buffers (globs such as "*.codebook") that a skipped step puts back, as it does the
            running statistics of batch and instance norms.
        ema: an averaged model; its ``update_parameters`` is called with the first model after each step that
            was taken.
        policy: of the region.
        device_type: where the models run; by default that of their parameters.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1
    regrowth_interval: int | None = None
    max_consecutive_skips: int | None = 50
    on_skips: OnSkips = "raise"
    on_bad_micro_batch: Literal["skip", "drop"] = "skip"
    buffers: tuple[str, ...] = ()
    ema: Any = None
    policy: Policy = field(default_factory=Policy.unified)
    device_type: str | None = None
