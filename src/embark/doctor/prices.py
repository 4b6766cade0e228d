"""Whether the catalog's prices are of today."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from embark.catalog import load_catalog
from embark.catalog.machine import Catalog
from embark.doctor.check import Check, judged
from embark.errors import EmbarkError

FRESH_DAYS = 120
"""Clouds change what they ask on demand a few times a year; spot prices move by the hour, whatever the date."""


def prices(today: datetime.date, catalog: Catalog | None = None) -> Iterator[Check]:
    try:
        rows = sorted(price.origin.date for price in (catalog or load_catalog()).prices.values())
    except EmbarkError as error:
        yield Check("prices", "wrong", error.what.splitlines()[0], "a catalog that can be read",
                    error.fix or "embark catalog refresh --forget goes back to the prices that Embark came with")
        return
    if not rows:
        yield Check("prices", "warning", "none", "some", "embark catalog refresh FILE takes a price file in")
        return
    usual = rows[len(rows) // 2]
    age_days = (today - _date(usual)).days
    found = f"{len(rows):,} of {usual}, {age_days} days old; the newest of {rows[-1]}"
    yield judged("prices", age_days <= FRESH_DAYS, found, f"at most {FRESH_DAYS} days old",
                 "embark catalog refresh FILE takes newer ones in; embark doctor --cloud asks the account itself",
                 bad="warning")


def _date(text: str) -> datetime.date:
    """A day, or a month's first."""
    return datetime.date.fromisoformat(text if len(text) > 7 else f"{text}-01")
