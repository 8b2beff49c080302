"""A comparison and a machine as rich tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from floatplan.report.numbers import COLUMNS, memory, rate, table_row
from floatplan.report.runfile import Run
from floatplan.report.summary import summarise
from floatplan.tune.machine import Device, Machine


def comparison_table(run: Run, *, upright: bool = False) -> Table:
    """A line per row of the run, or ``upright`` a column per row, which fits a narrow terminal."""
    header = run.header
    seeds = (
        f"seed {header.seeds[0]}"
        if len(header.seeds) == 1
        else f"{len(header.seeds)} seeds, mean ± deviation"
    )
    epochs = f"{header.epochs} epoch{'s' if header.epochs > 1 else ''}"
    table = Table(
        title=f"{header.task} on {header.device}: {epochs}, batch {header.batch_size}, {seeds}",
        title_justify="left",
    )
    lines = [COLUMNS, *map(table_row, summarise(run))]
    first, *rest = zip(*lines, strict=True) if upright else lines
    for place, column in enumerate(first):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for line in rest:
        table.add_row(*line)
    return table


def device_table(device: Device) -> Table:
    """What a device has and reaches, a line per format."""
    table = Table(title=f"{device.name}: {device.model}", title_justify="left")
    for place, column in enumerate(("format", "units", "matrix product", "", "convolution", "")):
        table.add_column(column, justify="left" if place < 2 else "right", no_wrap=True)
    for facts in device.formats:
        gains = device.gains(facts.name)
        over = [
            f"{gains[what]:.2g} x" if what in gains else "" for what in ("matrix products", "convolutions")
        ]
        table.add_row(
            facts.name,
            facts.units,
            rate(facts.matmul_rate, "FLOP/s"),
            over[0],
            rate(facts.convolution_rate, "FLOP/s"),
            over[1],
        )
    return table


def device_lines(device: Device) -> tuple[str, ...]:
    """What the table of a device leaves out, one fact a line."""
    return (
        f"features: {', '.join(device.features) or 'not known'}",
        f"memory: {memory(device.memory) if device.memory else 'not known'}, "
        f"copied at {rate(device.copy_rate, 'B/s')} (read plus written)",
    )


def machine_lines(machine: Machine) -> tuple[str, ...]:
    """System and software, one fact a line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [
        versions,
        f"system: {machine.system}, {machine.threads} threads within an operator",
        f"C++ compiler for torch.compile: {machine.compiler or 'none found (set CXX or install g++)'}",
    ]
    if machine.load is not None and machine.load > 0.5:
        lines.append(
            f"the machine was busy just before (load {machine.load:.1f} per core): the rates may be too low",
        )
    return tuple(lines)
