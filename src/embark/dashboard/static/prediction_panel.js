// What was predicted beside what came, what the run costs, and what it is.

import { card, empty, fill, h, onChange } from "./dom.js";
import { duration, inUnit, known, usd } from "./format.js";

export function predictionPanel(root) {
  const body = h("div", {});
  fill(root, card("Predicted vs. actual", {}, body));
  const draw = onChange((prediction) => {
    if (!prediction) {
      fill(
        body,
        empty(
          "Nothing was predicted for this machine. embark bench --calibrate measures it, and the next run is predicted.",
        ),
      );
      return;
    }
    fill(
      body,
      h(
        "table",
        { cls: "plain" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["", prediction.is_calibrated ? "predicted" : "estimated", "actual", ""].map((name) =>
              h("th", { scope: "col" }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          prediction.rows.map(({ name, unit, predicted, actual }) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              h("td", {}, inUnit(unit)(predicted)),
              h("td", {}, inUnit(unit)(actual)),
              h("td", { cls: off(predicted, actual) > 0.2 ? "is-warning" : "" }, apart(predicted, actual)),
            ),
          ),
        ),
      ),
      prediction.bound_by
        ? h("p", { cls: "note" }, `Predicted bottleneck: ${prediction.bound_by.replaceAll("_", " ")}.`)
        : null,
    );
  });
  return (detail) => detail && draw(detail.prediction);
}

export function moneyPanel(root) {
  const body = h("div", {});
  fill(root, card("Cost", {}, body));
  const draw = onChange((money, left) => {
    if (!known(money.usd_per_hour)) {
      fill(
        body,
        empty(
          money.price || "No price is known: name the machine in the spec's [place], and its price is in the catalog.",
        ),
      );
      return;
    }
    const whole = (money.spent_usd ?? 0) + (money.to_go_usd ?? 0);
    const bar = h(
      "div",
      { cls: "stack", role: "img", "aria-label": `${usd(money.spent_usd)} spent of about ${usd(whole)}` },
      h("span", { cls: "spent", style: { flexGrow: String((100 * (money.spent_usd ?? 0)) / (whole || 1)) } }),
      h("span", { cls: "to-go", style: { flexGrow: String((100 * (money.to_go_usd ?? 0)) / (whole || 1)) } }),
    );
    const rows = [
      ["spent", usd(money.spent_usd)],
      known(money.to_go_usd)
        ? ["to go", known(left) ? `${usd(money.to_go_usd)} in ${duration(left)}` : usd(money.to_go_usd)]
        : null,
      ["in all", usd(whole)],
      known(money.budget_usd) ? ["budget", usd(money.budget_usd)] : null,
      ["an hour", usd(money.usd_per_hour)],
    ];
    fill(
      body,
      bar,
      h(
        "table",
        { cls: "plain" },
        h(
          "tbody",
          {},
          rows.filter(Boolean).map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value))),
        ),
      ),
      h("p", { cls: "note" }, money.price),
      money.lost ? h("p", { cls: "note" }, `It was ${money.lost}.`) : null,
    );
  });
  return (detail) =>
    detail && draw(round(detail.money), detail.seconds_left === null ? null : Math.round(detail.seconds_left));
}

export function aboutPanel(root) {
  const body = h("div", {});
  fill(root, card("The run", {}, body));
  const draw = onChange((about, spec) => {
    const text = h("pre", { tabindex: "0", "aria-label": "The run's spec" }, spec);
    fill(
      body,
      about.length
        ? h(
            "table",
            { cls: "plain words" },
            h(
              "tbody",
              {},
              about.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value))),
            ),
          )
        : empty("It has not said yet what it is."),
      spec ? h("details", {}, h("summary", {}, "spec.toml"), text) : null,
    );
  });
  return (detail) => detail && draw(detail.about, detail.spec);
}

const round = (money) => ({ ...money, spent_usd: cents(money.spent_usd), to_go_usd: cents(money.to_go_usd) });
const cents = (value) => (known(value) ? Math.round(value * 100) / 100 : null);
const off = (predicted, actual) =>
  known(predicted) && known(actual) && predicted > 0 ? Math.abs(actual / predicted - 1) : 0;

function apart(predicted, actual) {
  if (!known(predicted) || !known(actual) || predicted <= 0) return "";
  const share = actual / predicted - 1;
  if (Math.abs(share) < 0.005) return "as predicted";
  return Math.abs(share) > 1
    ? `${(actual / predicted).toFixed(1)} ×`
    : `${share > 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(0)} %`;
}
