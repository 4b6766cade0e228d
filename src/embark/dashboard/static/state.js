// What the person has chosen, and what the server has sent. One object; code that changes it redraws.

const KEPT = "embark-watch";
const CHOICES = { by: "step", smooth: 0.6, theme: "auto", hidden: [], picked: [], focus: null };
const MAX_DRAWN = 12; // of many runs, the first; others are drawn when they are ticked

function remembered() {
  try {
    return { ...CHOICES, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return { ...CHOICES };
  }
}

export const choices = remembered();

export const server = {
  runs: [],
  nowS: 0,
  isLive: true,
  error: "",
  curves: new Map(), // id: its curves, for the complete run
  near: new Map(), // the same of the part that is zoomed to
  detail: null,
  charts: null,
  diagnosis: null,
  traffic: null,
};

export const view = { zoom: null };

export function choose(changes) {
  Object.assign(choices, changes);
  try {
    localStorage.setItem(KEPT, JSON.stringify(choices));
  } catch {
    // a browser that keeps nothing still shows everything
  }
}

export const isShown = ({ id }) =>
  choices.picked.includes(id) || (!choices.hidden.includes(id) && placeOfRun(id) < MAX_DRAWN);
export const focused = () => server.runs.find((run) => run.id === choices.focus) ?? server.runs[0] ?? null;
export const placeOfRun = (id) =>
  Math.max(
    0,
    server.runs.findIndex((run) => run.id === id),
  );
