"""``floatplan explain``: what runs in which precision in a task's network, and why."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatplan.cli.options import TASK_HELP
from floatplan.errors import PrecisionWarning, TaskError, nearest

if TYPE_CHECKING:
    import torch

    from floatplan.engine import Plan
    from floatplan.policy import Policy
    from floatplan.records import Explanation

DTYPES = ("bf16", "fp16", "fp32")
POLICIES = ("unified", "torch", "torch-cuda")
LINES = ("module", "operator")


def explain(
    task: Annotated[str, typer.Option(help=TASK_HELP)] = "digits",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.  [default: bf16]")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="unified, torch (torch.amp's of the device) or torch-cuda.  [default: unified]"),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan (TOML) in place of dtype and policy.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    by: Annotated[
        str | None, typer.Option(help="A line per module or per operator.  [default: per both]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of a table.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data that does not ship with a package.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch such data into its folder.")] = False,
) -> None:
    """Say what ran in which precision in one forward, why, and what the casts cost."""
    from floatplan.cli.console import make_console, print_lines
    from floatplan.report.explanation import explanation_reasons, explanation_table, write_explanation

    if by is not None:
        _check("--by", by, LINES)
    explanation = _explain_task(task, dtype, policy, plan, device, data, download)
    if html is not None:
        write_explanation(explanation, html)
    if as_json:
        print(json.dumps(explanation.as_dict(), indent=2))
        return
    console = make_console()
    console.print(explanation_table(explanation, by or "call"))
    print_lines(console, [explanation.summary, *(() if by else explanation_reasons(explanation))])
    if html is not None:
        print_lines(console, [f"page: {html}"])


def _explain_task(
    name: str,
    dtype: str | None,
    policy: str | None,
    plan: Path | None,
    device_name: str,
    folder: Path | None,
    download: bool,
) -> Explanation:
    """A fresh network of the task on the first batch of its data."""
    if plan is not None and (dtype is not None or policy is not None):
        raise TaskError("a plan says dtype and policy itself; leave out --dtype and --policy, or --plan")
    _check("--dtype", dtype or "bf16", DTYPES)
    _check("--policy", policy or "unified", POLICIES)

    from floatplan.tasks import DataSource, Ingredients, recipe_named
    from floatplan.tasks.batches import batches_on
    from floatplan.tasks.calls import explain_task
    from floatplan.tasks.comparison import check_device

    recipe, device = recipe_named(name), check_device(device_name)
    task = recipe.prepare(Ingredients(device, source=DataSource(folder, download)))()
    task.model.to(device)
    with warnings.catch_warnings():
        # What these warn of stands in the table, operator by operator.
        warnings.simplefilter("ignore", PrecisionWarning)
        if plan is not None:
            _load_plan(plan).apply(task.model, device)
        return explain_task(
            name,
            task,
            batches_on(device, task.data).samples()[0],
            device_type=device,
            dtype=_dtype(dtype or "bf16"),
            policy=_policy(policy or "unified"),
        )


def _load_plan(path: Path) -> Plan:
    from floatplan.engine import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        raise TaskError(f"cannot read the plan {path}: {error.strerror}") from error


def _dtype(name: str) -> torch.dtype:
    import torch

    from floatplan.formats import format_of

    found: torch.dtype = getattr(torch, format_of(name).torch_name)
    return found


def _policy(name: str) -> Policy | str:
    from floatplan.policy import Policy

    return Policy.torch("cuda") if name == "torch-cuda" else name


def _check(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        hint = nearest(value, known) or f"; there is: {', '.join(known)}"
        raise TaskError(f"{option} {value!r} is not known{hint}")
