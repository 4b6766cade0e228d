// The page: asks the server what is new, and hands it to the panels.

import { askCharts, askCurves, askDiagnosis, askRun, askRuns, askTraffic } from "./api.js";
import { curvesPanel } from "./curves_panel.js";
import { diagnosisPanel } from "./diagnosis_panel.js";
import { aboutPanel, predictionPanel, moneyPanel } from "./prediction_panel.js";
import { headPanel } from "./head_panel.js";
import { logsPanel } from "./logs_panel.js";
import { chartsPanel } from "./machine_panel.js";
import { planPanel } from "./plan_panel.js";
import { runsPanel } from "./runs_panel.js";
import { choices, choose, focused, isShown, server, view } from "./state.js";
import { phasesPanel, ranksPanel } from "./step_panel.js";
import { tasksPanel } from "./tasks_panel.js";
import { timelinePanel } from "./timeline_panel.js";
import { toolbar } from "./toolbar.js";
import { trafficPanel } from "./traffic_panel.js";
import { tuningPanel } from "./tuning_panel.js";

const POINTS = 1000;
const [LOOK_MS, LOOK_HIDDEN_MS, DIAGNOSE_MS] = [1000, 10000, 30000];
const at = (id) => document.getElementById(id);

const drawHead = headPanel(at("head"));
const drawDiagnosis = diagnosisPanel(at("diagnosis"));
const drawCurves = curvesPanel(at("curves"), { onZoom: zoomTo });
const isOfTables = (key) => key.startsWith("tables.");
const drawTables = chartsPanel(at("tables"), { title: "Dynamic tables", wants: isOfTables });
const drawMachines = chartsPanel(at("machines"), {
  title: "Machines",
  wants: (key) => !isOfTables(key),
  none: "No measurements of GPUs, hosts or ranks in this run: ranks and phases events carry them.",
});
const drawLogs = logsPanel(at("logs"));
const drawTraffic = trafficPanel(at("traffic"));
const drawRuns = runsPanel(at("runs"), { onFocus: focusOn, onToggle: toggle });
const drawTools = toolbar(at("tools"), {
  onChange: redraw,
  onSmooth: resmooth,
  onBy: changeBy,
  onReset: () => zoomTo(null),
});
const ofDetail = [
  tuningPanel(at("tuning")),
  tasksPanel(at("tasks")),
  timelinePanel(at("timeline")),
  phasesPanel(at("phases")),
  ranksPanel(at("ranks")),
  planPanel(at("plan")),
  predictionPanel(at("prediction")),
  moneyPanel(at("money")),
  aboutPanel(at("about")),
];
let diagnosed = { id: null, state: null, atMs: -Infinity };

function redraw() {
  drawTools();
  drawRuns();
  drawHead(focused());
  drawCurves.now();
  const charts = server.charts?.id === focused()?.id ? server.charts?.charts : null;
  drawTables(charts);
  drawMachines(charts);
  const detail = server.detail?.id === focused()?.id ? server.detail : null;
  ofDetail.forEach((draw) => draw(detail));
  drawDiagnosis(server.diagnosis?.id === focused()?.id ? server.diagnosis : null, detail);
  drawLogs(focused());
  drawTraffic(server.traffic?.id === focused()?.id ? (server.traffic?.shown ?? null) : null);
  at("main").dataset.kind = focused()?.serving ? "served" : "trained";
  const run = focused();
  document.title = run ? `${run.name} · embark watch` : "embark watch";
}

async function look() {
  try {
    const answer = await askRuns();
    Object.assign(server, { runs: answer.runs, nowS: answer.now_s, error: answer.error, isLive: true });
    drawHead(focused());
    await Promise.all([lookAtCurves().then(drawCurves.now), lookAtFocus()]);
  } catch (error) {
    Object.assign(server, { isLive: false, error: error.message });
  }
  setTimeout(look, document.hidden ? LOOK_HIDDEN_MS : LOOK_MS);
  redraw();
  document.documentElement.dataset.ready = "true";
}

async function lookAtCurves() {
  const stale = (held) =>
    server.runs.filter((run) => isShown(run) && held.get(run.id)?.version !== run.version).map((run) => run.id);
  await take(server.curves, stale(server.curves), {});
  if (view.zoom) await take(server.near, stale(server.near), near());
}

async function take(held, ids, part) {
  if (!ids.length) return;
  const by = choices.by;
  const answer = await askCurves(ids, { by, points: POINTS, ...part });
  if (by === choices.by) for (const [id, curves] of Object.entries(answer)) held.set(id, curves);
}

// A quarter more on either side, so that a small move shows no bare edge.
function near() {
  const [low, high] = view.zoom;
  return { low: low - (high - low) / 4, high: high + (high - low) / 4 };
}

async function lookAtFocus() {
  const run = focused();
  if (!run) return;
  if (server.detail?.id !== run.id || server.detail.version !== run.version || server.detail.state !== run.state) {
    const by = choices.by;
    const [detail, charts, traffic] = await Promise.all([
      askRun(run.id),
      askCharts(run.id, { by, points: 400 }),
      run.serving ? askTraffic(run.id) : null,
    ]);
    if (by === choices.by)
      Object.assign(server, { detail, charts: { ...charts, id: run.id }, traffic: { id: run.id, shown: traffic } });
  }
  const isDue = performance.now() - diagnosed.atMs > DIAGNOSE_MS && server.diagnosis?.version !== run.version;
  if (diagnosed.id !== run.id || diagnosed.state !== run.state || isDue) {
    diagnosed = { id: run.id, state: run.state, atMs: performance.now() };
    askDiagnosis(run.id)
      .then((found) => {
        server.diagnosis = { ...found, id: run.id, version: run.version };
        redraw();
      })
      .catch(() => {});
  }
}

function focusOn(id) {
  choose({ focus: id });
  redraw();
  lookAtFocus()
    .then(redraw)
    .catch(() => {});
}

function toggle(id) {
  const [on, off] = isShown({ id }) ? ["hidden", "picked"] : ["picked", "hidden"];
  choose({ [on]: [...choices[on], id], [off]: choices[off].filter((held) => held !== id) });
  drawRuns();
  drawCurves.now();
  lookAtCurves()
    .then(drawCurves.now)
    .catch(() => {});
}

function resmooth() {
  drawTools();
  drawCurves.now();
}

function zoomTo(range) {
  view.zoom = range;
  server.near.clear();
  drawTools();
  drawCurves.now();
  if (range)
    lookAtCurves()
      .then(() => view.zoom === range && drawCurves.now())
      .catch(() => {});
}

function changeBy(by) {
  choose({ by });
  view.zoom = null;
  server.curves.clear();
  server.near.clear();
  server.detail = server.charts = null;
  Promise.all([lookAtCurves(), lookAtFocus()])
    .then(redraw)
    .catch(() => {});
}

document.addEventListener("visibilitychange", () => !document.hidden && redraw());
at("skip").addEventListener("click", () => at("main").focus());
redraw();
look();
