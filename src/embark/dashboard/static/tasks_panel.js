// The metrics of each task, of a run that learns several.

import { card, fill, h, onChange } from "./dom.js";

export function tasksPanel(root) {
  const body = h("div", {});
  fill(root, card("Tasks", {}, body));
  const draw = onChange((rows) => {
    root.hidden = !rows?.length;
    if (root.hidden) return;
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
            ["task", "metric", "held out", "ceiling", "training"].map((name) =>
              h("th", { scope: "col", cls: name === "metric" ? "left" : "" }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row, number) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, row.task === rows[number - 1]?.task ? "" : row.task),
              h("td", { cls: "left" }, row.metric),
              [row.held_out, row.ceiling, row.train].map((text) => h("td", {}, text)),
            ),
          ),
        ),
      ),
    );
  });
  return (detail) => draw(detail?.tasks ?? []);
}
