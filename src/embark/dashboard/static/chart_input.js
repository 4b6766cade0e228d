// How a chart is worked: by pointer, by touch, by keys.

const MIN_DRAG = 6;

export function listen(chart) {
  const { plot, root, options } = chart;
  let dragFrom = null;
  const placeOf = (event) => event.clientX - plot.getBoundingClientRect().left;

  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart.x) return;
    dragFrom = placeOf(event);
    plot.setPointerCapture(event.pointerId);
    say(chart, chart.x.invert(dragFrom));
  });
  plot.addEventListener("pointermove", (event) => {
    if (!chart.x) return;
    const at = placeOf(event);
    if (dragFrom !== null && Math.abs(at - dragFrom) > MIN_DRAG) {
      chart.band = [dragFrom, at];
      chart.drawOver();
      return;
    }
    say(chart, chart.x.invert(at));
  });
  plot.addEventListener("pointerup", () => {
    const band = chart.band;
    dragFrom = chart.band = null;
    if (band) zoomTo(chart, ...band.map(chart.x.invert).sort((a, b) => a - b));
    chart.drawOver();
  });
  plot.addEventListener("pointercancel", () => {
    dragFrom = chart.band = null;
    chart.drawOver();
  });
  // A finger leaves as soon as it is lifted; what it pointed at stays until it points elsewhere.
  plot.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hush(chart));
  document.addEventListener("pointerdown", (event) => root.contains(event.target) || !chart.isHovered || hush(chart));
  plot.addEventListener("dblclick", () => options.onZoom?.(null));
  root.addEventListener("blur", () => hush(chart));
  root.addEventListener("keydown", (event) => {
    if (event.target !== root || event.ctrlKey || event.metaKey || event.altKey || !chart.x) return;
    if (onKey(chart, event)) event.preventDefault();
  });
}

function onKey(chart, { key, shiftKey }) {
  const [low, high] = chart.xRange;
  const span = high - low;
  const at = chart.hoverX ?? (low + high) / 2;
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const way = key === "ArrowLeft" ? -1 : 1;
    if (shiftKey) zoomTo(chart, low + (way * span) / 4, high + (way * span) / 4);
    else say(chart, Math.min(high, Math.max(low, at + (way * span) / 50)));
  } else if (key === "+" || key === "=") zoomTo(chart, at - span / 4, at + span / 4);
  else if (key === "-") zoomTo(chart, at - span, at + span);
  else if (key === "0" || key === "Escape") chart.options.onZoom?.(null);
  else if (key === "l" && chart.log) chart.setLog(!chart.isLog);
  else return false;
  return true;
}

function zoomTo(chart, low, high) {
  if (high > low) chart.options.onZoom?.([low, high]);
}

function say(chart, x) {
  chart.isHovered = true;
  if (chart.options.onHover) chart.options.onHover(x);
  chart.hover(x);
}

function hush(chart) {
  chart.isHovered = false;
  if (chart.options.onHover) chart.options.onHover(null);
  chart.hoverX = 0;
  chart.hover(null);
}
