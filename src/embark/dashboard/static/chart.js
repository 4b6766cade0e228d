// A chart on two canvases: one holds the lines, the other what follows the pointer, so that hovering redraws no line.

import { h } from "./dom.js";
import { count } from "./format.js";
import { token } from "./palette.js";
import { labelledTicks, linear, logarithmic, logTicks, nearest, placeOf, smoothed, timeLabel } from "./scale.js";
import { listen } from "./chart_input.js";
import { drawAxes, drawLines, PAD } from "./chart_pen.js";

const LEAST_LEFT = 36;
const MAX_SHOWN = 12;

export class Chart {
  // `options`: title, meaning, format, height, onZoom(low, high), onHover(x or null), hasLog, isStacked
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.marks = [];
    this.by = "step";
    this.zoom = null;
    this.smooth = 0;
    this.isLog = false;
    this.hoverX = null;
    this.band = null;
    this.base = h("canvas", { "aria-hidden": "true" });
    this.over = h("canvas", { "aria-hidden": "true", cls: "over" });
    this.tip = h("div", { cls: "tip", role: "status", hidden: true });
    this.note = h("p", { cls: "empty", hidden: true });
    this.plot = h(
      "div",
      { cls: "plot", style: { height: `${options.height ?? 190}px` } },
      this.base,
      this.over,
      this.note,
      this.tip,
    );
    this.value = h("span", { cls: "value" });
    this.log = options.hasLog
      ? h(
          "button",
          {
            type: "button",
            cls: "chip",
            "aria-pressed": "false",
            title: "Logarithmic scale",
            onclick: () => this.setLog(!this.isLog),
          },
          "log",
        )
      : null;
    this.legend = h("ul", { cls: "legend", hidden: true });
    this.root = h(
      "figure",
      { cls: "card chart", tabindex: "0", role: "group", "aria-label": options.title },
      h("figcaption", {}, h("span", { cls: "title", title: options.meaning }, options.title), this.value, this.log),
      this.plot,
      this.legend,
    );
    listen(this);
    new ResizeObserver(() => this.invalidate()).observe(this.plot);
  }

  // Lines: label, colour, dash, x, y, and where there are: mx and my (means), ex and ey (dots)
  show(lines, { by, zoom = null, smooth = 0, marks = [], value = "", isFaint = false } = {}) {
    Object.assign(this, { by: by ?? this.by, zoom, smooth, marks, isFaint });
    this.lines = (this.options.isStacked ? stacked(lines) : lines).map((line) => {
      const isSmooth = smooth > 0 && line.mx?.length > 2;
      const [xs, ys] = isSmooth ? [line.mx, smoothed(line.my, smooth)] : [line.x, line.y];
      return { ...line, xs, ys, isSmooth };
    });
    this.value.textContent = value;
    this.note.hidden = lines.some((line) => line.x.length > 0);
    this.root.setAttribute(
      "aria-label",
      `${this.options.title}: ${value || "no points yet"}. Arrow keys read points, plus and minus zoom, 0 shows all.`,
    );
    this.invalidate();
  }

  sayEmpty(text) {
    this.note.textContent = text;
  }

  showLegend(entries) {
    this.legend.hidden = entries.length < 2;
    this.legend.replaceChildren(
      ...entries.map((line) => h("li", {}, h("i", { cls: "swatch", style: { background: line.colour } }), line.label)),
    );
  }

  setLog(isLog) {
    this.isLog = isLog;
    this.log?.setAttribute("aria-pressed", String(isLog));
    this.drawNow();
  }

  hover(x) {
    if (x === this.hoverX) return;
    this.hoverX = x;
    this.drawOver();
  }

  invalidate() {
    this.pending ??= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    if (this.pending) cancelAnimationFrame(this.pending);
    this.pending = null;
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width || !height) return;
    for (const canvas of [this.base, this.over]) {
      const ratio = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.size = { width, height };
    this.setScales();
    const pen = this.base.getContext("2d");
    pen.clearRect(0, 0, width, height);
    drawAxes(this, pen);
    drawLines(this, pen);
    this.drawOver();
    this.root.dataset.range = this.xRange.map((value) => value.toFixed(1)).join(" ");
    this.root.dataset.points = String(this.lines.reduce((sum, line) => sum + line.xs.length, 0));
  }

  setScales() {
    const { width, height } = this.size;
    let [low, high] = this.zoom ?? [Infinity, -Infinity];
    if (!this.zoom) {
      for (const { x } of this.lines) {
        if (!x.length) continue;
        low = Math.min(low, x[0]);
        high = Math.max(high, x[x.length - 1]);
      }
    }
    if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
    this.xRange = [low, high];
    const [least, most] = this.valueRange(low, high);
    const place = this.isLog && least > 0 ? logarithmic : linear;
    this.isLogNow = place === logarithmic;
    const room = this.isLogNow ? 1 : (most - least || Math.abs(most) * 0.1 || 1) * 0.06;
    const floor = this.options.fromZero ? Math.min(0, least) : least - room;
    this.yRange = this.isLogNow ? [least / 1.05, most * 1.05] : [floor, most + room];
    this.y = place(...this.yRange, height - PAD.bottom, PAD.top);
    const pen = this.base.getContext("2d");
    pen.font = `11px ${token("--font")}`;
    const label = (value) => (value === 0 ? "0" : this.options.format(value, 3));
    if (least === most && !this.options.fromZero) this.values = [[least, label(least)]];
    else if (this.isLogNow) this.values = logTicks(...this.yRange).map((value) => [value, label(value)]);
    else this.values = labelledTicks(...this.yRange, Math.max(2, Math.floor(height / 30)), label);
    this.left = Math.max(LEAST_LEFT, ...this.values.map(([, label]) => pen.measureText(label).width + 12));
    this.x = linear(low, high, this.left, width - PAD.right);
  }

  valueRange(low, high) {
    let [least, most] = [Infinity, -Infinity];
    const take = (xs, ys) => {
      const end = Math.min(xs.length, placeOf(xs, high) + 1);
      for (let at = Math.max(0, placeOf(xs, low) - 1); at < end; at += 1) {
        const y = ys[at];
        if (y === null || (this.isLog && y <= 0)) continue;
        if (y < least) least = y;
        if (y > most) most = y;
      }
    };
    for (const line of this.lines) {
      take(line.x, line.y);
      if (line.ex) take(line.ex, line.ey);
    }
    return least <= most ? [least, most] : [0, 1];
  }

  drawOver() {
    if (!this.size) return;
    const { width, height } = this.size;
    const pen = this.over.getContext("2d");
    pen.clearRect(0, 0, width, height);
    if (this.band) {
      pen.fillStyle = token("--band");
      const [a, b] = this.band;
      pen.fillRect(Math.min(a, b), PAD.top, Math.abs(b - a), height - PAD.top - PAD.bottom);
    }
    const points = this.hoverX === null || this.band ? [] : this.pointsAt(this.hoverX);
    this.tip.hidden = !points.length || !this.isHovered;
    if (!points.length) return;
    const x = this.x(this.hoverX);
    pen.strokeStyle = token("--ink-faint");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, PAD.top);
    pen.lineTo(Math.round(x) + 0.5, height - PAD.bottom);
    pen.stroke();
    for (const point of points) {
      pen.beginPath();
      pen.arc(this.x(point.x), this.y(point.top ?? point.y), 3.5, 0, 7);
      pen.fillStyle = point.line.colour;
      pen.fill();
      pen.strokeStyle = token("--card");
      pen.lineWidth = 1.5;
      pen.stroke();
    }
    if (this.isHovered) this.showTip(points, x);
  }

  pointsAt(x) {
    const [low, high] = this.xRange;
    return this.lines
      .filter(
        (line) =>
          line.xs.length && x >= line.xs[0] - (high - low) / 40 && x <= line.xs[line.xs.length - 1] + (high - low) / 40,
      )
      .flatMap((line) => {
        const at = nearest(line.xs, x);
        if (line.ys[at] === null || line.ys[at] === undefined) return [];
        return [{ line, x: line.xs[at], y: line.own?.[at] ?? line.ys[at], top: line.own ? line.ys[at] : undefined }];
      });
  }

  showTip(points, x) {
    const at = this.options.xLabel ? this.options.xLabel(points[0].x) : this.by === "time" ? timeLabel(this.hoverX) : `step ${count(points[0].x)}`;
    const rows = points
      .slice(0, MAX_SHOWN)
      .map(({ line, y }) =>
        h(
          "div",
          { cls: "row" },
          h("i", { cls: "swatch", style: { background: line.colour } }),
          h("span", { cls: "name" }, line.label),
          h("b", {}, this.options.format(y, 4)),
        ),
      );
    const more = points.length > MAX_SHOWN ? [h("div", { cls: "more" }, `and ${points.length - MAX_SHOWN} more`)] : [];
    this.tip.replaceChildren(h("div", { cls: "at" }, at), ...rows, ...more);
    const isLeft = x > this.size.width / 2;
    this.tip.style.left = isLeft ? "auto" : `${x + 12}px`;
    this.tip.style.right = isLeft ? `${this.size.width - x + 12}px` : "auto";
  }
}

function stacked(lines) {
  const sum = [];
  return lines
    .filter((line) => line.x.length === lines[0].x.length)
    .map((line) => {
      const y = line.y.map((value, at) => (sum[at] = (sum[at] ?? 0) + (value ?? 0)));
      return { ...line, own: line.y, y };
    });
}
