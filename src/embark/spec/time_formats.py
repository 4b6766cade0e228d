"""How dates and times are written, in the directives of Python's `strptime`, and the names of time zones."""

import re
from zoneinfo import ZoneInfo

_DIGITS = {"Y": "[0-9]{4}", "y": "[0-9]{2}", "m": "1[0-2]|0[1-9]|[1-9]", "d": "3[01]|[12][0-9]|0[1-9]|[1-9]",
           "H": "2[0-3]|[01][0-9]|[0-9]", "I": "1[0-2]|0[1-9]|[1-9]", "M": "[0-5][0-9]|[0-9]", "S": "[0-5][0-9]|[0-9]"}
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
          "december")
_OTHERS = {
    "f": "[0-9]{1,6}", "p": "(?i:am|pm)", "z": "Z|[+-][0-9]{2}:?[0-9]{2}",
    "b": f"(?i:{'|'.join(name[:3] for name in MONTHS)})", "B": f"(?i:{'|'.join(MONTHS)})",
    "a": "[A-Za-z]{3}", "A": "[A-Za-z]+"
}
PACKED = re.compile("(%[YymdHMS])+")


def time_pattern(format: str) -> str:
    """Return the regular expression of a format, with a group for each directive; a ValueError says what is wrong.
    It means the same to Python and to pyarrow."""
    found, seen, at = "", set[str](), 0
    is_packed = PACKED.fullmatch(format)
    while at < len(format):
        letter, directive = format[at], format[at + 1 : at + 2]
        if letter != "%" or directive == "%":
            found += " +" if letter == " " else re.escape(letter)
            at += 1 if letter != "%" else 2
            continue
        if directive not in _DIGITS and directive not in _OTHERS:
            raise ValueError(f"%{directive} is no directive that is read; these are: "
                             f"{' '.join(f'%{name}' for name in (*_DIGITS, *_OTHERS))}")
        if directive in seen:
            raise ValueError(f"%{directive} stands in it twice")
        seen.add(directive)
        one = (_DIGITS | _OTHERS)[directive]
        found += f"(?P<{directive}>{'[0-9]{2}' if is_packed and directive != 'Y' else one})"
        at += 2
    if not seen:
        raise ValueError('has no directive, such as in "%d.%m.%Y %H:%M"')
    return f"^{found}$"


def checked_format(format: str) -> str:
    """Check a format that a user wrote; empty: none."""
    return format and time_pattern(format) and format


def checked_zone(name: str) -> str:
    """Check the name of a time zone that a user wrote; empty: none."""
    try:
        return name and ZoneInfo(name).key
    except (ValueError, OSError, KeyError):
        raise ValueError('is no IANA time zone, such as "Europe/Berlin" or "America/New_York"') from None
