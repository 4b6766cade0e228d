// Charts of one run that are not laid over other runs': dynamic tables; phases over time, ranks, GPUs, network, disk, CPU.

import { Chart } from "./chart.js";
import { empty, fill, h } from "./dom.js";
import { inUnit } from "./format.js";
import { colourOf } from "./palette.js";
import { phaseColour } from "./step_panel.js";
import { choices } from "./state.js";

// The panel of charts whose keys `wants` accepts; without any it says `none`, or nothing at all.
export function chartsPanel(root, { title, wants, none }) {
  const grid = h("div", { cls: "grid" });
  fill(root, h("h2", { cls: "over-grid" }, title), grid);
  const made = new Map();
  let zoom = null;
  const setZoom = (range) => {
    zoom = range;
    made.forEach((chart) => chart.show(chart.given, { by: choices.by, zoom }));
  };

  return (every) => {
    const charts = every?.filter((data) => wants(data.key));
    root.hidden = !charts?.length && !none;
    if (!charts?.length) {
      fill(grid, none ? empty(none) : []);
      return;
    }
    for (const data of charts) {
      if (!made.has(data.key)) {
        made.set(
          data.key,
          new Chart({
            title: data.title,
            format: inUnit(data.unit),
            height: 150,
            isStacked: data.key === "phases",
            fromZero: data.key !== "temperature_c",
            onZoom: setZoom,
            onHover: (x) => made.forEach((other, key) => key !== data.key && other.hover(x)),
          }),
        );
      }
      const chart = made.get(data.key);
      chart.root.dataset.chart = data.key;
      const lines = data.lines.map((line, place) => ({
        ...line,
        colour: data.key === "phases" ? phaseColour(line.label.replaceAll("-", "_")) : colourOf(place),
      }));
      chart.given = lines;
      const last = lines.length === 1 ? lines[0].y.findLast((value) => value !== null) : undefined;
      chart.show(lines, { by: choices.by, zoom, value: last === undefined ? "" : inUnit(data.unit)(last) });
      chart.showLegend(
        data.num_lines > lines.length
          ? lines.map((line) => ({ ...line, label: `${line.label} of ${data.num_lines}` }))
          : lines,
      );
    }
    const there = charts.map((data) => made.get(data.key).root);
    if (there.length !== grid.children.length || there.some((root, at) => grid.children[at] !== root))
      fill(grid, there);
  };
}
