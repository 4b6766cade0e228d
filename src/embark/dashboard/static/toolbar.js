// What holds for all charts: by step or by time, how smooth, the zoom, and light or dark.

import { fill, h, onChange } from "./dom.js";
import { forgetTokens } from "./palette.js";
import { choices, choose, server, view } from "./state.js";

const THEMES = ["auto", "light", "dark"];

export function toolbar(root, { onChange: changed, onSmooth, onBy, onReset }) {
  const live = h("span", { cls: "live", role: "status" });
  const by = ["step", "time"].map((name) =>
    h("button", { type: "button", cls: "chip", dataset: { by: name }, onclick: () => onBy(name) }, `by ${name}`),
  );
  const amount = h("output", {});
  const smooth = h("input", {
    type: "range",
    min: "0",
    max: "0.99",
    step: "0.01",
    value: String(choices.smooth),
    "aria-label": "Smoothing",
    oninput: () => {
      choose({ smooth: Number(smooth.value) });
      onSmooth();
    },
  });
  const reset = h("button", { type: "button", cls: "chip is-strong", hidden: true, onclick: onReset }, "show all");
  const theme = h("button", {
    type: "button",
    cls: "chip",
    onclick: () => {
      choose({ theme: THEMES[(THEMES.indexOf(choices.theme) + 1) % THEMES.length] });
      changed();
    },
  });
  fill(
    root,
    live,
    reset,
    h("span", { cls: "group", role: "group", "aria-label": "Draw by" }, by),
    h("label", { cls: "smooth" }, "smooth", smooth, amount),
    theme,
  );
  const isDarkOutside = matchMedia("(prefers-color-scheme: dark)");
  isDarkOutside.addEventListener("change", () => changed());
  const mode = () => (choices.theme === "auto" ? (isDarkOutside.matches ? "dark" : "light") : choices.theme);

  const draw = onChange((choice, isLive, error, isZoomed) => {
    document.documentElement.dataset.mode = choice.mode;
    forgetTokens();
    fill(
      live,
      h("i", { cls: isLive && !error ? "dot" : "dot is-bad", "aria-hidden": "true" }),
      isLive ? (error ? `live, but: ${error}` : "live") : "no connection; trying again",
    );
    by.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.by === choice.by)));
    amount.textContent = choice.smooth ? choice.smooth.toFixed(2) : "off";
    reset.hidden = !isZoomed;
    theme.textContent = `${choice.theme} colours`;
    theme.setAttribute("aria-label", `Colours: ${choice.theme}. Press to change.`);
  });
  return () =>
    draw(
      { theme: choices.theme, mode: mode(), by: choices.by, smooth: choices.smooth },
      server.isLive,
      server.error,
      view.zoom !== null,
    );
}
