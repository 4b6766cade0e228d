// The run that is looked at: its state in a sentence, and the few figures that matter most.

import { fill, h, onChange } from "./dom.js";
import { clock, count, duration, figure, known, seconds, short, usd } from "./format.js";
import { pill, share } from "./runs_panel.js";
import { server } from "./state.js";

export function headPanel(root) {
  const draw = onChange((run, detail) => {
    if (!run) {
      fill(
        root,
        h(
          "div",
          { cls: "head" },
          h("h1", {}, "No run yet"),
          h("p", { cls: "sentence" }, "Start one with embark train, or name a folder of runs: embark watch DIR."),
        ),
      );
      return;
    }
    fill(
      root,
      h("div", { cls: "head" }, h("h1", {}, run.name), pill(run)),
      h("p", { cls: "sentence" }, sentence(run)),
      h("dl", { cls: "figures" }, figures(run, detail)),
    );
  });
  return (run) => draw(shownOf(run), run && server.detail?.id === run.id ? extra(server.detail) : null);
}

// What is drawn, rounded as it is drawn, so that a figure that reads the same draws nothing.
function shownOf(run) {
  if (!run) return null;
  const { version, last_s, first_s, ...rest } = run;
  return {
    ...rest,
    last_s: run.state === "running" ? null : last_s,
    seconds_left: known(rest.seconds_left) ? Math.round(rest.seconds_left) : null,
  };
}

const extra = (detail) => ({
  evals: detail.evals,
  lost: detail.money.lost,
  device: (detail.about.find(([name]) => name === "device") ?? [])[1],
});

function sentence(run) {
  const parts = [run.sentence];
  if (run.state === "killed" || run.state === "deleted") parts.push(`Last event at ${clock(run.last_s)}.`);
  if (run.share_read < 1) parts.push(`${(100 * run.share_read).toFixed(0)} % of its events are read.`);
  if (run.num_bad_lines)
    parts.push(`${count(run.num_bad_lines)} ${run.num_bad_lines === 1 ? "line" : "lines"} could not be read.`);
  return parts.filter(Boolean).join(" ");
}

function figures(run, detail) {
  const { money } = run;
  const rows = run.serving?.figures ?? trainingFigures(run, detail);
  return rows.map(([name, value, note]) =>
    h(
      "div",
      { title: name === "Spent" ? money.price : null },
      h("dt", {}, name),
      h("dd", {}, value),
      h("dd", { cls: "note" }, note),
    ),
  );
}

function trainingFigures(run, detail) {
  const { money } = run;
  const rows = [
    [
      "Progress",
      run.num_steps ? `${share(run).toFixed(share(run) < 10 ? 1 : 0)} %` : count(run.step),
      run.num_steps ? `step ${count(run.step)} of ${count(run.num_steps)}` : "steps",
    ],
    ["Training loss", figure(run.loss), "recent"],
    known(run.eval_auc)
      ? ["Held-out AUC", figure(run.eval_auc), best(detail)]
      : ["Training AUC", run.auc_text, "recent"],
    ...(known(run.eval_normalized_entropy)
      ? [["Held-out NE", figure(run.eval_normalized_entropy), "1: guessing the mean"]]
      : []),
    [
      "Throughput",
      known(run.samples_per_s) ? `${short(run.samples_per_s)}/s` : "–",
      known(run.step_s) ? `${seconds(run.step_s)} a step` : "samples",
    ],
  ];
  if (known(money.spent_usd)) rows.push(["Spent", usd(money.spent_usd), `${usd(money.usd_per_hour)} an hour`]);
  if (known(money.to_go_usd))
    rows.push([
      "To go",
      usd(money.to_go_usd),
      known(money.budget_usd)
        ? `of a budget of ${usd(money.budget_usd)}`
        : known(run.seconds_left)
          ? `${duration(run.seconds_left)} at this pace`
          : "once it resumes",
    ]);
  return rows;
}

function best(detail) {
  if (!detail || !known(detail.evals?.auc)) return "";
  return known(detail.evals.best_auc)
    ? `ceiling ${figure(detail.evals.best_auc)}`
    : `at step ${count(detail.evals.step)}`;
}
