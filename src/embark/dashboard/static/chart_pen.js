// What a chart draws: its axes, its lines, its marks. Called with the chart, whose scales are set.

import { count } from "./format.js";
import { token } from "./palette.js";
import { placeOf, ticks, timeLabel, timeTicks } from "./scale.js";

const MAX_FAINT = 5; // of more lines, the points behind the smoothed ones hide each other

export const PAD = { right: 12, top: 8, bottom: 22 };

export function drawAxes(chart, pen) {
  const { width, height } = chart.size;
  pen.font = `11px ${token("--font")}`;
  pen.textBaseline = "middle";
  pen.lineWidth = 1;
  pen.strokeStyle = token("--grid");
  pen.fillStyle = token("--ink-soft");
  pen.textAlign = "right";
  for (const [value, label] of chart.values) {
    const y = Math.round(chart.y(value)) + 0.5;
    if (y < PAD.top - 1 || y > height - PAD.bottom + 1) continue;
    pen.beginPath();
    pen.moveTo(chart.left, y);
    pen.lineTo(width - PAD.right, y);
    pen.stroke();
    pen.fillText(label, chart.left - 7, y);
  }
  const room = Math.max(2, Math.floor((width - chart.left) / 64));
  const places = chart.by === "time" ? timeTicks(...chart.xRange, room) : ticks(...chart.xRange, room);
  pen.textAlign = "center";
  for (const place of places) {
    const label = chart.options.xLabel ? chart.options.xLabel(place) : chart.by === "time" ? timeLabel(place) : stepLabel(place, chart.xRange[1]);
    const half = pen.measureText(label).width / 2;
    pen.fillText(
      label,
      Math.min(Math.max(chart.x(place), chart.left + half), width - PAD.right - half + 8),
      height - PAD.bottom / 2 + 1,
    );
  }
}

export function drawLines(chart, pen) {
  const { width, height } = chart.size;
  pen.save();
  pen.beginPath();
  pen.rect(chart.left, 0, width - chart.left - PAD.right + 1, height - PAD.bottom + 1);
  pen.clip();
  for (const mark of chart.marks) drawMark(chart, pen, mark, height);
  pen.lineJoin = "round";
  if (chart.options.isStacked) for (const line of [...chart.lines].reverse()) fillBelow(chart, pen, line);
  for (const line of chart.options.isStacked ? [] : strongLast(chart.lines)) {
    pen.strokeStyle = line.colour;
    if (line.isSmooth && (chart.lines.length <= MAX_FAINT || line.isStrong)) {
      pen.setLineDash([]);
      pen.globalAlpha = 0.22;
      pen.lineWidth = 1;
      trace(chart, pen, line.x, line.y);
    }
    pen.globalAlpha = line.isFaint ? 0.4 : 1;
    pen.lineWidth = line.isStrong ? 2.25 : 1.6;
    pen.setLineDash(line.dash ?? []);
    trace(chart, pen, line.xs, line.ys);
  }
  pen.globalAlpha = 1;
  pen.setLineDash([]);
  for (const line of chart.lines) dots(chart, pen, line);
  pen.restore();
}

function trace(chart, pen, xs, ys) {
  const [low, high] = chart.xRange;
  const end = Math.min(xs.length, placeOf(xs, high) + 1);
  let isDown = false;
  pen.beginPath();
  for (let at = Math.max(0, placeOf(xs, low) - 1); at < end; at += 1) {
    if (ys[at] === null || (chart.isLogNow && ys[at] <= 0)) {
      isDown = false;
      continue;
    }
    const [px, py] = [chart.x(xs[at]), chart.y(ys[at])];
    if (isDown) pen.lineTo(px, py);
    else pen.moveTo(px, py);
    isDown = true;
  }
  if (end === 1 && isDown) pen.lineTo(chart.x(xs[0]) + 0.5, chart.y(ys[0]));
  pen.stroke();
}

function fillBelow(chart, pen, line) {
  if (!line.x.length) return;
  pen.fillStyle = line.colour;
  pen.globalAlpha = 0.85;
  pen.beginPath();
  pen.moveTo(chart.x(line.x[0]), chart.y(0));
  line.x.forEach((x, at) => pen.lineTo(chart.x(x), chart.y(line.y[at] ?? 0)));
  pen.lineTo(chart.x(line.x[line.x.length - 1]), chart.y(0));
  pen.fill();
  pen.globalAlpha = 1;
}

function dots(chart, pen, line) {
  (line.ex ?? []).forEach((x, at) => {
    if (line.ey[at] === null) return;
    pen.beginPath();
    pen.arc(chart.x(x), chart.y(line.ey[at]), 3.2, 0, 7);
    pen.fillStyle = token("--card");
    pen.fill();
    pen.strokeStyle = line.colour;
    pen.lineWidth = 1.6;
    pen.stroke();
  });
}

function drawMark(chart, pen, mark, height) {
  const x = Math.round(chart.x(mark.x)) + 0.5;
  pen.strokeStyle = token(mark.isBad ? "--bad" : "--mark");
  pen.setLineDash(mark.isBad ? [3, 3] : [1, 4]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x, PAD.top);
  pen.lineTo(x, height - PAD.bottom);
  pen.stroke();
  pen.setLineDash([]);
}

const strongLast = (lines) => [...lines.filter((line) => !line.isStrong), ...lines.filter((line) => line.isStrong)];

// All of an axis in one unit.
function stepLabel(value, most) {
  if (value === 0) return "0";
  if (most >= 1e7) return `${+(value / 1e6).toPrecision(6)} M`;
  return most >= 1e4 ? `${+(value / 1e3).toPrecision(6)} k` : count(value);
}
