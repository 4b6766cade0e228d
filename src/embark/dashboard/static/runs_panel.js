// The list of runs: which are drawn, which one is looked at, how each stands.

import { fill, h, onChange } from "./dom.js";
import { clock, count, duration, figure } from "./format.js";
import { swatchOf } from "./palette.js";
import { choices, focused, isShown, server } from "./state.js";

const MANY = 7;
export const STATES = {
  waiting: "waiting",
  running: "running",
  finished: "finished",
  stopped: "stopped",
  failed: "failed",
  killed: "killed",
  deleted: "deleted",
};

export function runsPanel(root, { onFocus, onToggle }) {
  const list = h("ul", { cls: "runs", "aria-label": "Runs" });
  const search = h("input", {
    type: "search",
    placeholder: "Find a run",
    "aria-label": "Find a run",
    hidden: true,
    oninput: () => draw(),
  });
  fill(root, search, list);

  const draw = () => {
    const words = search.value.toLowerCase();
    search.hidden = server.runs.length < MANY;
    fill(
      list,
      server.runs.filter((run) => run.name.toLowerCase().includes(words)).map((run) => row(run, server.runs.indexOf(run))),
    );
    if (!server.runs.length)
      fill(list, h("li", { cls: "empty" }, "No run here yet. Start one with embark train; it appears by itself."));
  };
  const redraw = onChange((..._shown) => {
    const held = document.activeElement?.dataset?.key;
    draw();
    if (held) [...root.querySelectorAll("[data-key]")].find((made) => made.dataset.key === held)?.focus();
  });

  const row = (run, place) =>
    h(
      "li",
      { cls: run.id === focused()?.id ? "run is-focus" : "run", dataset: { state: run.state } },
      h(
        "label",
        { cls: "tick", title: "Draw its curves" },
        h("input", {
          type: "checkbox",
          checked: isShown(run),
          dataset: { key: `tick-${run.id}` },
          "aria-label": `Draw the curves of ${run.name}`,
          onchange: () => onToggle(run.id),
        }),
        h("i", { cls: "swatch", style: { background: swatchOf(place) } }),
      ),
      h(
        "button",
        {
          type: "button",
          cls: "pick",
          dataset: { key: `pick-${run.id}` },
          "aria-current": run.id === focused()?.id ? "true" : "false",
          onclick: () => onFocus(run.id),
        },
        h("span", { cls: "name", title: run.uri }, run.name),
        pill(run),
        h(
          "span",
          { cls: "bar", role: "img", "aria-label": progress(run) },
          h("span", { style: { width: `${share(run)}%` } }),
        ),
        h("span", { cls: "facts" }, facts(run)),
      ),
    );

  return () =>
    redraw(
      server.runs.map((run) => [run.id, run.name, run.state, facts(run), share(run).toFixed(1), isShown(run)]),
      choices.focus,
      document.documentElement.dataset.mode,
    );
}

export function pill(run) {
  return h(
    "span",
    { cls: `pill is-${STATES[run.state] ?? "waiting"}` },
    run.state === "killed" ? "no sign of life" : (STATES[run.state] ?? "unknown"),
  );
}

export const share = (run) =>
  run.num_steps ? Math.min(100, (100 * run.step) / run.num_steps) : run.state === "finished" ? 100 : 0;
const progress = (run) =>
  run.serving ? run.serving.text :
  run.num_steps ? `${share(run).toFixed(0)} % of ${count(run.num_steps)} steps` : `${count(run.step)} steps`;

function facts(run) {
  if (run.serving) return run.serving.text;
  const steps = run.num_steps ? `${count(run.step)} / ${count(run.num_steps)}` : `step ${count(run.step)}`;
  const parts = [steps];
  if (run.state === "killed") parts.push(`last ${clock(run.last_s)}`);
  else if (run.state === "running" && run.seconds_left !== null) parts.push(`${duration(run.seconds_left)} left`);
  else if (run.eval_auc !== null) parts.unshift(`held-out AUC ${figure(run.eval_auc)}`); // before what may be cut off
  else if (run.loss !== null) parts.unshift(`training loss ${figure(run.loss)}`);
  return parts.join(" · ");
}
