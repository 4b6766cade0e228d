// The search that this run is a trial of: the best metric so far, and every trial.

import { Chart } from "./chart.js";
import { card, fill, h, onChange } from "./dom.js";
import { figure, seconds, usd } from "./format.js";
import { colourOf } from "./palette.js";

export function tuningPanel(root) {
  const body = h("div", {});
  const chart = new Chart({ title: "Best so far", meaning: "Line: the best trial so far; dots: every trial.", format: figure, height: 150 });
  chart.root.dataset.chart = "tuning";
  fill(root, chart.root, card("Trials", {}, body));
  const draw = onChange((tuning) => {
    root.hidden = !tuning;
    if (!tuning) return;
    const { numbers, values, best_values: best } = tuning;
    chart.show([{ label: tuning.metric, colour: colourOf(0), x: numbers, y: best, ex: numbers, ey: values }], {
      by: "step",
      value: best.length ? `${tuning.metric} ${figure(best.at(-1))}` : "",
    });
    const fields = [...new Set(tuning.trials.flatMap((trial) => Object.keys(trial.values)))];
    fill(
      body,
      h("p", { cls: "say" }, tuning.sentence),
      tuning.best_spec ? h("pre", {}, `embark train ${tuning.best_spec}`) : null,
      h(
        "div",
        { cls: "scroll", tabindex: "0", role: "region", "aria-label": "Trials" },
        h(
          "table",
          { cls: "plain" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["trial", "state", tuning.metric, "time", "cost", ...fields.map((field) => field.split(".").at(-1))].map((name) =>
                h("th", { scope: "col" }, name.replaceAll("_", " ")),
              ),
            ),
          ),
          h("tbody", {}, tuning.trials.map((trial) => row(trial, fields, trial.number === tuning.best))),
        ),
      ),
    );
  });
  return (detail) => draw(detail?.tuning ?? null);
}

function row(trial, fields, isBest) {
  return h(
    "tr",
    { dataset: { trial: trial.number } },
    h("td", {}, String(trial.number)),
    h("td", { cls: "text" }, isBest ? "best" : trial.state),
    h("td", {}, figure(trial.value)),
    h("td", {}, seconds(trial.seconds)),
    h("td", {}, usd(trial.usd)),
    fields.map((field) => h("td", {}, trial.values[field] ?? "–")),
  );
}
