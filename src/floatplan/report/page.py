"""Style and script of ``report.html``."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2128; --soft: #57606a; --line: #d4d9df; --paper: #fff; --card: #f6f8fa; --focus: #0969da;
  --good: #166a2e; --note: #8a5300; --bad: #c01c28;
  --good-card: #e6f4ea; --note-card: #fdf1dc; --bad-card: #fdeaea;
  --heat-0: #eaf1f8; --heat-1: #cfe0f0; --heat-2: #a6c8e4; --heat-3: #71a8d5;
  --heat-4: #3f82bd; --heat-5: #1f5c96; --heat-6: #0b355f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --soft: #9aa5b1; --line: #363d47; --paper: #0f1318; --card: #171c23; --focus: #6cb6ff;
    --good: #57c878; --note: #e3ae54; --bad: #ff8b83;
    --good-card: #12281a; --note-card: #2d2411; --bad-card: #331a1b;
    --heat-0: #1b2733; --heat-1: #1f364d; --heat-2: #234b71; --heat-3: #2c689d;
    --heat-4: #4189c7; --heat-5: #74afe4; --heat-6: #cfe6fb;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
main > h2 { font-size: 1.2rem; margin: 2rem 0 .4rem; }
p { margin: .4rem 0; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
.conclusion { font-size: 1.15rem; font-weight: 600; margin: 1rem 0; overflow-wrap: anywhere; }
.conclusion.good, .conclusion.note, .conclusion.bad {
  padding: .8rem 1rem; border-left: 5px solid; border-radius: 4px 8px 8px 4px;
}
.conclusion.good { background: var(--good-card); border-color: var(--good); }
.conclusion.note { background: var(--note-card); border-color: var(--note); }
.conclusion.bad { background: var(--bad-card); border-color: var(--bad); }
.small, figcaption, dl { color: var(--soft); font-size: .85rem; }
.said { list-style: none; padding: 0; margin: 1rem 0; display: grid; gap: .55rem; }
.said li { display: grid; grid-template-columns: 6.2rem 1fr; gap: .8rem; align-items: baseline; }
.said li > span:last-child { overflow-wrap: anywhere; }
.tag { font-size: .78rem; font-weight: 600; padding: .1rem .5rem; border-radius: 99px; text-align: center; }
.good > .tag, .tag.good { color: var(--good); background: var(--good-card); }
.note > .tag, .tag.note { color: var(--note); background: var(--note-card); }
.tag.plain { color: var(--soft); background: none; border: 1px solid var(--line); }
.bad > .tag, .tag.bad { color: var(--bad); background: var(--bad-card); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; }
.tiles { margin: 1rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
.tile b { display: block; font-size: 1.15rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
pre {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem;
  margin: .4rem 0; overflow-x: auto; font: .85rem/1.45 ui-monospace, monospace;
}
.scroll { overflow: auto; max-height: 36rem; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { background: var(--card); font-weight: 600; position: sticky; top: 0; z-index: 1; }
thead th:first-child { z-index: 2; }
tbody th { font-weight: 500; max-width: 18rem; min-width: min(12rem, 28vw); }
tbody th { white-space: normal; overflow-wrap: anywhere; }
th.words, td.words { text-align: left; }
td.why { text-align: left; white-space: normal; min-width: 20rem; }
tbody tr { border-top: 1px solid var(--line); }
.grid td { white-space: normal; text-align: left; min-width: 8.5rem; vertical-align: top; }
.grid td .small { display: block; }
.grid thead th { text-align: left; }
tbody tr.total { font-weight: 600; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \\25b2"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " \\25bc"; font-size: .7em; }
ul { padding-left: 1.2rem; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
.card { flex: 1 1 calc(33% - 1rem); min-width: 0; margin: 0; padding: .9rem; }
.card { background: var(--card); border-radius: 8px; }
.card.wide { flex-basis: calc(50% - 1rem); }
.card.full { flex-basis: 100%; }
.plot { height: 300px; }
.controls { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; align-items: center; margin: .4rem 0; }
.controls span { display: inline-flex; flex-wrap: wrap; gap: .2rem .5rem; align-items: center; }
.controls label, .controls output { font-size: .9rem; }
.controls output { color: var(--soft); }
.controls select {
  font: inherit; font-size: .9rem; color: var(--ink); background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .15rem .4rem; max-width: 100%;
}
.controls input { accent-color: var(--focus); width: 12rem; max-width: 100%; }
.heat { display: flex; flex-wrap: wrap; gap: .2rem .9rem; margin: .3rem 0; }
.heat { font-size: .85rem; color: var(--soft); }
.heat i {
  display: inline-block; width: 1.4em; height: .9em; border-radius: 2px; margin-right: .35em;
  vertical-align: -.05em;
}
@media (max-width: 800px) { .card, .card.wide { flex-basis: 100%; } }
@media (max-width: 600px) {
  .said li { grid-template-columns: 1fr; gap: .15rem; }
  .tag { justify-self: start; }
  th, td { padding: .4rem .5rem; }
  tbody th { max-width: 9rem; }
}
details { margin: .4rem 0 1rem; }
summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""

# Plotly draws into a canvas of its own colours; the page hands it those of its style, again on each change.
SCRIPT = """
(() => {
  const drawn = JSON.parse(document.getElementById("figures").textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = given => ({ automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"),
                           linecolor: colour("--line"), ...given });
  const layout = given => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 10, r: 10, t: 20, b: 10 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--line"),
                  font: { color: colour("--ink") } },
    ...given, xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
    ...(given.yaxis2 ? { yaxis2: axis(given.yaxis2) } : {}),
  });
  const config = { responsive: true, displayModeBar: false };
  // Percent from 1e-4 to 100, a colour for each power of ten.
  const heat = () => [0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1].map(
    (share, place) => [share, colour("--heat-" + Math.max(0, place - 1))]);
  const themed = trace => trace.type === "heatmap" ? { ...trace, colorscale: heat() } : trace;
  const picks = figure => Array.from({ length: figure.choices }, (_, place) =>
    document.getElementById(figure.name + "-" + place));
  const draw = figure => {
    const frame = figure.frames[picks(figure).map(pick => pick.value).join("|")]
      || { traces: [], layout: {} };
    const traces = figure.traces.map((trace, place) => themed({ ...trace, ...frame.traces[place] }));
    Plotly.react(figure.name, traces, layout({ ...figure.layout, ...frame.layout }), config);
  };
  const drawAll = () => drawn.forEach(draw);
  drawAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawn.forEach(figure => picks(figure).forEach(pick => pick.addEventListener("input", () => {
    if (pick.dataset.words) {
      pick.nextElementSibling.value = JSON.parse(pick.dataset.words)[pick.value];
    }
    draw(figure);
  })));
})();
(() => {
  const value = cell => cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  const before = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b));
  document.querySelectorAll("table.sortable th button").forEach(button => {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = head.closest("table").tBodies[0];
      const place = Array.from(head.parentNode.children).indexOf(head);
      const falls = head.getAttribute("aria-sort") === "descending"
        || (!head.hasAttribute("aria-sort") && head.classList.contains("words"));
      head.parentNode.querySelectorAll("[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falls ? "ascending" : "descending");
      const rows = Array.from(body.rows).filter(row => !row.classList.contains("total"));
      const total = Array.from(body.rows).filter(row => row.classList.contains("total"));
      const known = rows.filter(row => row.cells[place].dataset.value !== "");
      const missing = rows.filter(row => row.cells[place].dataset.value === "");
      known.sort((a, b) => (falls ? 1 : -1) * before(value(a.cells[place]), value(b.cells[place])));
      body.append(...known, ...missing, ...total);
    });
  });
  const show = picker => {
    const table = document.getElementById(picker.dataset.table);
    table.querySelectorAll("[data-" + picker.dataset.filter + "]").forEach(part => {
      part.hidden = picker.value !== "" && part.dataset[picker.dataset.filter] !== picker.value;
    });
  };
  document.querySelectorAll("select[data-table]").forEach(picker => {
    picker.addEventListener("input", () => show(picker));
    show(picker);
  });
})();
"""
