// Colours that stay apart in both modes and for colour-blind eyes (after Okabe and Ito).
// Dashes tell the ninth from the first.

const NUM_COLOURS = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

export function colourOf(place) {
  return token(`--line-${(place % NUM_COLOURS) + 1}`);
}

export function dashOf(place) {
  return DASHES[Math.floor(place / NUM_COLOURS) % DASHES.length];
}

// In the list, stripes tell what dashes tell in a chart.
export function swatchOf(place) {
  const [on, off] = dashOf(place);
  const colour = colourOf(place);
  if (!on) return colour;
  return `repeating-linear-gradient(135deg, ${colour} 0 ${on / 2}px, transparent ${on / 2}px ${(on + off) / 2}px)`;
}

let tokens = new Map();

export function token(name) {
  if (!tokens.has(name)) tokens.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return tokens.get(name);
}

export function forgetTokens() {
  tokens = new Map();
}
