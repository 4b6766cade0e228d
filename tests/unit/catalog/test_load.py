"""Every mistake in the catalog's files is told at once, with file and line."""

import pytest

from embark.catalog.load import load_catalog, merge_newest, prices_path, read_catalog
from embark.errors import MistakesError, UserError


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def line_of(path, text):
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def mistakes(folder):
    with pytest.raises(MistakesError) as caught:
        read_catalog(folder)
    return caught.value


def test_the_copy_is_complete(folder):
    assert len(read_catalog(folder).machines) == 143


def test_all_mistakes_are_reported_at_once(folder):
    spoil(folder / "gpus.toml", "hbm_gbyte_per_s = 320", 'hbm_gbyte_per_s = "fast"')
    spoil(folder / "machines.csv", "p4d.24xlarge,,aws", "p4d.24xlarge,,awz")
    spoil(folder / "prices.csv", "p4d.24xlarge,us-west-2,21.95764,10.7084", "p4d.24xlarge,us-west-2,21.95764,30")
    error = mistakes(folder)
    price_line = line_of(folder / "prices.csv", "21.95764,30")
    assert f"gpus.toml:{line_of(folder / 'gpus.toml', '[T4]')}: T4 hbm_gbyte_per_s = fast" in error.what
    assert f"machines.csv:{line_of(folder / 'machines.csv', 'awz')}: p4d.24xlarge cloud = awz" in error.what
    assert "did you mean 'aws'" in error.what
    assert f"prices.csv:{price_line}: p4d.24xlarge spot_usd_per_hour = 30" in error.what
    assert error.exit_code == 64


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("machines.csv", "A100,8,320.0,1,96", "A100,9,320.0,1,96", "9 x 40 GiB of A100 are 360"),
        ("machines.csv", "A100,8,320.0,1,96", "A100,0,320.0,1,96", "should be greater than 0"),
        ("machines.csv", "A100,8,320.0,1,96", "A100,8,320.0,3,96", "does not divide 8 accelerators"),
        ("machines.csv", "A100,8,320.0,1,96", "A100x,8,320.0,1,96", "did you mean 'A100'?"),
        ("machines.csv", "1152,nvlink,400,efa", "1152,,400,efa", "what joins them?"),
        ("machines.csv", "1152,nvlink,400,efa", "1152,nvlink,400,infiniband", "is of azure, the machine of aws"),
        ("machines.csv", "p4de.24xlarge,,aws", "p4d.24xlarge,,aws", "p4d.24xlarge occurs twice"),
        ("machines.csv", "ec2-describe,2026-11", "hearsay,2026-11", "not in sources.toml"),
        ("machines.csv", "ec2-describe,2026-11", "ec2-describe,Nov 2026", "should be a date"),
        ("machines.csv", "ec2-describe,2026-11", ",2026-11", "is missing"),
        ("machines.csv", "2026-11,read", "2026-11,sure", "should be 'read'"),
        ("prices.csv", "p4d.24xlarge,us-west-2", "p4d.24xlarg,us-west-2", "did you mean 'p4d.24xlarge'?"),
        ("prices.csv", "p4d.24xlarge,us-west-2", "p4d.24xlarge,us-east-2", "a second price"),
        ("prices.csv", "us-west-2,21.95764", "us-west-2,-21", "greater than 0"),
        ("prices.csv", "us-west-2,21.95764", "us-west-2,nan", "should be a finite number"),
        ("prices.csv", "us-west-2,21.95764,", "us-west-2,21.95764,1,", "has 11 cells, the heading has 10"),
        ("prices.csv", "0.37,0.65", "37,65", "should be less than 1"),
        ("prices.csv", "confidence,block_usd_per_hour", "confidence,blok_usd_per_hour", "'block_usd_per_hour'?"),
        ("machines.csv", "spot flex-start", "spot flex-strt", "did you mean 'flex-start'?"),
        ("interruptions.csv", "azure,,,", "azure,,eastus,", "no rate for the cloud as a whole"),
        ("interruptions.csv", "p5.48xlarge", "p5.48xlarg", "did you mean 'p5.48xlarge'?"),
        ("interruptions.csv", "0.025", "-1", "should be greater than 0"),
        ("interruptions.csv", "spot-gcp", "spot-gpc", "not in sources.toml"),
        ("volumes.toml", 'price_confidence = "documented"', 'price_confidence = "sure"', "price_confidence = sure"),
        ("volumes.toml", 'price_date = "2026-11"', 'price_dat = "2026-11"', "price_dat"),
        ("prices.csv", "machine,region", "machine,regoin", "did you mean 'region'?"),
        ("gpus.toml", "memory_mib = 16384", "memory = 16384", "no such field"),
        ("gpus.toml", "seen_mib = 143771", "seen_mib = 999999", "is more than memory_mib"),
        ("gpus.toml", "[T4]", "[T4", "is not TOML"),
        ("gpus.toml", "[T4]", 'stray = 1\n[T4]', "outside of a table"),
        ("volumes.toml", 'kind = "object"', 'kind = "objekt"', "did you mean 'object'?"),
        ("volumes.toml", 'title = "Amazon S3 Standard"', "title = 3", "should be a valid string"),
        ("fabrics.toml", 'kubernetes_also = ["hugepages-2Mi"]', "kubernetes_also = [1]", "should be a valid string"),
        ("reserves.toml", "[[4, 0.25], [8, 0.20]", "[[9, 0.25], [8, 0.20]", "steps should rise"),
        ("reserves.toml", "[[4, 0.25], [8, 0.20]", "[4, [8, 0.20]", "should be a valid tuple"),
    ],
)
def test_a_mistake_is_named(folder, file, old, new, what):
    spoil(folder / file, old, new)
    error = mistakes(folder)
    assert what in error.what
    assert file in error.what


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("machines.csv", "A100,8,320.0,1,96", "A100x,8,320.0,1,96"),
     ("gpus.toml", "memory_mib = 16384", "memory_mib = 0")],
)
def test_one_mistake_brings_no_others_about(folder, file, old, new):
    spoil(folder / file, old, new)
    assert len(mistakes(folder).mistakes) == 1


def test_a_file_that_is_gone_is_named(folder):
    (folder / "volumes.toml").unlink()
    with pytest.raises(UserError, match=r"volumes\.toml: No such file"):
        read_catalog(folder)


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
