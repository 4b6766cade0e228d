"""What taking a price file in does, before anything is written."""

import datetime

import pytest

from embark.catalog.load import PRICE_COLUMNS, read_prices, refresh_prices
from embark.errors import MistakesError, UserError

HEAD = ",".join(PRICE_COLUMNS) + "\n"
TODAY = datetime.date(2026, 11, 15)
P4D = ("p4d.24xlarge", "us-west-2")


def price_file(folder, name, *rows):
    path = folder / name
    path.write_text(HEAD + "".join(row + "\n" for row in rows))
    return path


def test_a_change_holds_the_old_price_and_the_new(catalog, tmp_path):
    file = price_file(tmp_path, "new.csv", "p4d.24xlarge,us-west-2,20,9,0.1,0.2,x,2026-11-01,read",
                      "a4x-highgpu-4g,us-central1,55.5,,,,x,2026-11,documented")
    done = refresh_prices(catalog, file, tmp_path / "stored.csv", TODAY)
    first, second = done.changes
    assert (first.old, first.new.on_demand_usd_per_hour) == (catalog.prices[P4D], 20)
    assert second.old is None
    assert (done.num_same, done.num_older) == (0, 0)


def test_what_is_stored_reads_back_the_same(catalog, tmp_path):
    file = price_file(tmp_path, "new.csv", 'p4d.24xlarge,us-west-2,0.1,,,0.333333333,"a, ""b""",2026-11-01,read')
    retained = tmp_path / "stored.csv"
    refresh_prices(catalog, file, retained, TODAY)
    assert read_prices(retained, catalog.machines) == read_prices(file, catalog.machines)


def test_the_price_of_a_block_may_come_too_and_is_stored(catalog, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text(HEAD.rstrip() + ",block_usd_per_hour\np5e.48xlarge,us-east-2,,,,,x,2026-11-01,read,39.8\n")
    retained = tmp_path / "stored.csv"
    refresh_prices(catalog, file, retained, TODAY)
    assert read_prices(retained, catalog.machines)["p5e.48xlarge", "us-east-2"].block_usd_per_hour == 39.8


def test_rows_that_are_older_or_the_same_are_counted_and_change_nothing(catalog, tmp_path):
    have = catalog.prices[P4D]
    same = f"p4d.24xlarge,us-west-2,{have.on_demand_usd_per_hour},{have.spot_usd_per_hour},,,x,2026-11,read"
    file = price_file(tmp_path, "new.csv", same, "p4d.24xlarge,us-east-1,1,,,,x,2026-08-21,read")
    done = refresh_prices(catalog, file, tmp_path / "stored.csv", TODAY)
    assert (done.changes, done.num_same, done.num_older) == ((), 1, 1)


def test_a_stored_row_that_is_newer_stays(catalog, tmp_path):
    stored = price_file(tmp_path, "stored.csv", "p4d.24xlarge,us-west-2,19,,,,x,2026-11-10,read")
    file = price_file(tmp_path, "new.csv", "p4d.24xlarge,us-west-2,18,,,,x,2026-11-09,read")
    refresh_prices(catalog, file, stored, TODAY)
    assert read_prices(stored, catalog.machines)[P4D].on_demand_usd_per_hour == 19


def test_a_date_to_come_is_refused(catalog, tmp_path):
    file = price_file(tmp_path, "new.csv", "p4d.24xlarge,us-west-2,18,,,,x,2026-12,read")
    with pytest.raises(UserError, match="is dated 2026-12, and today is 2026-11-15"):
        refresh_prices(catalog, file, tmp_path / "stored.csv", TODAY)


def test_every_mistake_of_a_file_is_reported_with_its_line(catalog, tmp_path):
    file = price_file(tmp_path, "new.csv", "p4d.24xlarge,us-west-2,x,,,,x,2026-11,read", "p9,r,1,,,,x,2026-11,read")
    with pytest.raises(MistakesError) as caught:
        refresh_prices(catalog, file, tmp_path / "stored.csv", TODAY)
    assert [mistake.where for mistake in caught.value.mistakes] == ["new.csv:2", "new.csv:3"]
    assert "nothing was changed" in caught.value.fix
