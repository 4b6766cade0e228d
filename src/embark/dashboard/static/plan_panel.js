// The sharding plan as a picture: a bar a rank, a piece of it for each table that it holds.

import { card, empty, fill, h, onChange } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { colourOf } from "./palette.js";

const MAX_RANKS = 64;
const MAX_PIECES = 40;
const MAX_ROWS = 60;

export function planPanel(root) {
  const body = h("div", {});
  fill(root, card("Sharding plan", { cls: "plan" }, body));
  const draw = onChange((plan) => {
    if (!plan) {
      fill(body, empty("No plan yet: it comes when the tables are placed, before the first step."));
      return;
    }
    const ranks = plan.per_rank.slice(0, MAX_RANKS);
    const held = ranks.map(({ rank, bytes: total }) => ({ rank, total, pieces: piecesOf(plan.tables, rank) }));
    const most = Math.max(...held.map((one) => one.total), 1);
    const light = (name) =>
      body
        .querySelectorAll("[data-table]")
        .forEach((made) => made.classList.toggle("is-dim", name !== null && made.dataset.table !== name));
    fill(
      body,
      h("p", { cls: "say" }, sentence(plan, held)),
      h(
        "div",
        { cls: "holders" },
        held.map((one) =>
          h(
            "div",
            { cls: "holder" },
            h("span", { cls: "name" }, `rank ${one.rank}`),
            h(
              "span",
              { cls: "bar" },
              one.pieces.map((piece) =>
                h("span", {
                  cls: "piece",
                  dataset: { table: piece.table },
                  title: `${piece.table}: ${bytes(piece.bytes)} of ${bytes(piece.whole)}, ${piece.sharding}`,
                  style: { width: `${(100 * piece.bytes) / most}%`, background: piece.colour },
                  onpointerenter: () => light(piece.table),
                  onpointerleave: () => light(null),
                }),
              ),
            ),
            h("span", { cls: "num" }, bytes(one.total)),
            gauge(plan, one),
          ),
        ),
      ),
      plan.gpus.length
        ? h("p", { cls: "note" }, `On the right, how full each GPU is: tables, optimizer state, activations and all.`)
        : null,
      plan.per_rank.length > MAX_RANKS
        ? h("p", { cls: "note" }, `The first ${MAX_RANKS} of ${count(plan.per_rank.length)} ranks.`)
        : null,
      h(
        "div",
        { cls: "scroll", tabindex: "0", role: "region", "aria-label": "Tables" },
        h(
          "table",
          { cls: "plain" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["table", "rows", "dim", "sharding", "kernel", "ranks", "size"].map((name) =>
                h("th", { scope: "col" }, name),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            plan.tables.slice(0, MAX_ROWS).map((table, place) =>
              h(
                "tr",
                {
                  dataset: { table: table.table },
                  tabindex: "0",
                  onfocus: () => light(table.table),
                  onblur: () => light(null),
                  onpointerenter: () => light(table.table),
                  onpointerleave: () => light(null),
                },
                h(
                  "th",
                  { scope: "row" },
                  h("i", { cls: "swatch", style: { background: tableColour(place) } }),
                  table.table,
                ),
                h("td", {}, count(table.rows)),
                h("td", {}, count(table.dim)),
                h("td", { cls: "text" }, table.sharding.replaceAll("_", " ")),
                h("td", { cls: "text" }, table.kernel.replaceAll("_", " ")),
                h("td", { cls: "text" }, ranksText(table.ranks)),
                h("td", {}, bytes(table.bytes)),
              ),
            ),
          ),
        ),
      ),
      plan.num_tables > MAX_ROWS
        ? h("p", { cls: "note" }, `The largest ${MAX_ROWS} of ${count(plan.num_tables)} tables.`)
        : null,
    );
  });
  return (detail) => detail && draw(detail.plan);
}

// Ranks are on GPUs in the order of hosts and their GPUs.
function gauge(plan, one) {
  const gpu = plan.gpus[one.rank];
  const share = gpu
    ? (100 * gpu.used_bytes) / gpu.total_bytes
    : plan.gpu_bytes
      ? (100 * one.total) / plan.gpu_bytes
      : null;
  if (share === null) return null;
  const words = gpu
    ? `GPU of rank ${one.rank}: ${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)} in use`
    : `tables fill ${percent(share)} of the GPU`;
  return h(
    "span",
    { cls: share > 92 ? "gauge is-full" : "gauge", title: words, role: "img", "aria-label": words },
    h("span", { cls: "room" }, h("span", { style: { width: `${Math.min(100, share)}%` } })),
    percent(share),
  );
}

const tableColour = (place) => colourOf(place);

// A table that is split is held in like parts by each of its ranks.
function piecesOf(tables, rank) {
  const mine = tables
    .map((table, place) => ({
      ...table,
      whole: table.bytes,
      colour: tableColour(place),
      bytes: table.bytes / Math.max(1, table.ranks.length),
    }))
    .filter((table) => table.ranks.includes(rank));
  if (mine.length <= MAX_PIECES) return mine;
  const rest = mine.slice(MAX_PIECES);
  const sum = rest.reduce((total, table) => total + table.bytes, 0);
  return [
    ...mine.slice(0, MAX_PIECES),
    {
      table: `${rest.length} smaller tables`,
      bytes: sum,
      whole: sum,
      sharding: "together",
      colour: "var(--ink-faint)",
    },
  ];
}

function ranksText(ranks) {
  if (ranks.length < 4) return ranks.join(", ");
  const isRun = ranks.every((rank, at) => at === 0 || rank === ranks[at - 1] + 1);
  return isRun ? `${ranks[0]}–${ranks[ranks.length - 1]}` : `${ranks.length} ranks`;
}

function sentence(plan, held) {
  const total = plan.tables.reduce((sum, table) => sum + table.bytes, 0);
  const tables = `${count(plan.num_tables)} ${plan.num_tables === 1 ? "table" : "tables"}, ${bytes(total)}`;
  if (held.length < 2) return `${tables}, all on one rank.`;
  const sizes = held.map((one) => one.total);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const even =
    most > 0 && least / most > 0.9
      ? "evenly"
      : `unevenly: the fullest holds ${(most / Math.max(least, 1)).toFixed(1)} × the emptiest`;
  return `${tables}, over ${plan.per_rank.length} ranks, ${even}.`;
}
