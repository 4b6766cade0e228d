// When the run ran, and what happened: starts, checkpoints, evaluations, interruptions, the end.

import { card, empty, fill, h, onChange } from "./dom.js";
import { clock } from "./format.js";
import { timeLabel, timeTicks } from "./scale.js";

const KINDS = {
  save: ["checkpoint", "M0,-5L5,0L0,5L-5,0Z"],
  eval: ["evaluation", "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z"],
  interrupt: ["preempted or stopped", "M-4,-4L4,4M-4,4L4,-4"],
  change: ["changed on resume", "M0,-5L5,4H-5Z"],
  resume: ["resumed", "M-3.5,-5L5,0L-3.5,5Z"],
  start: ["start", "M-3.5,-5L5,0L-3.5,5Z"],
  error: ["error", "M-4,-4L4,4M-4,4L4,-4"],
  end: ["end", "M-4,-4H4V4H-4Z"],
};
const [WIDTH, LEFT, RIGHT, HEIGHT] = [1000, 14, 14, 40];

export function timelinePanel(root) {
  const body = h("div", { cls: "timeline" });
  const tip = h("p", { cls: "tell", "aria-live": "polite" });
  fill(root, card("Timeline", {}, body, tip));
  const draw = onChange((marks, spans, lost) => {
    if (!marks.length) {
      fill(body, empty("Nothing yet: checkpoints, evaluations and interruptions appear here as they happen."));
      tip.textContent = "";
      return;
    }
    const last = Math.max(...marks.map((mark) => mark.at_s), ...spans.map(([, end]) => end), 1);
    const width = Math.max(280, body.clientWidth || WIDTH);
    const place = (at) => LEFT + (at / last) * (width - LEFT - RIGHT);
    const say = (mark) => {
      tip.textContent = `${clock(mark.time_s)}, after ${timeLabel(mark.at_s)}: ${mark.text}`;
    };
    const svg = h(
      "svg",
      { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "Time line" },
      h("rect", { cls: "idle", x: LEFT, y: 16, width: width - LEFT - RIGHT, height: 8, rx: 4 }),
      spans.map(([begin, end]) =>
        h("rect", {
          cls: "ran",
          x: place(begin),
          y: 16,
          width: Math.max(2, place(end) - place(begin)),
          height: 8,
          rx: 4,
        }),
      ),
      drawn(marks).map((mark) =>
        h(
          "g",
          {
            cls: `mark is-${mark.kind}`,
            transform: `translate(${place(mark.at_s).toFixed(1)},20)`,
            tabindex: ["save", "eval"].includes(mark.kind) && marks.length > 40 ? null : "0",
            role: "img",
            "aria-label": mark.text,
            onpointerenter: () => say(mark),
            onfocus: () => say(mark),
          },
          h("circle", { r: 11, cls: "reach" }),
          h("path", { d: KINDS[mark.kind][1] }),
        ),
      ),
    );
    fill(
      body,
      svg,
      h(
        "div",
        { cls: "ticks", "aria-hidden": "true" },
        timeTicks(0, last, Math.floor(width / 110)).map((at) =>
          h("span", { style: { left: `${place(at)}px` } }, timeLabel(at)),
        ),
      ),
      legend(marks),
    );
    tip.textContent = lost ? `It was ${lost}.` : "";
  });
  return (detail) => {
    if (detail) draw(detail.marks, detail.spans, detail.money.lost, body.clientWidth);
  };
}

// What went wrong lies on top. An interruption says already that the run ended there, and going on that it started.
function drawn(marks) {
  const isBad = (mark) => mark.kind === "interrupt" || mark.kind === "error";
  const stops = new Set(marks.filter(isBad).map((mark) => mark.step));
  const isTold = (mark) => (mark.kind === "end" && stops.has(mark.step)) || (mark.kind === "start" && mark.step > 0);
  const there = marks.filter((mark) => KINDS[mark.kind] && mark.at_s >= 0 && !isTold(mark));
  return [...there.filter((mark) => !isBad(mark)), ...there.filter(isBad)];
}

function legend(events) {
  const marks = drawn(events);
  const numOf = (kind) => marks.filter((mark) => mark.kind === kind).length;
  const there = Object.entries(KINDS).filter(([kind]) => marks.some((mark) => mark.kind === kind));
  return h(
    "ul",
    { cls: "legend" },
    there.map(([kind, [name, path]]) =>
      h(
        "li",
        {},
        h(
          "svg",
          { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" },
          h("g", { cls: `mark is-${kind}` }, h("path", { d: path })),
        ),
        numOf(kind) > 1 ? `${name} × ${numOf(kind)}` : name,
      ),
    ),
  );
}
