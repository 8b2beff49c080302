"""Measuring, on this machine: that it gives numbers, not which."""

from __future__ import annotations

import torch

from floatplan.tune.measure import (
    convolution_rate,
    describe_machine,
    find_compiler,
    hardware_notes,
    matmul_rate,
    units_for,
)

CPU = torch.device("cpu")


def test_the_machine_is_described_without_measuring() -> None:
    machine = describe_machine()
    cpu = machine.devices[0]
    assert (cpu.name, cpu.kind) == ("cpu", "CPU")
    assert cpu.model
    assert [facts.name for facts in cpu.formats] == ["fp32", "bf16", "fp16"]
    assert all(facts.matmul_rate is None for facts in cpu.formats)
    assert machine.threads == torch.get_num_threads()
    assert machine.versions["torch"] == torch.__version__


def test_rates_are_positive_in_every_format_and_end_in_time() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert matmul_rate(CPU, dtype, seconds=0.02) > 0
        assert convolution_rate(CPU, dtype, seconds=0.02) > 0


def test_a_row_without_hardware_says_so_and_float32_never_does() -> None:
    assert hardware_notes(CPU, "fp32") == ()
    for name in ("bf16", "fp16"):
        assert bool(hardware_notes(CPU, name)) == (units_for(CPU, name) == "none")


def test_the_compiler_is_the_one_that_the_environment_names(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "python3")
    found = find_compiler()
    assert found is None or "python3" in found or "++" in found
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert find_compiler() is None
