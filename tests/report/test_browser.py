"""The pages in a real browser: drawn, sorted, asking for nothing, and readable on any screen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser
from made_up_run import DRIFT, RUN
from pages import plots
from recorded import recorded

from floatplan.report.html import render
from floatplan.report.several import render_trainings
from floatplan.report.training import render_training

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
PAGES = ("training", "comparison", "several")

# Text that is shown: its size, and its colour beside the nearest background, which in a bar is the bar.
TEXTS = """
(() => {
  const channels = text => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return { rgb: found.slice(0, 3), alpha: found.length > 3 ? found[3] : 1 };
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = element => {
    const bar = element.closest(".bartext-inside")?.parentElement.querySelector("path");
    if (bar) return channels(getComputedStyle(bar).fill).rgb;
    for (let at = element; at; at = at.parentElement) {
      const { rgb, alpha } = channels(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (["SCRIPT", "OPTION", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg");
    const { rgb, alpha } = channels(drawn ? style.fill : style.color);
    if (!alpha || style.opacity === "0") continue;
    found.push({ text: walk.currentNode.textContent.trim().slice(0, 40), size: parseFloat(style.fontSize),
                 contrast: contrast(rgb, behind(element)), raised: element.tagName === "tspan" });
  }
  return found;
})()
"""

# Parts that stick out of the window and cannot be scrolled to within a part of their own.
TOO_WIDE = """
[...document.querySelectorAll("main *")].filter(element =>
  !element.closest(".scroll, pre, svg") && element.checkVisibility()
  && element.getBoundingClientRect().right > innerWidth + 1
).map(element => element.outerHTML.slice(0, 80))
"""


# Lines of plots that leave a part of the page's width empty.
UNFILLED = """
(() => {
  const ends = {};
  document.querySelectorAll(".figures .card").forEach(card => {
    const { top, right } = card.getBoundingClientRect();
    ends[top] = Math.max(ends[top] ?? 0, right);
  });
  const edge = document.querySelector(".figures").getBoundingClientRect().right;
  return Object.values(ends).filter(end => end < edge - 2);
})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """One browser for all tests of this file; each opens its page anew."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages as files."""
    folder = tmp_path_factory.mktemp("pages")
    long = replace(recorded().run.header, model="AVeryLongNameOfAModel" * 4)
    made = {
        "training": render_training(replace(recorded().run, header=long, problems=("a" * 200,))),
        "comparison": render(replace(RUN, drifts=(DRIFT,))),
        "several": render_trainings({"low": recorded().run, "full" * 12: recorded("fp32").run}),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("name", PAGES)
def test_every_plot_is_drawn_with_all_its_traces(page: Page, files: dict[str, Path], name: str) -> None:
    page.open(files[name])
    expected = {
        one: len(figure["traces"]) for one, figure in plots(files[name].read_text(encoding="utf-8")).items()
    }
    assert expected
    script = (
        "Object.fromEntries([...document.querySelectorAll('.plot')].map("
        "plot => [plot.id, [plot.data.length, plot.querySelectorAll('svg').length]]))"
    )
    found = page.run(script)
    assert {one: traces for one, (traces, _) in found.items()} == expected
    assert all(pictures > 0 for _, pictures in found.values())
    points = page.run(
        "Object.fromEntries([...document.querySelectorAll('.plot')].map(plot => [plot.id,"
        "plot.querySelectorAll('.scatterlayer .trace, .barlayer .trace, .heatmaplayer .hm').length]))"
    )
    assert points == expected
    assert page.errors == []


@pytest.mark.parametrize("name", PAGES)
def test_no_request_leaves_the_page(page: Page, files: dict[str, Path], name: str) -> None:
    page.requests.clear()
    page.open(files[name])
    page.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert files[name].resolve().as_uri() in page.requests
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in page.requests if url.startswith("file:")]) == 1


@pytest.mark.parametrize("name", PAGES)
def test_it_is_readable_wide_and_narrow_in_light_and_dark(
    page: Page, files: dict[str, Path], name: str
) -> None:
    page.open(files[name])
    page.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    for width, dark in itertools.product((1280, 400), (False, True)):
        page.emulate(width, dark)
        page.settle()
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(TOO_WIDE) == []
        assert page.run(UNFILLED) == []
        texts = page.run(TEXTS)
        assert len(texts) > 50
        assert [one for one in texts if one["contrast"] < 4.5] == []
        assert [one for one in texts if one["size"] < (8 if one["raised"] else 12)] == []
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark


def test_a_table_is_sorted_by_a_click_on_each_heading(page: Page, files: dict[str, Path]) -> None:
    page.open(files["training"])
    heads = page.run(
        "[...document.querySelectorAll('#risks th[scope=col]')].map(head => [head.hidden, head.className])"
    )
    assert len(heads) > 20
    for place, (hidden, kind) in enumerate(heads):
        if hidden:
            continue
        for again in range(2):
            page.run(f"document.querySelectorAll('#risks th[scope=col] button')[{place}].click()")
            rises = (kind == "words") != bool(again)
            sorting = page.run(
                "[...document.querySelectorAll('#risks th[aria-sort]')].map(h => [h.cellIndex, h.ariaSort])"
            )
            assert sorting == [[place, "ascending" if rises else "descending"]]
            cells = page.run(
                "[...document.querySelector('#risks').tBodies[0].rows].map(row => "
                f"[row.cells[{place}].dataset.value ?? null, row.cells[{place}].textContent])"
            )
            known = [text.lower() if value is None else float(value) for value, text in cells if value != ""]
            assert known == sorted(known, reverse=not rises), "in order"
            missing = [value == "" for value, _ in cells]
            assert missing == sorted(missing), "what is not known stands last"


def test_a_table_is_sorted_with_the_keyboard(page: Page, files: dict[str, Path]) -> None:
    page.open(files["training"])
    page.run("document.querySelector('#casts th:last-child button').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r"[: kind == "keyDown"]
        )
    order = page.run("[...document.querySelectorAll('#casts tbody tr')].map(r => r.cells[0].textContent)")
    assert page.run("document.querySelector('#casts th:last-child').ariaSort") == "descending"
    assert order[-1] == "all", "the total stays last"
    page.run("document.querySelector('#casts th:last-child button').click()")
    again = page.run("[...document.querySelectorAll('#casts tbody tr')].map(r => r.cells[0].textContent)")
    assert again[-1] == "all"
    assert again[0] == "head", "the smallest layer"


def test_menus_show_a_kind_and_the_limits_of_a_format(page: Page, files: dict[str, Path]) -> None:
    page.open(files["training"])
    shown = (
        "[[...document.querySelectorAll('#risks tbody tr')].filter(row => row.checkVisibility()).map("
        "row => row.cells[1].textContent), [...document.querySelectorAll('#risks th[data-format]')].filter("
        "head => head.checkVisibility()).map(head => head.dataset.format)]"
    )
    kinds, formats = page.run(shown)
    assert set(formats) == {"fp16"}
    assert len(set(kinds)) == 5
    _pick(page, "risks-by-kind", "activation")
    _pick(page, "risks-by-format", "fp8_e4m3")
    kinds, formats = page.run(shown)
    assert set(kinds) == {"activations"}
    assert set(formats) == {"fp8_e4m3"}
    assert len(formats) == 5


def test_the_heat_map_shows_what_is_picked(page: Page, files: dict[str, Path]) -> None:
    page.open(files["training"])
    frames = plots(files["training"].read_text(encoding="utf-8"))["heat"]["frames"]
    data = "[document.getElementById('heat').data[0].z, document.getElementById('heat').data[0].y]"
    assert page.run(data) == [frames["0|0"]["traces"][0][axis] for axis in "zy"]
    _pick(page, "heat-0", "3")
    _pick(page, "heat-1", "2")
    assert page.run(data) == [frames["3|2"]["traces"][0][axis] for axis in "zy"]
    assert page.run("document.querySelector('output[for=heat-1]').textContent") == "step 5"


def test_plots_follow_a_change_of_the_colour_scheme(page: Page, files: dict[str, Path]) -> None:
    page.open(files["training"])
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    used = "document.getElementById('loss').layout.font.color"
    light = page.run(used)
    _pick(page, "heat-0", "1")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    assert page.run(used) == page.run(ink) != light
    frames = plots(files["training"].read_text(encoding="utf-8"))["heat"]["frames"]
    assert page.run("document.getElementById('heat').data[0].y") == frames["1|0"]["traces"][0]["y"]


def _pick(page: Page, control: str, value: str) -> None:
    page.run(
        f"(() => {{ const control = document.getElementById({control!r}); control.value = {value!r};"
        "control.dispatchEvent(new Event('input')); })()"
    )
