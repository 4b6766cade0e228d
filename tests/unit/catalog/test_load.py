"""The catalog's files are read, and every mistake in a price file is named at once."""

import pytest

from embark.catalog.load import load_catalog, merge_newest, prices_path, read_catalog, read_prices
from embark.errors import MistakesError


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("p4d.24xlarge,us-west-2", "p4d.24xlarg,us-west-2", "did you mean 'p4d.24xlarge'?"),
        ("p4d.24xlarge,us-west-2", "p4d.24xlarge,us-east-2", "a second price"),
        ("us-west-2,21.95764", "us-west-2,-21", "greater than 0"),
        ("us-west-2,21.95764", "us-west-2,nan", "should be a finite number"),
        ("us-west-2,21.95764,10.7084", "us-west-2,21.95764,30", "p4d.24xlarge spot_usd_per_hour = 30"),
        ("us-west-2,21.95764,", "us-west-2,21.95764,1,", "has not as many cells as the heading"),
        ("0.37,0.65", "37,65", "should be less than 1"),
        ("confidence,block_usd_per_hour", "confidence,blok_usd_per_hour", "blok_usd_per_hour\n    unknown column"),
        ("machine,region", "machine,regoin", "region\n    missing in the heading"),
        (",2026-08-22,read", ",Nov 2026,read", "should be a date"),
        (",2026-08-22,read", ",2026-08-22,sure", "should be 'read'"),
    ],
)
def test_a_mistake_in_a_price_file_is_named(folder, catalog, old, new, what):
    path = folder / "prices.csv"
    spoil(path, old, new)
    with pytest.raises(MistakesError) as caught:
        read_prices(path, catalog.priced)
    assert what in caught.value.what
    assert "prices.csv" in caught.value.what


def test_an_empty_cell_is_not_known_and_no_mistake(folder):
    spoil(folder / "machines.csv", "p4d.24xlarge,A100,8,320.0,1,96,1152", "p4d.24xlarge,A100,8,320.0,1,,")
    machine = read_catalog(folder).machines["p4d.24xlarge"]
    assert machine.vcpus is machine.memory_gib is machine.allocatable_gib is machine.allocatable_vcpus is None


def test_of_two_rows_the_later_date_wins_and_of_one_date_the_new_one(catalog):
    place = ("p4d.24xlarge", "us-west-2")
    old = catalog.prices[place]
    origin = old.origin

    def dated(date, usd):
        return type(old)(machine=place[0], region=place[1], on_demand_usd_per_hour=usd,
                         origin=type(origin)("x", date, "read"))

    assert merge_newest({place: old}, {place: dated("2026-08-21", 1)})[place] is old
    assert merge_newest({place: old}, {place: dated("2026-08-22", 2)})[place].on_demand_usd_per_hour == 2
    assert merge_newest({place: old}, {place: dated("2026-11", 3)})[place].on_demand_usd_per_hour == 3
    assert merge_newest({}, {place: old}) == {place: old}


def test_prices_are_stored_in_the_user_s_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert prices_path() == tmp_path / "embark" / "prices.csv"
    for unfit in ("", "relative"):
        monkeypatch.setenv("XDG_DATA_HOME", unfit)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert prices_path() == tmp_path / ".local" / "share" / "embark" / "prices.csv"


def test_a_kept_file_that_was_spoilt_is_named_with_its_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    prices_path().parent.mkdir()
    prices_path().write_text("machine\n")
    with pytest.raises(MistakesError) as caught:
        load_catalog()
    assert "remove" in caught.value.fix
    assert str(prices_path()) in caught.value.fix
