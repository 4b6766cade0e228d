// Charts of one run that are not laid over other runs': phases over time, ranks, GPUs, network, disk, CPU.

import { Chart } from "./chart.js";
import { empty, fill, h } from "./dom.js";
import { inUnit } from "./format.js";
import { colourOf } from "./palette.js";
import { phaseColour } from "./step_panel.js";
import { choices } from "./state.js";

export function machinePanel(root) {
  const grid = h("div", { cls: "grid" });
  fill(root, h("h2", { cls: "over-grid" }, "Machines"), grid);
  const made = new Map();
  let zoom = null;
  const setZoom = (range) => {
    zoom = range;
    made.forEach((chart) => chart.show(chart.given, { by: choices.by, zoom }));
  };

  return (charts) => {
    if (!charts?.length) {
      fill(grid, empty("No measurements of GPUs, hosts or ranks in this run: ranks and phases events carry them."));
      return;
    }
    for (const told of charts) {
      if (!made.has(told.key)) {
        made.set(
          told.key,
          new Chart({
            title: told.title,
            format: inUnit(told.unit),
            height: 150,
            isStacked: told.key === "phases",
            fromZero: told.key !== "temperature_c",
            onZoom: setZoom,
            onHover: (x) => made.forEach((other, key) => key !== told.key && other.hover(x)),
          }),
        );
      }
      const chart = made.get(told.key);
      chart.root.dataset.chart = told.key;
      const lines = told.lines.map((line, place) => ({
        ...line,
        colour: told.key === "phases" ? phaseColour(line.label.replaceAll("-", "_")) : colourOf(place),
      }));
      chart.given = lines;
      const last = lines.length === 1 ? lines[0].y.findLast((value) => value !== null) : undefined;
      chart.show(lines, { by: choices.by, zoom, value: last === undefined ? "" : inUnit(told.unit)(last) });
      chart.showLegend(
        told.num_lines > lines.length
          ? lines.map((line) => ({ ...line, label: `${line.label} of ${told.num_lines}` }))
          : lines,
      );
    }
    const there = charts.map((told) => made.get(told.key).root);
    if (there.length !== grid.children.length || there.some((root, at) => grid.children[at] !== root))
      fill(grid, there);
  };
}
