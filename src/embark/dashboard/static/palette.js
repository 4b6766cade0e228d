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

let tokens = new Map();

export function token(name) {
  if (!tokens.has(name)) tokens.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return tokens.get(name);
}

export function forgetTokens() {
  tokens = new Map();
}
