// The curves of all runs that are ticked, laid over each other, with one zoom and one pointer for all.

import { Chart } from "./chart.js";
import { fill } from "./dom.js";
import { figure, inUnit } from "./format.js";
import { colourOf, dashOf } from "./palette.js";
import { choices, focused, isShown, placeOfRun, server, view } from "./state.js";

const CURVES = [
  {
    name: "loss",
    title: "Loss",
    meaning: "What training makes small, a mean since the last point. Line: training; dots: held-out log loss.",
    format: figure,
  },
  { name: "auc", title: "AUC", meaning: "How often a positive outranks a negative. Line: training; dots: held out.", format: figure },
  {
    name: "normalized_entropy",
    title: "Normalized entropy",
    meaning: "Log loss, over that of guessing the mean rate. Line: training; dots: held out.",
    format: figure,
  },
  {
    name: "samples_per_s",
    title: "Throughput",
    meaning: "Samples trained on per second, all ranks together.",
    format: inUnit("samples/s"),
  },
  {
    name: "step_s",
    title: "Step time",
    meaning: "One training step, a mean since the last point.",
    format: inUnit("s"),
  },
  { name: "learning_rate", title: "Learning rate", meaning: "How far one step goes.", format: figure },
];
const UNSMOOTHED = new Set(["learning_rate"]);

export function curvesPanel(root, { onZoom }) {
  const charts = CURVES.map((curve) => {
    const chart = new Chart({
      ...curve,
      hasLog: true,
      onZoom,
      onHover: (x) => charts.forEach(([, other]) => other !== chart && other.hover(x)),
    });
    chart.root.dataset.curve = curve.name;
    chart.sayEmpty("No points yet: the first comes after watch.every steps.");
    return [curve, chart];
  });
  fill(
    root,
    charts.map(([, chart]) => chart.root),
  );

  const update = () => {
    const shown = server.runs.filter(isShown);
    for (const [curve, chart] of charts) {
      const lines = shown.flatMap((run) => line(run, curve.name, shown.length));
      const own = focused();
      const marks = own && isShown(own) ? marksOf(own) : [];
      const smooth = UNSMOOTHED.has(curve.name) ? 0 : choices.smooth;
      chart.show(lines, { by: choices.by, zoom: view.zoom, smooth, marks, value: lastOf(lines, own, curve) });
    }
  };
  update.now = () => {
    update();
    charts.forEach(([, chart]) => chart.drawNow());
  };
  return update;
}

function line(run, name, numShown) {
  const held = (view.zoom && server.near.get(run.id)) || server.curves.get(run.id);
  const curve = held?.curves?.[name];
  if (!curve?.x.length) return [];
  const place = placeOfRun(run.id);
  return [
    {
      ...curve,
      id: run.id,
      label: run.name,
      colour: colourOf(place),
      dash: dashOf(place),
      isStrong: numShown > 1 && run.id === focused()?.id,
    },
  ];
}

function marksOf(run) {
  const detail = server.detail?.id === run.id ? server.detail : null;
  const kinds = new Set(["interrupt", "resume", "error"]);
  return (detail?.marks ?? [])
    .filter((mark) => kinds.has(mark.kind))
    .map((mark) => ({ x: choices.by === "time" ? mark.at_s : mark.step, isBad: mark.kind !== "resume" }))
    .filter((mark) => mark.x !== null);
}

function lastOf(lines, own, curve) {
  const line = lines.find((one) => one.id === own?.id) ?? (lines.length === 1 ? lines[0] : null);
  const last = line?.y.findLast((value) => value !== null);
  return last === undefined ? "" : curve.format(last);
}
