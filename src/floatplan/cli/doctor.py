"""``floatplan doctor``: what this machine can do."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of tables.")
    ] = False,
) -> None:
    """Say what this machine can do: devices, formats, measured rates, and what to train in."""
    from rich.console import Console

    from floatplan.cli.console import make_console, print_lines
    from floatplan.report.text import device_lines, device_table, machine_lines
    from floatplan.tune.host import tune_host
    from floatplan.tune.machine import recommendation
    from floatplan.tune.measure import describe_machine, measure

    console = make_console()
    # A status line needs a terminal; elsewhere rich prints nothing for it.
    quiet = Console(stderr=True)
    machine = describe_machine()
    devices = []
    for device in machine.devices:
        with quiet.status(f"measuring {device.name}"):
            *_, measured = measure(device)
        devices.append(measured)
    machine = replace(machine, devices=tuple(devices))
    if as_json:
        print(json.dumps({**asdict(machine), "recommendation": recommendation(machine)}, indent=2))
        return
    print_lines(console, machine_lines(machine))
    for device in machine.devices:
        console.print()
        console.print(device_table(device))
        print_lines(console, device_lines(device))
    console.print()
    print_lines(console, [recommendation(machine)])
    tuning = tune_host()
    if tuning:
        print_lines(console, [f"Call fp.tune_host() before you train on the CPU: {tuning.reason}."])
