"""What a report does under a pointer or the arrow keys: curves are read out where it stands.

All that is shown stands in the page, written by Python: the script finds the nearest points.
"""

SCRIPT = r"""
"use strict";
const WIDTH = 400;
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const svg = figure.querySelector(":scope > svg");
  const [where, texts] = JSON.parse(figure.querySelector("script").textContent);
  const series = [...svg.querySelectorAll("[data-points]")].map((path, i) => ({
    points: path.getAttribute("d").match(/[\d.]+,[\d.]+/g).map((p) => p.split(",").map(Number)),
    texts: texts[i],
    steps: where[i],
    classes: path.dataset.points,
    shown: figure.querySelector(`[data-value="${i}"]`),
  }));
  for (const s of series) s.last = s.shown && s.shown.textContent;
  const at = figure.querySelector(".at");
  return { figure, svg, series, at, rest: at.textContent, cursor: null };
});

function make(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return high > 0 && x - points[low][0] > points[high][0] - x ? high : low;
}

function show(chart, x) {
  if (chart.cursor) chart.cursor.remove();
  const box = chart.svg.viewBox.baseVal;
  chart.cursor = make("g", { class: "cursor" });
  chart.cursor.append(make("line", { x1: x, x2: x, y1: 8, y2: box.height - 24 }));
  let best = null;
  for (const s of chart.series) {
    const i = nearest(s.points, x), [px, py] = s.points[i];
    const there = Math.abs(px - x) < 6 || (i > 0 && x < px) || (i < s.points.length - 1 && x > px);
    if (s.shown) s.shown.textContent = there ? s.texts[i] : "-";
    if (!there) continue;
    chart.cursor.append(make("circle", { cx: px, cy: py, r: 3, class: s.classes }));
    if (best === null || Math.abs(px - x) < best[0]) best = [Math.abs(px - x), s.steps[i]];
  }
  chart.at.textContent = best ? `${chart.figure.dataset.along} ${best[1]}` : "";
  chart.svg.append(chart.cursor);
}

function rest(chart) {
  if (chart.cursor) chart.cursor.remove();
  chart.cursor = null;
  for (const s of chart.series) if (s.shown) s.shown.textContent = s.last;
  chart.at.textContent = chart.rest;
}

// Curves over the same steps are read out together.
for (const chart of charts) {
  const together = charts.filter((c) => c.figure.dataset.group === chart.figure.dataset.group);
  let at = null;
  const move = (x) => { at = x; together.forEach((c) => show(c, x)); };
  const leave = () => { at = null; together.forEach(rest); };
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    move(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * WIDTH);
  });
  chart.svg.addEventListener("pointerleave", leave);
  chart.svg.addEventListener("blur", leave);
  chart.svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const s = chart.series.reduce((a, b) => (b.points.length > a.points.length ? b : a));
    if (!way) return;
    event.preventDefault();
    const i = at === null ? s.points.length - 1 : nearest(s.points, at) + way;
    move(s.points[Math.min(Math.max(i, 0), s.points.length - 1)][0]);
  });
}

addEventListener("beforeprint", () => {
  charts.forEach(rest);
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
});
"""
