// What is wrong, where something is: the cause, the line that shows it, the fix.

import { fill, h, onChange } from "./dom.js";

const MAX_SHOWN = 8;

export function diagnosisPanel(root) {
  const draw = onChange((found, error, warnings) => {
    root.hidden = !found.length && !warnings.length;
    const shown = found
      .slice(0, MAX_SHOWN)
      .map((one) =>
        h(
          "article",
          { cls: one.kind === "slow" || one.kind === "quality" ? "finding is-warning" : "finding" },
          h("h2", {}, one.cause),
          h("p", {}, h("b", {}, "Fix: "), one.fix),
          one.command ? h("pre", {}, one.command) : null,
          h(
            "p",
            { cls: "note" },
            `${one.name}; seen in ${one.file}${one.line ? `, line ${one.line}` : ""}: `,
            h("code", {}, one.evidence),
          ),
        ),
      );
    const more =
      found.length > MAX_SHOWN
        ? [h("p", { cls: "note" }, `and ${found.length - MAX_SHOWN} more: embark diagnose lists them`)]
        : [];
    fill(
      root,
      shown,
      more,
      found.length ? [] : warnings.map((text) => h("article", { cls: "finding is-warning" }, h("p", {}, text))),
      error ? h("p", { cls: "note" }, error) : null,
    );
  });
  return (diagnosis, detail) =>
    draw(
      diagnosis?.found ?? [],
      diagnosis?.error ?? "",
      (detail?.notes ?? [])
        .filter((note) => note.level === "warning")
        .slice(-MAX_SHOWN)
        .map((note) => note.text),
    );
}
