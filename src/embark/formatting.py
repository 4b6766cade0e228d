"""Numbers, sizes, durations, dollars and plurals for people, and other people's text made safe to print."""

import math
import unicodedata
from typing import Any

MISSING = "–"  # Shown where a value is missing.

_STEPS = ("", " k", " M", " B", " T")
_SIZES = (" B", " kB", " MB", " GB", " TB", " PB")
_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_ASCII = str.maketrans({"…": "...", "×": "x", "·": "-", "–": "-", "●": "o", "→": "->", "⠒": "-",
                        **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True))})


def to_float(value: Any) -> float | None:
    """A value as a float, NaN included; `None` where it is no number."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def to_finite(value: Any) -> float | None:
    """A value as a float that can be drawn or counted with, else `None`."""
    read = to_float(value)
    return read if read is not None and math.isfinite(read) else None


def format_count(value: Any) -> str:
    """`12,400`"""
    read = to_finite(value)
    return MISSING if read is None else f"{round(read):,}"


def format_float(value: Any, digits: int = 4) -> str:
    """`0.7912`; a NaN says so."""
    read = to_float(value)
    if read is None:
        return MISSING
    if math.isnan(read):
        return "NaN"
    return f"{read:.{digits}f}" if abs(read) < 10_000 else f"{read:.3g}"


def format_si(value: Any) -> str:
    """`41.2 k`, `166 M`: three digits."""
    return _scaled(value, _STEPS)


def format_rate(value: Any) -> str:
    """`41.2 k samples/s`"""
    return f"{format_si(value)} samples/s"


def format_bytes(num_bytes: Any) -> str:
    """`666 MB`, in powers of ten."""
    return _scaled(num_bytes, _SIZES)


def format_duration(seconds: Any) -> str:
    """`0.31 s`, `12.4 s`, `5 min 12 s`, `3 h 05 min`, `2 d 03 h`"""
    read = to_finite(seconds)
    if read is None:
        return MISSING
    if read < 59.95:
        return f"{read:.1f} s" if read >= 0.995 else f"{read:.2f} s"
    whole = round(read)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def format_step_time(seconds: Any) -> str:
    """`5.10 ms`, `0.171 ms`: three digits; from a second on as a duration."""
    read = to_finite(seconds)
    if read is None or read >= 1:
        return format_duration(read)
    return f"{1e3 * read:#.3g} ms".replace(". ", " ")


def format_usd(value: Any) -> str:
    """`$0.032`, `$4.10`, `$1,234`"""
    read = to_finite(value)
    if read is None:
        return MISSING
    if 0 < read < 0.001:
        return "< $0.001"
    if 0 < read < 0.0995:
        return f"${read:.2g}"
    return f"${read:,.2f}" if abs(read) < 1000 else f"${read:,.0f}"


def format_clock(seconds: Any) -> str:
    """`2:05`, `1:02:05`: fixed width, for a countdown."""
    read = to_finite(seconds)
    if read is None:
        return "-:--"
    whole = max(0, round(read))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def pluralize(num: int, noun: str) -> str:
    """`1 rank`, `8 ranks`"""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def strip_control_chars(text: object) -> str:
    """Text from outside, without what would move the cursor, color the screen or reverse its direction."""
    return "".join(map(_visible, str(text).replace("\r\n", "\n")))


def to_one_line(text: object) -> str:
    """`strip_control_chars` on one line."""
    return " ".join(strip_control_chars(text).split())


def to_encoding(text: str, encoding: str) -> str:
    """Text in characters that the stream can encode."""
    if encoding.lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)


def _visible(char: str) -> str:
    if char in "\n\t":
        return char
    category = unicodedata.category(char)
    if category == "Cs":
        return "\ufffd"
    return "" if category == "Cc" or char in _BIDI else char


def _scaled(value: Any, units: tuple[str, ...]) -> str:
    read = to_finite(value)
    if read is None:
        return MISSING
    unit = 0
    while abs(read) >= 999.5 and unit < len(units) - 1:
        read /= 1000
        unit += 1
    if unit == 0:
        whole = read == round(read) or abs(read) >= 99.95
        return (f"{read:.0f}" if whole else f"{read:.1f}") + units[0]
    digits = 2 if abs(read) < 9.995 else 1 if abs(read) < 99.95 else 0
    return f"{read:,.{digits}f}{units[unit]}"
