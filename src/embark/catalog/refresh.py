"""Imports a newer price file: all of it is checked before anything changes, and only newer rows count."""

import csv
import datetime
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embark.catalog.load import OPTIONAL_PRICE_COLUMNS, PRICE_COLUMNS, clear_cache, merge_newest, read_prices
from embark.catalog.machine import Catalog, Price
from embark.errors import UserError
from embark.store import write_atomic

Places = Mapping[tuple[str, str], Price]


@dataclass(frozen=True, slots=True)
class PriceChange:
    """A price that is another now."""

    machine: str
    region: str
    old: Price | None  # None where the catalog had no price.
    new: Price


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """What importing a file changed."""

    path: Path  # Where imported prices are stored.
    changes: tuple[PriceChange, ...]
    num_same: int  # Rows that agree with the catalog.
    num_older: int  # Rows older than the catalog's; they are left out.


def refresh_prices(catalog: Catalog, file: Path, stored: Path, today: datetime.date) -> RefreshResult:
    """Import `file` into `stored`, the newest of every row that was ever imported. A mistake in it changes nothing."""
    new = read_prices(file, catalog.priced, fix="nothing was changed; fix the file and import it again")
    if not new:
        raise UserError(f"{file}: has no prices", fix="one row for each machine and region below the heading")
    late = sorted(price.origin.date for price in new.values() if price.origin.date > today.isoformat())
    if late:
        raise UserError(f"{file}: is dated {late[-1]}, and today is {today}",
                        fix="nothing was changed; a date to come would outlast every later price")
    changes, num_same, num_older = [], 0, 0
    for place, price in new.items():
        old = catalog.prices.get(place)
        if old is not None and price.origin.date < old.origin.date:
            num_older += 1
        elif old is not None and _figures(old) == _figures(price):
            num_same += 1
        else:
            changes.append(PriceChange(*place, old, price))
    before = read_prices(stored, catalog.priced) if stored.exists() else {}
    if changes or num_same:
        try:
            write_atomic(stored, _to_csv(merge_newest(before, new)))
        except OSError as error:
            raise UserError(f"{stored}: {error.strerror}", fix="XDG_DATA_HOME names another folder") from error
        clear_cache()
    return RefreshResult(stored, tuple(changes), num_same, num_older)


def _figures(price: Price) -> tuple[float | None, ...]:
    return (price.on_demand_usd_per_hour, price.spot_usd_per_hour, price.commit_1y_discount, price.commit_3y_discount,
            price.block_usd_per_hour)


def _to_csv(prices: Places) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*PRICE_COLUMNS, *OPTIONAL_PRICE_COLUMNS))
    for _, price in sorted(prices.items()):
        *figures, block = ("" if figure is None else repr(figure) for figure in _figures(price))
        origin = price.origin
        writer.writerow([price.machine, price.region, *figures, origin.source, origin.date, origin.confidence, block])
    return out.getvalue()
