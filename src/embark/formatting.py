"""Numbers, sizes, durations, dollars and plurals for people; text of others made safe to print, secrets cut out."""

import math
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

MISSING = "–"  # Shown where a value is missing.
MAX_AUC_ERROR = 1e-3  # A larger one is shown beside the AUC.

_STEPS = ("", " k", " M", " B", " T")
_SIZES = (" B", " kB", " MB", " GB", " TB", " PB")
_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_ASCII = str.maketrans({"…": "...", "×": "x", "·": "-", "–": "-", "●": "o", "→": "->", "⠒": "-",
                        **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True))})


def to_float(value: Any) -> float | None:
    """Return a value as a float, NaN included; `None` if it is no number."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def to_finite(value: Any) -> float | None:
    """Return a value as a float that can be drawn or counted with, else `None`."""
    read = to_float(value)
    return read if read is not None and math.isfinite(read) else None


def format_time(time_s: float | None) -> str:
    """Format a Unix time in the local time zone. A file may hold one that no calendar has."""
    try:
        return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S") if time_s else MISSING
    except (OverflowError, ValueError, OSError):
        return MISSING


def format_count(value: Any) -> str:
    """Format a count: `12,400`."""
    read = to_finite(value)
    return MISSING if read is None else f"{round(read):,}"


def format_float(value: Any, digits: int = 4) -> str:
    """Format a float: `0.7912`, or `NaN`."""
    read = to_float(value)
    if read is None:
        return MISSING
    if math.isnan(read):
        return "NaN"
    return f"{read:.{digits}f}" if abs(read) < 10_000 else f"{read:.3g}"


def format_auc(values: Mapping[str, Any]) -> str:
    """Format an AUC: `0.7912`; `0.5210 ±0.040` with the bound of its error if a training window's bins are too wide for
    the predictions; `–` where there is none, as of samples that are all positives."""
    error = to_float(values.get("auc_error"))
    bound = f" ±{error:.2g}" if error is not None and error >= MAX_AUC_ERROR else ""
    return format_float(to_finite(values.get("auc"))) + bound


def format_si(value: Any) -> str:
    """Format a number with three digits: `41.2 k`, `166 M`."""
    return _scaled(value, _STEPS)


def format_rate(value: Any) -> str:
    """Format a rate: `41.2 k samples/s`."""
    return f"{format_si(value)} samples/s"


def format_bytes(num_bytes: Any) -> str:
    """Format bytes in powers of ten: `666 MB`."""
    return _scaled(num_bytes, _SIZES)


def format_duration(seconds: Any) -> str:
    """Format a duration: `0.31 s`, `12.4 s`, `5 min 12 s`, `3 h 05 min`, `2 d 03 h`."""
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
    """Format a step's time with three digits: `5.10 ms`, `0.171 ms`; from a second on as a duration."""
    read = to_finite(seconds)
    if read is None or read >= 1:
        return format_duration(read)
    return f"{1e3 * read:#.3g} ms".replace(". ", " ")


def format_usd(value: Any) -> str:
    """Format dollars: `$0.032`, `$4.10`, `$1,234`."""
    read = to_finite(value)
    if read is None:
        return MISSING
    if 0 < read < 0.001:
        return "< $0.001"
    if 0 < read < 0.0995:
        return f"${read:.2g}"
    return f"${read:,.2f}" if abs(read) < 1000 else f"${read:,.0f}"


