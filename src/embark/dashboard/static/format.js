// Figures as people read them.

const NOTHING = "–";

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function scaled(value, units, base = 1000) {
  let at = 0;
  let left = value;
  while (Math.abs(left) >= base * 0.9995 && at < units.length - 1) {
    left /= base;
    at += 1;
  }
  const digits = at === 0 && Number.isInteger(left) ? 0 : Math.abs(left) < 9.995 ? 2 : Math.abs(left) < 99.95 ? 1 : 0;
  return `${left.toFixed(digits)}${units[at]}`;
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NOTHING);
export const short = (value) => (known(value) ? scaled(value, ["", " k", " M", " B", " T"]) : NOTHING);
export const bytes = (value) => (known(value) ? scaled(value, [" B", " kB", " MB", " GB", " TB", " PB"]) : NOTHING);
export const percent = (value) => (known(value) ? `${value.toFixed(value < 10 ? 1 : 0)} %` : NOTHING);

export function figure(value, digits = 4) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toPrecision(3);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : digits);
}

// As formatting.format_usd: $0.032, $4.10, $1,234.
export function usd(value) {
  if (!known(value)) return NOTHING;
  if (value > 0 && value < 0.001) return "< $0.001";
  if (value > 0 && value < 0.0995) return `$${Number(value.toPrecision(2))}`;
  const digits = Math.abs(value) < 1000 ? 2 : 0;
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

export function seconds(value) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  if (size < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (size < 60) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  if (!known(value)) return NOTHING;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400)
    return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${String(Math.floor((whole % 86400) / 3600)).padStart(2, "0")} h`;
}

export function clock(unixSeconds) {
  if (!known(unixSeconds)) return NOTHING;
  const when = new Date(unixSeconds * 1000);
  const isToday = when.toDateString() === new Date().toDateString();
  const time = when.toLocaleTimeString("en-GB");
  return isToday
    ? time
    : `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })} ${time}`;
}

// By the unit that the server names.
export function inUnit(unit) {
  return (
    {
      s: seconds,
      B: bytes,
      "B/s": (v) => `${bytes(v)}/s`,
      "%": percent,
      "samples/s": (v) => `${short(v)}/s`,
      W: (v) => (known(v) ? `${v.toFixed(0)} W` : NOTHING),
      "°C": (v) => (known(v) ? `${v.toFixed(0)} °C` : NOTHING),
    }[unit] ?? figure
  );
}
