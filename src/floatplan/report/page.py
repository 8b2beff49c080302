"""Style and script of ``report.html``."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2128; --soft: #59636e; --line: #d4d9df; --paper: #fff; --card: #f6f8fa;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #363d47; --paper: #0f1318; --card: #171c23; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .4rem 0; }
.conclusion { font-size: 1.15rem; font-weight: 600; margin: 1rem 0; }
.small, figcaption, dl { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { background: var(--card); font-weight: 600; }
td.words { text-align: left; }
td.why { text-align: left; white-space: normal; min-width: 20rem; }
tbody tr { border-top: 1px solid var(--line); }
ul { padding-left: 1.2rem; }
.figures { display: grid; grid-template-columns: repeat(6, 1fr); gap: 1rem; margin: 1.5rem 0; }
.card { grid-column: span 2; min-width: 0; margin: 0; padding: .9rem; }
.card { background: var(--card); border-radius: 8px; }
.card.wide { grid-column: span 3; }
.plot { height: 300px; }
@media (max-width: 800px) { .card, .card.wide { grid-column: span 6; } }
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
    ...given, xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
  });
  const config = { responsive: true, displayModeBar: false };
  const draw = () => drawn.forEach(
    figure => Plotly.react(figure.name, figure.traces, layout(figure.layout), config));
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
"""
