// What the person has chosen, and what the server has told. One object; whoever changes it says so.

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

export const told = {
  runs: [],
  nowS: 0,
  isLive: true,
  trouble: "",
  curves: new Map(), // id: what the server told of its curves, for the whole run
  near: new Map(), // the same of the part that is zoomed to
  detail: null,
  charts: null,
  diagnosis: null,
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
export const focused = () => told.runs.find((run) => run.id === choices.focus) ?? told.runs[0] ?? null;
export const placeOfRun = (id) =>
  Math.max(
    0,
    told.runs.findIndex((run) => run.id === id),
  );
