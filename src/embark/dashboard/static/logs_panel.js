// The newest lines of the run's logs, or of its events in words, that hold all words of the filter.

import { askLogs } from "./api.js";
import { card, empty, fill, h, onChange } from "./dom.js";

export function logsPanel(root) {
  let [file, runId, version, timer, isAsking] = [0, null, -1, null, false];
  const files = h("select", {
    "aria-label": "Which log",
    onchange: () => {
      file = Number(files.value);
      again();
    },
  });
  const words = h("input", {
    type: "search",
    placeholder: "Filter: all words must be there",
    "aria-label": "Filter lines",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(again, 150);
    },
  });
  const level = h(
    "select",
    { "aria-label": "Which lines", onchange: () => again() },
    [
      ["", "all lines"],
      ["warning", "warnings and errors"],
      ["error", "errors"],
    ].map(([value, text]) => h("option", { value }, text)),
  );
  const lines = h("ol", { cls: "lines", tabindex: "0", "aria-label": "Log lines" });
  const num = h("span", { cls: "note", "aria-live": "polite" });
  fill(root, card("Log", { cls: "log" }, h("div", { cls: "tools" }, files, level, words, num), lines));

  const drawFiles = onChange((names) =>
    fill(
      files,
      names.map((name, at) => h("option", { value: String(at), selected: at === file }, name)),
    ),
  );
  const draw = onChange((all) => {
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    const shown = all.filter((line) => !level.value || line.level === "error" || line.level === level.value);
    fill(
      lines,
      shown.length
        ? shown.map((line) =>
            h(
              "li",
              { cls: line.level ? `is-${line.level}` : null },
              line.time ? h("time", {}, line.time) : null,
              line.kind ? h("span", { cls: "kind" }, line.kind) : null,
              h("span", { cls: "text" }, line.text),
            ),
          )
        : empty(words.value || level.value ? "No line holds these words." : "No line yet."),
    );
    num.textContent = shown.length ? `${shown.length} ${shown.length === 1 ? "line" : "newest lines"}` : "";
    if (isAtEnd) lines.scrollTop = lines.scrollHeight;
  });

  async function again() {
    if (!runId || isAsking) return;
    isAsking = true;
    const asked = [runId, file, words.value];
    try {
      const answer = await askLogs(...asked);
      drawFiles(answer.files);
      draw(answer.lines, level.value);
    } catch {
      // the next look asks again
    }
    isAsking = false;
    if (asked[0] !== runId || asked[1] !== file || asked[2] !== words.value) again();
  }

  return (run) => {
    if (!run || (run.id === runId && run.version === version)) return;
    if (run.id !== runId) file = 0;
    [runId, version] = [run.id, run.version];
    again();
  };
}
