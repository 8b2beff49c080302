"""A machine as a record, and the advice that follows from its numbers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Units = Literal["matrix", "vector", "none", "unknown"]
"""What computes a format's products: matrix units, vector instructions, nothing of its own, or not known."""

GAIN_WORTH_HAVING = 1.25
LOSS_WORTH_NAMING = 0.9


@dataclass(frozen=True)
class FormatFacts:
    """One number format on one device.

    Attributes:
        name: short name, as in `floatplan.formats`.
        units: what computes its products.
        matmul_rate: measured FLOP/s of a square matrix product; ``None`` if not measured.
        convolution_rate: the same of a 3x3 convolution, forward and backward.
    """

    name: str
    units: Units = "unknown"
    matmul_rate: float | None = None
    convolution_rate: float | None = None


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: as in ``torch.device``.
        model: what its maker calls it.
        features: what decides its speed: instruction sets, or the compute capability.
        memory: bytes in all; ``None`` if not known.
        copy_rate: measured bytes/s read plus written in a large copy; ``None`` if not measured.
        formats: the formats that it was asked about; fp32 among them.
    """

    name: str
    model: str
    features: tuple[str, ...] = ()
    memory: int | None = None
    copy_rate: float | None = None
    formats: tuple[FormatFacts, ...] = ()

    @property
    def kind(self) -> str:
        """ "CPU" or "GPU"."""
        return "CPU" if self.name == "cpu" else "GPU"

    def gains(self, format_name: str) -> dict[str, float]:
        """Measured rates of a format over float32's: "matrix products" and "convolutions", where known."""
        facts = {facts.name: facts for facts in self.formats}
        low, base = facts.get(format_name), facts.get("fp32")
        if low is None or base is None:
            return {}
        pairs = {
            "matrix products": (low.matmul_rate, base.matmul_rate),
            "convolutions": (low.convolution_rate, base.convolution_rate),
        }
        return {what: rate / of for what, (rate, of) in pairs.items() if rate is not None and of}


@dataclass(frozen=True)
class Machine:
    """The machine and the software that training runs on.

    Attributes:
        system: operating system and architecture.
        versions: "floatplan", "torch", "python" and, where there is one, "cuda".
        threads: that torch uses within an operator.
        compiler: path of the C++ compiler that ``torch.compile`` would use; ``None`` if there is none.
        devices: the CPU, then each CUDA device.
        load: processes that ran or waited in the last minute, over the number of cores; ``None`` if not
            known. Well above 0 before a measurement, it makes the rates too low.
    """

    system: str
    versions: dict[str, str]
    threads: int
    compiler: str | None
    devices: tuple[Device, ...]
    load: float | None = None


def recommendation(machine: Machine) -> str:
    """What to train in here, in one sentence; about the first GPU where there is one, else the CPU."""
    gpus = [device for device in machine.devices if device.kind == "GPU"]
    return device_recommendation((gpus or list(machine.devices))[0])


def device_recommendation(device: Device) -> str:
    """What to train in on ``device``: bf16 if it gains, else fp16 if that gains, else float32."""
    where = f"this {device.kind}"
    advice = {
        "bf16": "its range is float32's, so that gradients need no scaling",
        "fp16": "with GradScaler, because its range is narrow",
    }
    for name, why in advice.items():
        gains = device.gains(name)
        if not gains or max(gains.values()) < GAIN_WORTH_HAVING:
            continue
        losing = [what for what, gain in gains.items() if gain < LOSS_WORTH_NAMING]
        if losing:
            winning = " and ".join(what for what in gains if what not in losing)
            return (
                f"Train in {name} where {winning} dominate and in float32 where {' and '.join(losing)} do: "
                f"on {where} {_rates(name, gains)} ({why})."
            )
        return f"Train in {name}: on {where} {_rates(name, gains)}; {why}."
    measured = [_rates(name, gains) for name in advice if (gains := device.gains(name))]
    if not measured:
        return f"Stay in float32: nothing faster was measured on {where}."
    return f"Stay in float32: {where} {_lacking(device)}; {'; '.join(measured)}."


def _rates(name: str, gains: dict[str, float]) -> str:
    (first, gain), *others = gains.items()
    rest = "".join(f" and {what} at {other:.2g}" for what, other in others)
    return f"{name} {first} run at {gain:.2g}{rest} times float32's rate"


def _lacking(device: Device) -> str:
    none = [
        facts.name for facts in device.formats if facts.units == "none" and facts.name in ("bf16", "fp16")
    ]
    if none:
        return f"has no instructions for {' or '.join(none)} products"
    return "gains nothing from a lower precision"
