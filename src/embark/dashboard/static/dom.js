// Elements from data. Text becomes text nodes and nothing else, so nothing that a run says can become markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "rect", "line", "circle"]);

export function h(tag, props = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (name === "vars") for (const [key, held] of Object.entries(value)) made.style.setProperty(key, held);
    else if (name === "dataset") Object.assign(made.dataset, value);
    else made.setAttribute(name === "cls" ? "class" : name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function fill(parent, ...children) {
  parent.replaceChildren(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
}

// Draws again only where what is shown has changed: focus, selection and scroll stay where they are.
export function onChange(draw) {
  let before;
  return (...values) => {
    const now = JSON.stringify(values);
    if (now === before) return;
    before = now;
    draw(...values);
  };
}

export function card(title, props = {}, ...children) {
  return h("section", { ...props, cls: `card ${props.cls ?? ""}` }, h("h2", {}, title), ...children);
}

export function empty(text) {
  return h("p", { cls: "empty" }, text);
}
