"use strict";
// The charts of the overview: queue depth and tokens per second over the last hour.

const UPDATE_MS = 5000;
const LINES = 7;
const NAMES = { generation_tokens: "generated", prompt_tokens: "read", cached_tokens: "of these from the prefix cache" };

const figures = [...document.querySelectorAll("[data-chart]")];
const drawn = new Map();

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lineColor = (index) => style(`--line-${(index % LINES) + 1}`);
const short = (value) =>
  value == null ? "–" : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : Math.round(value).toLocaleString("en-US");

function options(figure, lines) {
  const plot = figure.querySelector(".plot");
  const axis = {
    stroke: style("--soft"),
    grid: { stroke: style("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width: plot.clientWidth,
    height: plot.clientHeight,
    legend: { show: false },
    cursor: { show: false },
    tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
    axes: [
      { ...axis, size: 24, space: 70, values: "{HH}:{mm}" },
      { ...axis, size: 52, space: 32, values: (_, splits) => splits.map((each) => (each < 1 && each > 0 ? "" : short(each))) },
    ],
    series: [{}, ...lines.map((_, index) => ({ stroke: lineColor(index), width: 1.5, points: { show: false }, spanGaps: true }))],
  };
}

function showLegend(figure, lines) {
  const items = lines.map((line, index) => {
    const item = document.createElement("li");
    const mark = document.createElement("i");
    const name = document.createElement("span");
    const value = document.createElement("b");
    mark.style.background = lineColor(index);
    name.textContent = name.title = NAMES[line.name] ?? line.name;
    value.textContent = short(line.values.findLast((each) => each != null));
    item.append(mark, name, value);
    return item;
  });
  figure.querySelector(".legend").replaceChildren(...items);
}

function draw(figure, times, lines) {
  const plot = figure.querySelector(".plot");
  const names = lines.map((line) => line.name).join("\n");
  const data = [times, ...lines.map((line) => line.values)];
  const known = drawn.get(figure);
  if (known?.names === names) {
    known.chart.setData(data);
  } else {
    known?.chart.destroy();
    drawn.set(figure, { names, chart: new uPlot(options(figure, lines), data, plot) });
  }
  showLegend(figure, lines);
}

async function update() {
  if (document.hidden) return;
  try {
    const answer = await fetch("/series.json", { signal: AbortSignal.timeout(10000) });
    if (!answer.ok) return;
    const { times, ...charts } = await answer.json();
    for (const figure of figures) draw(figure, times, charts[figure.dataset.chart]);
  } catch {
    // The page says by itself that the server does not answer.
  }
}

function redraw() {
  for (const { chart } of drawn.values()) chart.destroy();
  drawn.clear();
  update();
}

if (figures.length) {
  update();
  setInterval(update, UPDATE_MS);
  document.addEventListener("visibilitychange", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const resized = new ResizeObserver(() => {
    for (const [figure, { chart }] of drawn) {
      const plot = figure.querySelector(".plot");
      if (plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height: plot.clientHeight });
    }
  });
  for (const figure of figures) resized.observe(figure);
}
