"""What an `Amp` does where its arguments do not say."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from floatplan.errors import StepError
from floatplan.policy import Policy
from floatplan.records import StepResult
from floatplan.scaling import GradScaler

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
        ema: an averaged model; its ``update_parameters`` is called with the first model after each step of
            parameters of that model that was taken.
        policy: of the region.
        float32_outputs: whether the models return float32 in place of 16-bit tensors, as long as the Amp
            lives; inside of them nothing changes.
        channels_last: give weights of 2-d and 3-d convolutions the layout channels_last, in place, for
            faster kernels; values, shapes and names stay, in every ``state_dict`` too.
        device_type: where the models run; by default that of their parameters.
        diagnose: whether an Amp looks again at what was refused, and says why in ``StepResult.diagnosis``,
            the log and the recording: at what it keeps of the last forward, or, given a function that returns
            the loss, not scaled, at the whole step. The function calls no backward and needs no region.
        diagnose_after: skips in a row after which it looks; at a loss that is not finite, it looks at once.
        costs: folder in which "auto" keeps what operators cost; by default the user's folder for caches.

    Raises:
        StepError: a value that no training can run with; says which.
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
    float32_outputs: bool = False
    channels_last: bool = False
    device_type: str | None = None
    diagnose: bool | Callable[[], Tensor] = True
    diagnose_after: int = 5
    costs: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        self._check(self.on_bad_micro_batch in ("skip", "drop"), "on_bad_micro_batch", "'skip' or 'drop'")
        self._check(
            self.on_skips in ("raise", "warn") or callable(self.on_skips),
            "on_skips",
            "'raise', 'warn' or a function of a StepResult",
        )
        limit = self.max_consecutive_skips
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
        self._check(limit is None or is_count, "max_consecutive_skips", "a count of at least 1, or None")
        self._check(
            self.ema is None or callable(getattr(self.ema, "update_parameters", None)),
            "ema",
            "an averaged model with update_parameters, as torch.optim.swa_utils.AveragedModel",
        )
        self._check(isinstance(self.policy, Policy), "policy", "a fp.Policy")
        self._check(
            self.costs is None or isinstance(self.costs, str | os.PathLike), "costs", "the path of a folder"
        )
        self._check(
            isinstance(self.diagnose, bool) or callable(self.diagnose),
            "diagnose",
            "True, False or a function that returns the loss",
        )
        after: object = self.diagnose_after
        fits = isinstance(after, int) and not isinstance(after, bool) and after > 0
        self._check(fits, "diagnose_after", "a count of at least 1")
        self._check(isinstance(self.channels_last, bool), "channels_last", "True or False")
        buffers: object = self.buffers
        self._check(
            isinstance(buffers, tuple | list) and all(isinstance(name, str) for name in buffers),
            "buffers",
            "a tuple of names or globs",
        )
        try:
            self.scaler("cpu")
        except (ValueError, TypeError, AssertionError) as error:
            raise StepError(f"Settings: {error}") from error

    def _check(self, fits: bool, name: str, wanted: str) -> None:
        if not fits:
            raise StepError(f"Settings: {name} must be {wanted}, got {getattr(self, name)!r}")

    def scaler(self, device_type: str) -> GradScaler:
        """A new scaler as these settings want it."""
        return GradScaler(
            device_type,
            self.init_scale,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            hysteresis=self.hysteresis,
            regrowth_interval=self.regrowth_interval,
            max_consecutive_skips=None,
            check_losses=False,
        )

    def says_nothing_of_scale(self) -> bool:
        """Whether everything about the loss scale is as by default."""
        names = (
            "init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale",
            "hysteresis", "regrowth_interval",
        )  # fmt: skip
        return all(getattr(self, name) == getattr(Settings, name) for name in names)
