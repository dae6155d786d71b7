"use strict";
// The charts of a page. The values of the moment under the pointer stand in the tables below them.

const LINES = 7;
const RANGES = { "15m": 900, "1h": 3600, "24h": 86400, "7d": 604800 };
const NAMES = { cached: "from cache", oldest: "age" };
// Seconds between two lines of an axis of durations.
const STEPS = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000, 2592000];
const MARKS = { came: "--ok", left: "--soft", died: "--bad" };
const MAX_TOLD_MARKS = 4;

const root = document.getElementById("charts");
const drawn = new Map();
let told = null;
let range = "1h";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lineColor = (index) => `--line-${(index % LINES) + 1}`;

function number(value) {
  if (value === 0 || value >= 10) return Math.round(value).toLocaleString("en-US");
  return value < 1 ? value.toFixed(2) : value.toFixed(1);
}

function duration(seconds) {
  if (seconds < 10) return `${number(seconds)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  const [unit, size] = units.find((each) => seconds >= each[1] * 2) ?? ["s", 1];
  return `${Math.round(seconds / size).toLocaleString("en-US")} ${unit}`;
}

const text = (value, unit) => (value == null ? "–" : unit === "s" ? duration(value) : number(value));

function axisTexts(splits, unit) {
  const isWhole = unit !== "s" && splits.every(Number.isInteger);
  return splits.map((each) => {
    if (each === 0) return "0";
    if (!isWhole) return text(each, unit);
    if (each < 1e5) return each.toLocaleString("en-US");
    return each < 1e6 ? `${each / 1e3} k` : `${each / 1e6} M`;
  });
}

function clock(at, zone) {
  const withDay = RANGES[range] > 86400 || new Date(at * 1e3).toDateString() !== new Date().toDateString();
  const seconds = told.width_s < 60 ? { second: "2-digit" } : {};
  const day = withDay ? { day: "numeric", month: "short" } : {};
  const form = { ...day, hour: "2-digit", minute: "2-digit", ...seconds, hourCycle: "h23", timeZone: zone };
  return new Intl.DateTimeFormat("en-GB", form).format(new Date(at * 1e3));
}

// A value without a neighbour makes no line. It is drawn as a point, so that it can be seen.
function lonePoints(plot, index, show, gaps) {
  const values = plot.data[index];
  const lone = [];
  values.forEach((value, place) => {
    if (value != null && values[place - 1] == null && values[place + 1] == null) lone.push(place);
  });
  return lone;
}

function drawMarks(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of told.marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = style(MARKS[mark.what]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.arc(x, bbox.top + 3 * devicePixelRatio, 3 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
}

function options(figure, lines) {
  const place = figure.querySelector(".plot");
  const { unit } = figure.dataset;
  const axis = {
    stroke: style("--soft"),
    grid: { stroke: style("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const series = lines.map((line, index) => ({
    stroke: style(lineColor(index)),
    width: 1.5,
    points: { show: true, size: 4, filter: lonePoints },
    spanGaps: false,
  }));
  return {
    width: place.clientWidth,
    height: place.clientHeight,
    padding: [6, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "charts" }, points: { size: 6 } },
    tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
    scales: { y: { range: (_, low, high) => [0, Math.max((high ?? 0) * 1.1, unit === "jobs" ? 4 : 0) || 1] } },
    axes: [
      { ...axis, size: 24, space: 64, values: RANGES[range] > 86400 ? "{MMM} {D}" : "{HH}:{mm}" },
      { ...axis, ...(unit === "s" ? { incrs: STEPS } : {}), size: 56, space: 32, values: (_, splits) => axisTexts(splits, unit) },
    ],
    series: [{}, ...series],
    hooks: { draw: [drawMarks], setCursor: [(plot) => showMoment(plot.cursor.idx ?? null)] },
  };
}

function cell(name, content, title) {
  const made = document.createElement(name);
  made.textContent = content;
  if (title) made.title = title;
  return made;
}

function row(line, index, unit) {
  const made = document.createElement("tr");
  const name = NAMES[line.name] ?? line.name;
  const head = cell("th", "", name);
  const mark = document.createElement("i");
  mark.style.background = `var(${lineColor(index)})`;
  head.scope = "row";
  head.append(mark, cell("span", name));
  const known = line.values.filter((value) => value != null);
  const ends = known.length ? [Math.min(...known), Math.max(...known)] : [null, null];
  made.append(head, ...[null, ...ends].map((value) => cell("td", text(value, unit))));
  for (const each of made.querySelectorAll("td")) each.className = "n";
  return made;
}

// Show the values of one moment in all tables; without one, the latest.
function showMoment(at) {
  for (const figure of root.querySelectorAll("[data-chart]")) {
    const lines = told.charts[figure.dataset.chart];
    figure.querySelector("[data-head]").textContent = at == null ? "Now" : "Then";
    [...figure.querySelectorAll("tbody tr")].forEach((each, index) => {
      const { values } = lines[index];
      const latest = told.is_now ? values.slice(-3) : [];
      const value = at == null ? latest.findLast((known) => known != null) : values[at];
      each.children[1].textContent = text(value, figure.dataset.unit);
    });
  }
  root.querySelector(".moment").textContent = at == null ? "" : momentText(told.times[at]);
}

function momentText(at) {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const utc = clock(at, "UTC");
  const here = clock(at, zone);
  const near = told.marks.filter((mark) => Math.abs(mark.at - at) <= Math.max(told.width_s, RANGES[range] / 90));
  const time = here === utc ? `${utc} UTC` : `${utc} UTC, ${here} here`;
  return [time, ...near.slice(0, 3).map((mark) => `${mark.worker} ${mark.what}`)].join(" · ");
}

function showMarks() {
  const latest = told.marks.slice(-MAX_TOLD_MARKS).reverse();
  const items = latest.map((mark) => {
    const item = document.createElement("span");
    const dot = document.createElement("i");
    dot.style.background = `var(${MARKS[mark.what]})`;
    item.append(dot, `${mark.worker} ${mark.what} ${clock(mark.at, "UTC")}`);
    return item;
  });
  const more = told.marks.length - latest.length;
  if (more > 0) items.push(cell("span", `and ${more} more`));
  root.querySelector(".marks").replaceChildren(...items);
}

function draw(figure, lines) {
  const names = [range, ...lines.map((line) => line.name)].join("\n");
  const data = [told.times, ...lines.map((line) => line.values)];
  const known = drawn.get(figure);
  if (known?.names === names) {
    known.chart.setData(data);
  } else {
    known?.chart.destroy();
    const place = figure.querySelector(".plot");
    drawn.set(figure, { names, chart: new uPlot(options(figure, lines), data, place) });
  }
  const rows = lines.map((line, index) => row(line, index, figure.dataset.unit));
  figure.querySelector("tbody").replaceChildren(...rows);
}

function drawAll() {
  const lines = Object.values(told.charts).flat();
  const isEmpty = lines.every((line) => line.values.every((value) => value == null));
  root.querySelector(".figures").hidden = isEmpty;
  root.querySelector(".nothing").hidden = !isEmpty;
  if (isEmpty) return root.querySelector(".marks").replaceChildren();
  for (const figure of root.querySelectorAll("[data-chart]")) draw(figure, told.charts[figure.dataset.chart]);
  const { idx } = drawn.values().next().value.chart.cursor;
  showMoment(idx ?? null);
  showMarks();
}

async function update() {
  if (document.hidden) return;
  const asked = range;
  const query = new URLSearchParams({ of: root.dataset.of, name: root.dataset.name, range });
  try {
    const answer = await fetch(`/series.json?${query}`, { signal: AbortSignal.timeout(10000) });
    const answered = await answer.json();
    if (asked !== range) return;
    if (!answer.ok) return showProblem(answered.problem);
    told = answered;
    root.hidden = false;
    drawAll();
    if (told.problem) showProblem(told.problem);
  } catch {
    // The page itself reports that the server does not answer.
  }
}

// Charts that were drawn stay. If none was drawn, their places are hidden.
function showProblem(problem) {
  root.hidden = false;
  root.querySelector(".figures").hidden = told === null;
  root.querySelector(".marks").textContent = `The charts do not go on: ${problem}`;
}

function choose(wanted) {
  range = wanted in RANGES ? wanted : "1h";
  for (const button of root.querySelectorAll("[data-range]")) {
    button.setAttribute("aria-pressed", String(button.dataset.range === range));
  }
}

// Arrow keys move the chosen moment in all charts, as the pointer does. Escape ends the choice.
const KEYS = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 };

function move(event) {
  const charts = [...drawn.values()].map((each) => each.chart);
  const step = KEYS[event.key];
  const isTaken = event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog, .scroll");
  if (step === undefined || isTaken || !charts.length) return;
  event.preventDefault();
  const last = told.times.length - 1;
  const now = charts[0].cursor.idx;
  const next = Math.max(0, Math.min(last, now == null ? last : now + step));
  for (const chart of charts) {
    const place = step === 0 ? -10 : chart.valToPos(told.times[next], "x");
    chart.setCursor({ left: place, top: step === 0 ? -10 : 0 });
  }
}

function redraw() {
  for (const { chart } of drawn.values()) chart.destroy();
  drawn.clear();
  if (told) drawAll();
}

if (root) {
  choose(new URL(location.href).searchParams.get("range"));
  update();
  let waited = 0;
  setInterval(() => {
    // Wider rows are written less often, so they are read less often.
    waited += 10;
    if (waited < Math.min(told?.width_s ?? 10, 60)) return;
    waited = 0;
    update();
  }, 10000);
  root.addEventListener("click", (event) => {
    const button = event.target.closest("[data-range]");
    if (!button) return;
    choose(button.dataset.range);
    const here = new URL(location.href);
    here.searchParams.set("range", range);
    history.replaceState(null, "", here);
    update();
  });
  document.addEventListener("visibilitychange", update);
  document.addEventListener("keydown", move);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const resized = new ResizeObserver(() => {
    for (const [figure, { chart }] of drawn) {
      const place = figure.querySelector(".plot");
      if (place.clientWidth !== chart.width) chart.setSize({ width: place.clientWidth, height: place.clientHeight });
    }
  });
  for (const figure of root.querySelectorAll("[data-chart]")) resized.observe(figure);
}
