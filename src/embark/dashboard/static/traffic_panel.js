// Served traffic: rates, latencies, scores and columns against what the model was evaluated on, calibration.

import { Chart } from "./chart.js";
import { card, empty, fill, h, onChange } from "./dom.js";
import { clock, count, figure, known, percent, seconds, short } from "./format.js";
import { colourOf } from "./palette.js";

const asShare = (value) => percent(100 * value);
const perSecond = (value) => `${short(value)}/s`;
// Of a logit the probability, with as many digits as set it apart from 0 and 1.
export const probability = (logit) => {
  const share = 100 / (1 + Math.exp(-logit));
  return `${share < 1 ? share.toPrecision(1) : share > 99 ? share.toFixed(2) : share.toFixed(0)} %`;
};
const CHARTS = [
  { key: "requests", title: "Requests", meaning: "Requests for scores a second, all replicas together.", format: perSecond, fromZero: true },
  { key: "rows", title: "Rows", meaning: "Rows scored a second.", format: perSecond, fromZero: true },
  { key: "latency", title: "Latency", meaning: "From a request's last byte to its scores, in the server.", format: seconds, hasLog: true },
  {
    key: "scores",
    title: "Scores",
    meaning: "Share of the rows by score, of the last 15 minutes. Dashed: the run's last evaluation.",
    format: asShare,
    fromZero: true,
    xLabel: probability,
  },
  {
    key: "calibration",
    title: "Calibration",
    meaning: "Of rows whose labels came back, the share of clicks by score. Dashed: as predicted.",
    format: asShare,
    fromZero: true,
    xLabel: probability,
  },
];

export function trafficPanel(root) {
  const charts = new Map(CHARTS.map((options) => [options.key, new Chart({ height: 170, ...options })]));
  charts.forEach((chart, key) => (chart.root.dataset.chart = `traffic-${key}`));
  charts.get("calibration").sayEmpty("No labels yet: POST /feedback takes them.");
  charts.get("scores").sayEmpty("No scores yet.");
  const [columns, versions] = [h("div", {}), h("div", {})];
  const draw = onChange((traffic) => {
    root.hidden = !traffic;
    if (!traffic) return;
    drawCharts(charts, traffic);
    fill(columns, columnTable(traffic));
    fill(versions, versionTable(traffic));
  });
  fill(
    root,
    h("div", { cls: "grid" }, [...charts.values()].map((chart) => chart.root)),
    card("Columns against the reference", { dataset: { part: "columns" } }, columns),
    card("Versions", { dataset: { part: "versions" } }, versions),
  );
  return draw;
}

function drawCharts(charts, { series, marks, scores, calibration }) {
  const timed = { by: "time", marks: marks.map((mark) => ({ x: mark.at_s, isBad: mark.is_bad })) };
  const show = (key, lines, options) => {
    const drawn = lines
      .filter(([, , y]) => y.some((value) => value !== null))
      .map(([label, x, y, more], place) => ({ label, x, y, colour: colourOf(place), ...more }));
    charts.get(key).show(drawn, options);
    charts.get(key).showLegend(drawn);
  };
  const last = (name) => series[name].at(-1);
  const fails = series.failed_per_s.some((value) => value > 0);
  show(
    "requests",
    [["all", series.x, series.requests_per_s], ...(fails ? [["refused or failed", series.x, series.failed_per_s]] : [])],
    { ...timed, value: known(last("requests_per_s")) ? perSecond(last("requests_per_s")) : "" },
  );
  show("rows", [["rows", series.x, series.rows_per_s]], { ...timed, value: known(last("rows_per_s")) ? perSecond(last("rows_per_s")) : "" });
  show("latency", ["p50", "p95", "p99"].map((name) => [name, series.x, series[name]]), {
    ...timed,
    value: known(last("p99")) ? `p99 ${seconds(last("p99"))}` : "",
  });
  show(
    "scores",
    [
      ...(scores.num ? [["now", scores.x, scores.now]] : []),
      ...(scores.reference ? [["evaluation", scores.x, scores.reference, { dash: [5, 4], colour: colourOf(7) }]] : []),
    ],
    { by: "step", value: known(scores.psi) ? `PSI ${figure(scores.psi, 2)}` : "" },
  );
  show(
    "calibration",
    calibration
      ? [
          ["observed", calibration.x, calibration.observed, { ex: calibration.x, ey: calibration.observed }],
          ["predicted", calibration.x, calibration.predicted, { dash: [5, 4], colour: colourOf(7) }],
        ]
      : [],
    { by: "step", value: calibration ? ratioText(calibration) : "" },
  );
}

const ratioText = ({ ratio, num, clicks }) =>
  `${known(ratio) ? `predicted ${figure(ratio, 2)} × observed` : "no click"}, ${count(num)} labels, ${count(clicks)} clicks`;

function columnTable(traffic) {
  const { columns, num_columns: num, reference } = traffic;
  const isBad = columns.some((column) => column.level);
  const say = h("p", { cls: isBad ? "say is-warning" : "say" }, traffic.sentence);
  if (!columns.length) return [say];
  const note = h(
    "p",
    { cls: "note" },
    `The reference: ${count(reference.num_rows)} ${reference.rows} rows of the run. PSI below 0.1: no drift; 0.1 to 0.25: moderate; ` +
      `above: large. What chance gives so few rows is subtracted.${num > columns.length ? ` The worst ${columns.length} of ${count(num)}.` : ""}`,
  );
  return [
    say,
    table(
      "Columns",
      ["column", "PSI", "", "rows", "missing", "share of the rows now, and in the reference"],
      columns.map((column) =>
        h(
          "tr",
          { dataset: { column: column.name, level: column.level } },
          h("th", { scope: "row" }, column.name),
          h("td", {}, figure(column.psi, 3)),
          h("td", { cls: "text" }, h("span", { cls: `pill ${PILLS[column.level]}` }, column.level || "no drift")),
          h("td", {}, count(column.num)),
          h("td", {}, asShare(column.missing)),
          h("td", { cls: "text" }, column.num ? column.moved.map(movedText).join("; ") : "–"),
        ),
      ),
    ),
    note,
  ];
}

const PILLS = { "": "is-finished", moderate: "is-stopped", large: "is-failed" };
const movedText = (bin) => `${bin.label}: ${asShare(bin.now)}, ${asShare(bin.reference)}`;

function versionTable({ versions, num_replicas: replicas, marks }) {
  if (!versions.length) return [empty("No version yet.")];
  return [
    table(
      "Versions",
      ["version", "first answer", "replicas", "rows", "predicted / observed", "labels"],
      versions.map((one) =>
        h(
          "tr",
          { dataset: { version: one.version } },
          h("th", { scope: "row" }, String(one.version)),
          h("td", {}, clock(one.since_s)),
          h("td", {}, `${one.num_answering} of ${replicas}`),
          h("td", {}, count(one.rows)),
          h("td", {}, known(one.calibration?.ratio) ? figure(one.calibration.ratio, 2) : "–"),
          h("td", {}, count(one.calibration?.num)),
        ),
      ),
    ),
    h(
      "ul",
      { cls: "changes" },
      marks
        .slice(-8)
        .reverse()
        .map((mark) => h("li", {}, `${clock(mark.time_s)}  ${mark.text}`)),
    ),
  ];
}

function table(name, heads, rows) {
  return h(
    "div",
    { cls: "scroll", tabindex: "0", role: "region", "aria-label": name },
    h(
      "table",
      { cls: "plain" },
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows),
    ),
  );
}
