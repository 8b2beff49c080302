"""Advice on machines made up by hand."""

from __future__ import annotations

import pytest

from floatplan.tune import Device, FormatFacts, Machine, recommendation


def device(name: str, *formats: FormatFacts) -> Device:
    return Device(name, "made up", formats=(FormatFacts("fp32", "vector", 100.0, 100.0), *formats))


def machine(*devices: Device) -> Machine:
    return Machine("Linux", {}, 2, None, devices)


SLOW_CPU = device("cpu", FormatFacts("bf16", "none", 27.0, 30.0), FormatFacts("fp16", "none", 1.0, 1.5))
AMX_CPU = device("cpu", FormatFacts("bf16", "matrix", 960.0, 240.0), FormatFacts("fp16", "none", 130.0, 1.5))
MIXED_CPU = device("cpu", FormatFacts("bf16", "vector", 200.0, 50.0))
OLD_GPU = device(
    "cuda:0", FormatFacts("bf16", "none", 50.0, 50.0), FormatFacts("fp16", "matrix", 700.0, 400.0)
)
NEW_GPU = device(
    "cuda:0", FormatFacts("bf16", "matrix", 900.0, 800.0), FormatFacts("fp16", "matrix", 950.0, 810.0)
)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (
            (SLOW_CPU,),
            "Stay in float32: this CPU has no instructions for bf16 or fp16 products; bf16 matrix "
            "products run at 0.27 and convolutions at 0.3 times float32's rate; fp16 matrix products run at "
            "0.01 and convolutions at 0.015 times float32's rate.",
        ),
        (
            (AMX_CPU,),
            "Train in bf16: on this CPU bf16 matrix products run at 9.6 and convolutions at 2.4 times "
            "float32's rate; its range is float32's, so that gradients need no scaling.",
        ),
        (
            (MIXED_CPU,),
            "Train in bf16 where matrix products dominate and in float32 where convolutions do: on this CPU "
            "bf16 matrix products run at 2 and convolutions at 0.5 times float32's rate (its range is "
            "float32's, so that gradients need no scaling).",
        ),
        (
            (SLOW_CPU, OLD_GPU),
            "Train in fp16: on this GPU fp16 matrix products run at 7 and convolutions at 4 times "
            "float32's rate; with GradScaler, because its range is narrow.",
        ),
        (
            (SLOW_CPU, NEW_GPU),
            "Train in bf16: on this GPU bf16 matrix products run at 9 and convolutions at 8 times "
            "float32's rate; its range is float32's, so that gradients need no scaling.",
        ),
        ((device("cpu"),), "Stay in float32: nothing faster was measured on this CPU."),
        (
            (device("cpu", FormatFacts("bf16", "unknown", 110.0, 100.0)),),
            "Stay in float32: this CPU gains nothing from a lower precision; bf16 matrix products run at 1.1 "
            "and convolutions at 1 times float32's rate.",
        ),
    ],
)
def test_the_advice_follows_from_the_numbers(devices: tuple[Device, ...], sentence: str) -> None:
    assert recommendation(machine(*devices)) == sentence
