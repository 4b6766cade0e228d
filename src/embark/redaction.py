"""Secrets in text that is shown or stored: found by the form they have, and by the values that this process's
environment holds. What is cut out is shown as `…`."""

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import quote

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
        (r"(https?://[^\s?\"']{1,2000})\?[^\s\"']*", r"\1", "://"),
        (r"(?i)\b(x-(?:amz|goog|ms)-[\w-]++[:=]\s{0,3})[^&\s\"']+", rf"\1{CUT}", "x-amz", "x-goog", "x-ms"),
        (r"\bA(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}\b", CUT, "akia", "asia", "abia", "acca"),
        (r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})", CUT, "gh", "_pat_", "glpat-"),
        (r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,}|sk-(?:ant|proj|svcacct)-[\w-]{20,}|xox[abeoprs]-[\w-]{10,})",
         CUT, "hf_", "sk-", "xox"),
        (r"\b(?:AIza[\w-]{35}|ya29\.[\w.-]{20,}|GOCSPX-[\w-]{20,})", CUT, "aiza", "ya29", "gocspx"),
        (r"\b(?:dckr_pat_[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})", CUT, "dckr_pat_", "npm_", "pypi-"),
        (r"\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?", CUT, "eyj"),
    ))
_NAME_HINTS = ("pass", "pwd", "secret", "key", "token", "cred", "conn", "sas", "sig")


def redact(text: str) -> str:
    """`text` without secrets."""
    for value in _environment_values():
        text = text.replace(value, CUT)
    lower = text.lower()
    for pattern, kept, hints in _FORMS:
        if any(hint in lower for hint in hints):
            text = pattern.sub(kept, text)
    return "".join(_without_named(text)) if any(hint in lower for hint in _NAME_HINTS) else text


def _without_named(text: str) -> Iterator[str]:
    """`NAME=value`, `"name": "value"`, `name: value` and `--name value`, the value cut out where the name says so."""
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
    """In prose a word stands there: `invalid token: ExpiredToken`. A password may be a word, and then ends its line."""
    is_random = len(value) >= 20 or any(char.isdigit() for char in value)
    return is_random or ("pass" in name.lower() and not rest.strip(" \t\r,}").partition("\n")[0])


def _environment_values() -> tuple[str, ...]:
    held = (os.environ.get(name, "") for name in list(os.environ) if _is_of_a_secret(name))
    return _with_quoted(tuple(sorted((value for value in held if len(value) >= 6), key=len, reverse=True)))


@lru_cache(maxsize=4096)
def _is_of_a_secret(variable: str) -> bool:
    return _ENVIRONMENT.search(variable.upper()) is not None


@lru_cache(maxsize=1)
def _with_quoted(values: tuple[str, ...]) -> tuple[str, ...]:
    """Each also as it stands in an address."""
    return tuple(form for value in values for form in dict.fromkeys((value, quote(value, safe=""))))
