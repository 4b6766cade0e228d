// The phases of a step, and the ranks that the others wait for.

import { card, empty, fill, h, onChange } from "./dom.js";
import { percent, seconds } from "./format.js";
import { colourOf } from "./palette.js";

export const PHASES = ["input", "copy", "lookup", "all_to_all", "dense", "optimizer", "other"];
const NAMES = {
  input: "input",
  copy: "copy to device",
  lookup: "table lookup",
  all_to_all: "all-to-all",
  dense: "dense layers",
  optimizer: "optimizer",
  other: "other",
};
const MAX_BARS = 64;

export const phaseColour = (name) => colourOf(PHASES.indexOf(name));

export function phasesPanel(root) {
  const body = h("div", {});
  fill(root, card("Step time", {}, body));
  const draw = onChange((phases) => {
    if (!phases) {
      fill(body, empty("Not measured in this run: phases events say it, and a run writes them while it trains."));
      return;
    }
    const there = PHASES.filter((name) => phases[name] > 0);
    const sum = there.reduce((total, name) => total + phases[name], 0) || 1;
    fill(
      body,
      h(
        "div",
        {
          cls: "stack",
          role: "img",
          "aria-label": there.map((name) => `${NAMES[name]} ${percent((100 * phases[name]) / sum)}`).join(", "),
        },
        there.map((name) =>
          h("span", {
            title: `${NAMES[name]}: ${seconds(phases[name])}`,
            style: { flexGrow: String((100 * phases[name]) / sum), background: phaseColour(name) },
          }),
        ),
      ),
      h(
        "table",
        { cls: "plain" },
        h(
          "tbody",
          {},
          there.map((name) =>
            h(
              "tr",
              {},
              h(
                "th",
                { scope: "row" },
                h("i", { cls: "swatch", style: { background: phaseColour(name) } }),
                NAMES[name],
              ),
              h("td", {}, seconds(phases[name])),
              h("td", {}, percent((100 * phases[name]) / sum)),
            ),
          ),
        ),
      ),
    );
  });
  return (detail) => detail && draw(detail.phases);
}

export function ranksPanel(root) {
  const body = h("div", {});
  fill(root, card("Ranks", {}, body));
  const draw = onChange((ranks) => {
    if (!ranks.length) {
      fill(body, empty("No step times by rank: a run of several ranks tells them as it trains."));
      return;
    }
    const slow = ranks.filter((rank) => Object.keys(rank.slower_than).length);
    const most = Math.max(...ranks.map((rank) => rank.step_s ?? 0), 1e-9);
    const shown =
      ranks.length > MAX_BARS ? [...ranks].sort((a, b) => (b.step_s ?? 0) - (a.step_s ?? 0)).slice(0, MAX_BARS) : ranks;
    fill(
      body,
      h("p", { cls: slow.length ? "say is-warning" : "say" }, sentence(ranks, slow)),
      h(
        "div",
        { cls: "ranks" },
        shown.map((rank) =>
          h(
            "div",
            {
              cls: Object.keys(rank.slower_than).length ? "rank is-slow" : "rank",
              title: `rank ${rank.rank}: step ${seconds(rank.step_s)}, of it input ${seconds(rank.input_s)}`,
            },
            h("span", { cls: "name" }, String(rank.rank)),
            h(
              "span",
              { cls: "bar" },
              h("span", { cls: "step", style: { width: `${(100 * (rank.step_s ?? 0)) / most}%` } }),
              h("span", {
                cls: "input",
                style: { width: `${(100 * Math.min(rank.input_s ?? 0, rank.step_s ?? 0)) / most}%` },
              }),
            ),
            h("span", { cls: "num" }, seconds(rank.step_s)),
          ),
        ),
      ),
      h(
        "ul",
        { cls: "legend" },
        h("li", {}, h("i", { cls: "swatch of-step" }), "step"),
        h("li", {}, h("i", { cls: "swatch of-input" }), "of it, waiting for input"),
        slow.length ? h("li", {}, h("i", { cls: "swatch of-slow" }), "slow") : null,
      ),
      ranks.length > MAX_BARS ? h("p", { cls: "note" }, `The slowest ${MAX_BARS} of ${ranks.length} ranks.`) : null,
    );
  });
  return (detail) => detail && draw(detail.ranks);
}

function sentence(ranks, slow) {
  if (ranks.length === 1) return "One rank: there is no other to wait for.";
  if (!slow.length) return ranks.length === 2 ? "Both ranks keep pace." : `All ${ranks.length} ranks keep pace.`;
  const worst = slow.reduce((a, b) => ((a.step_s ?? 0) >= (b.step_s ?? 0) ? a : b));
  const where = ["input_s", "own_s", "step_s"].find((name) => worst.slower_than[name] !== undefined);
  const others = seconds(worst.slower_than[where]);
  const what =
    where === "input_s"
      ? `it waits ${seconds(worst.input_s)} for input at every step, the others ${others}`
      : where === "own_s"
        ? `its own work takes ${seconds(worst.own_s)} a step, the others' ${others}`
        : `its step takes ${seconds(worst.step_s)}, the others' ${others}`;
  const more = slow.length > 1 ? ` So do ${slow.length - 1} more.` : "";
  return `Rank ${worst.rank} is slow: ${what}. All others wait for it.${more}`;
}
