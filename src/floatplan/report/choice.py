"""A choice of precision as a part of a page. Needs no plotly."""

from __future__ import annotations

from html import escape

from floatplan.records import Choice, ModuleChoice


def choice_part(choice: Choice) -> str:
    """A part of a page in the style of `report.page`: what its operators take, below the sentences."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in _columns(choice))
    lines = []
    for module in choice.modules:
        name, *cells = _cells(module)
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in choice.sentences())
    return (
        f'{said}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody>'
        '</table></div><p class="small">Of each module\'s own operators, not of modules inside of it: '
        "milliseconds per micro-batch, forward and backward, casts included, each operator timed alone.</p>"
    )


def _columns(choice: Choice) -> tuple[str, ...]:
    return "module", "fp32", choice.low, f"{choice.low} / fp32", "chosen"


def _cells(module: ModuleChoice) -> tuple[str, ...]:
    ratio = f"{module.low / module.full:.2f}" if module.full else "-"
    name = module.module or "(the model)"
    return name, f"{1e3 * module.full:.3f}", f"{1e3 * module.low:.3f}", ratio, module.precision
