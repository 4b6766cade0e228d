// From numbers to places on the screen, and the round numbers to write beside an axis.

export function linear(low, high, from, to) {
  const span = high - low || 1;
  const at = (value) => from + ((value - low) / span) * (to - from);
  at.invert = (place) => low + ((place - from) / (to - from || 1)) * span;
  return at;
}

export function logarithmic(low, high, from, to) {
  const inner = linear(Math.log10(low), Math.log10(high), from, to);
  const at = (value) => inner(Math.log10(Math.max(value, Number.MIN_VALUE)));
  at.invert = (place) => 10 ** inner.invert(place);
  return at;
}

export function ticks(low, high, num) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, num);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((nice) => nice * power >= rough) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-12) && found.length < 50; at += 1)
    found.push(at * step);
  return found;
}

// Fewer than `num` where their labels would repeat: a constant curve has one.
export function labelledTicks(low, high, num, label) {
  for (let most = num; ; most -= 1) {
    const found = ticks(low, high, most).map((value) => [value, label(value)]);
    if (new Set(found.map(([, text]) => text)).size === found.length) return found;
    if (most <= 1) return found.slice(0, 1);
  }
}

export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const lead of [1, 2, 5]) {
      const value = lead * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  const whole = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  if (found.length > 8 && whole.length > 1) return whole;
  return found.length > 1 ? found : ticks(low, high, 4);
}

const TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

export function timeTicks(low, high, num) {
  const rough = (high - low) / Math.max(1, num);
  const step = TIMES.find((nice) => nice >= rough);
  if (step === undefined || rough < 0.5) return ticks(low, high, num);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high && found.length < 50; at += step) found.push(at);
  return found;
}

export function timeLabel(value) {
  const whole = Math.round(value);
  const [d, hh, m, s] = [
    Math.floor(whole / 86400),
    Math.floor((whole % 86400) / 3600),
    Math.floor((whole % 3600) / 60),
    whole % 60,
  ];
  if (whole === 0) return "0";
  if (value < 10 && value !== whole) return `${value.toFixed(1)}s`;
  return [d && `${d}d`, hh && `${hh}h`, m && `${m}m`, s && `${s}s`].filter(Boolean).slice(0, 2).join(" ");
}

// The first place in `xs` that is not before `x`.
export function placeOf(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function nearest(xs, x) {
  const at = placeOf(xs, x);
  if (at === 0) return 0;
  if (at === xs.length) return at - 1;
  return x - xs[at - 1] <= xs[at] - x ? at - 1 : at;
}

// A running mean that forgets, corrected for its start; `weight` is what is kept of the past, 0 to 1.
export function smoothed(ys, weight) {
  if (!weight) return ys;
  let [sum, share] = [0, 0];
  return ys.map((y) => {
    if (y === null) return null;
    sum = sum * weight + y * (1 - weight);
    share = share * weight + (1 - weight);
    return sum / share;
  });
}