def format_clock(seconds: Any) -> str:
    """Format a countdown in fixed width: `2:05`, `1:02:05`."""
    read = to_finite(seconds)
    if read is None:
        return "-:--"
    whole = max(0, round(read))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def shortlist(names: Sequence[str], most: int) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def pluralize(num: int, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `8 ranks`."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def join_words(words: Sequence[str]) -> str:
    """Join words as prose does: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def strip_control_chars(text: object) -> str:
    """Text from outside, without what would move the cursor, color the screen or reverse its direction."""
    return "".join(map(_visible, str(text).replace("\r\n", "\n")))


def to_one_line(text: object) -> str:
    """Strip control characters, and put the text on one line."""
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


# Secrets are found by the form they have, and by the values that this process's environment holds.
CUT = "…"
_ENVIRONMENT = re.compile(r"SECRET|TOKEN|PASSW|_KEY|SAS|CREDENTIAL")
_KEYS = r"api|access|secret|account|private|shared|storage|master|signing|encryption|auth|client|subscription|ssh|app"
_SECRET_NAME = re.compile(  # `sort_key` is ordinary; a name in capitals is a variable of the environment
    rf"(?:.*[_.-])?(?i:pass|pwd|secret|(?:{_KEYS})[_-]?(?:access[_-]?)?key(?:[_-]?(?:id|data))?|token|credentials?|"
    r"connection[_-]?string|sas|sig|signature)|.*(?i:password|passwd|passphrase)|"
    r".*[a-z0-9](?:Secret|Token|Credentials?|(?:Access|Account|Private|Secret|Api)Key|ConnectionString)|"
    r"[A-Z][A-Z0-9_]*(?<!PUBLIC)_KEY")
_NAME = re.compile(r"(?<![\w.-])([\w.-]++)(\\{0,3}[\"']?\]?[ \t]{0,3}(?:=>?|:)[ \t]{0,3}|(?<=[a-z])[ \t]+)(?=\S)")
_QUOTED = re.compile(r"(\\{0,3}[\"'])(.*?)\1")
_BARE = re.compile(r"[^\s\"'&;]+")
_ORDINARY = re.compile(
    r"(?i:true|false|none|null|yes|no|auto|required|missing|invalid|incorrect|wrong|expired|empty|unset|set|not|is|are|"
    r"was|must|cannot|could|the|an?)\b|[$<{%(\[…]|~/|\./|\d{1,6}(?![\w-])")
# What to cut; the part to keep, as `re.sub` takes it; and words in lower case without one of which it cannot match.
_FORMS: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), kept, tuple(hints)) for pattern, kept, *hints in (
        (r"(?s)(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----).*?(-----END [A-Z0-9 ]{0,40}-----|\Z)",
         rf"\1{CUT}\2", "private key"),
        # A line of such a block that stands alone, as logs are shown.
        (r"(?m)^(?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)(?:[A-Za-z0-9+/]{64}|[A-Za-z0-9+/]{70}|[A-Za-z0-9+/]{76})$", CUT, ""),
        (r"(?i)\b((?:proxy-)?authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[a-z][\w-]*+\s+)?)[^\s\"',]+", rf"\1{CUT}",
         "authorization"),
        (r"(?i)\b((?:set-)?cookie[\"']?\s{0,3}:\s{0,3})[^\n\"']+", rf"\1{CUT}", "cookie"),
        (r"(?i)\b(bearer|sharedkey(?:lite)?|aws4-hmac-sha256)\s+(?=\S*[^a-z\s.,;:!?'\"])\S+", rf"\1 {CUT}",
         "bearer", "sharedkey", "hmac"),
        (r"\b([Bb]asic)\s+(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/]{8,}={0,2}", rf"\1 {CUT}", "basic"),
        (r"(://[^\s/:@\"']{0,200}:)[^\s/\"']{1,500}@", rf"\1{CUT}@", "://"),
        (r"(://)[^\s/:@\"']{20,500}@", rf"\1{CUT}@", "://"),
        (r"(?i)(nats://)[^\s/:@\"']{1,500}@", rf"\1{CUT}@", "nats://"),
        (r"(?i)\b((?:mysql|mariadb)\S*+[^\n|;]{0,500}?\s-p[\"']?)[^\s\"']+", rf"\1{CUT}", "mysql", "mariadb"),
        (r"(?i)\b((?:(?:sshpass|login)\s(?:[^\n|;]{0,500}?\s)??-p|redis-cli\s(?:[^\n|;]{0,500}?\s)??-a)[\s=]?[\"']?)[^\s\"']+",
         rf"\1{CUT}", "sshpass", "login", "redis-cli"),
        (r"(?i)\b(curl\s[^\n|;]{0,500}?(?<=\s)(?:-u|--user|--proxy-user)[\s=]?[\"']?[^\s:\"']{1,200}:)[^\s\"']+",
         rf"\1{CUT}", "curl"),
        (r"(https?://[^\s?\"']{1,2000})\?[^\s\"']*", r"\1", "://"),
        (r"(?i)\b(x-(?:amz|goog|ms)-[\w-]++[:=]\s{0,3})[^&\s\"']+", rf"\1{CUT}", "x-amz", "x-goog", "x-ms"),
        (r"\bA(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}\b", CUT, "akia", "asia", "abia", "acca"),
        (r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})", CUT, "gh", "_pat_", "glpat-"),
        (r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,}|sk-(?:ant|proj|svcacct)-[\w-]{20,}|xox[abeoprs]-[\w-]{10,})",
         CUT, "hf_", "sk-", "xox"),
        (r"\b(?:AIza[\w-]{35}|ya29\.[\w.-]{20,}|GOCSPX-[\w-]{20,})", CUT, "aiza", "ya29", "gocspx"),
        (r"\b(?:dckr_pat_[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})", CUT, "dckr_pat_", "npm_", "pypi-"),
        (r"\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?", CUT, "eyj")
    ))
_NAME_HINTS = ("pass", "pwd", "secret", "key", "token", "cred", "conn", "sas", "sig")


def redact(text: str) -> str:
    """`text` without secrets, whatever shows or stores it: each is replaced by `…`."""
    for value in _environment_values():
        text = text.replace(value, CUT)
    lower = text.lower()
    for pattern, kept, hints in _FORMS:
        if any(hint in lower for hint in hints):
            text = pattern.sub(kept, text)
    return "".join(_without_named(text)) if any(hint in lower for hint in _NAME_HINTS) else text


def _without_named(text: str) -> Iterator[str]:
    """Yield the text of `NAME=value`, `"name": "value"`, `name: value` and `--name value` without values that the name
    says are secret."""
    kept = 0
    for found in _NAME.finditer(text):
        begin = found.end()
        if found.start() < kept or not _SECRET_NAME.fullmatch(found[1]):
            continue
        if not found[2].strip() and not found[1].startswith("--"):
            continue
        quoted = _QUOTED.match(text, begin)
        value = quoted or _BARE.match(text, begin)
        if value is None:
            continue
        first, last = quoted.span(2) if quoted else value.span()
        if first == last or _ORDINARY.match(text, first, last):
            continue
        if not quoted and "=" not in found[2] and not _may_follow_a_colon(found[1], text[first:last], text[last:]):
            continue
        yield text[kept:first]
        yield CUT
        kept = last
    yield text[kept:]


def _may_follow_a_colon(name: str, value: str, rest: str) -> bool:
    """Return whether a value after a colon is a secret: in prose a word stands there, as in `invalid token:
    ExpiredToken`. A password may be a word, and then ends its line."""
    is_random = len(value) >= 20 or any(char.isdigit() for char in value)
    return is_random or ("pass" in name.lower() and not rest.strip(" \t\r,}").partition("\n")[0])


def _environment_values() -> tuple[str, ...]:
    held = (os.getenv(name, "") for name in list(os.environ) if _is_of_a_secret(name))
    return _with_quoted(tuple(sorted((value for value in held if len(value) >= 6), key=len, reverse=True)))


@lru_cache(maxsize=4096)
def _is_of_a_secret(variable: str) -> bool:
    return _ENVIRONMENT.search(variable.upper()) is not None


@lru_cache(maxsize=1)
def _with_quoted(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return each value, also as it is written in a URL."""
    return tuple(form for value in values for form in dict.fromkeys((value, quote(value, safe=""))))
