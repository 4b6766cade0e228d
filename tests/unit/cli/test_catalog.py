"""`embark catalog` as a person types it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

from embark.__main__ import run
from embark.catalog.load import PRICE_COLUMNS, prices_path

ROOT = Path(__file__).parents[3]
HEAD = ",".join(PRICE_COLUMNS) + "\n"
P4D = "p4d.24xlarge,us-west-2,20.5,9.5,,,our account,2026-11-14,read\n"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture(autouse=True)
def data_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def catalog(capsys, *words, code=0):
    assert run(["catalog", *words]) == code
    return capsys.readouterr()


def price_of_p4d(capsys):
    return json.loads(catalog(capsys, "show", "p4d.24xlarge", "--region", "us-west-2", "--json").out)["prices"][0]


def test_list_as_json_has_units_in_its_names(capsys):
    row, = json.loads(catalog(capsys, "list", "p4d.", "--region", "us-west-2", "--json").out)
    assert row["machine"]["num_gpus"] == 8
    assert row["price"]["on_demand_usd_per_hour"] == pytest.approx(21.95764)
    assert row["price"]["region"] == "us-west-2"


def test_list_says_which_have_no_price(capsys):
    assert "no price known: Standard_ND128isr_GB300_v6" in catalog(capsys, "list", "gb300", "--cloud", "azure").out


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
@pytest.mark.parametrize(
    "words",
    [["list"], ["list", "--cloud", "azure"], ["list", "--volumes"], ["list", "--volumes", "--tib", "12"]],
)
def test_a_table_is_no_wider_than_the_terminal_and_breaks_no_name(capsys, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = catalog(capsys, *words, "-q").out
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= columns
    names = ["azure-managed-lustre-125"] if "--volumes" in words else ["ND128isr_NDR_GB200_v6"]
    if columns >= 80:
        assert all(name in out for name in names)


def test_what_a_narrow_table_leaves_out_a_wide_one_has(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    narrow = catalog(capsys, "list", "p5").out.splitlines()[0].split()
    monkeypatch.setenv("COLUMNS", "160")
    wide = catalog(capsys, "list", "p5").out.splitlines()[0].split()
    assert {"machine", "$/h", "spot"} <= set(narrow) < set(wide)
    assert "fabric" in wide


def test_show_says_what_is_confirmed_and_how_often_spot_is_lost(capsys):
    out = catalog(capsys, "show", "p6-b300.48xlarge").out
    assert re.search(r"accelerator source\s+https://\S+ \(2026-11, unconfirmed\)", out)
    assert "0.22 a day; assumed" in out
    shown = json.loads(catalog(capsys, "show", "v2-8", "--json").out)
    assert shown["machine"]["origin"]["confidence"] == "unconfirmed"
    assert shown["spot_interruptions"]["origin"]["confidence"] == "documented"


def test_show_of_a_slice_counts_hosts(capsys):
    out = catalog(capsys, "show", "v5e-16").out
    assert "16 x TPU-v5e on 4 hosts" in out
    assert "not known" in out


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["ND128isr_GB300_v6"], "no price known in any region"),
        (["p5e.48xlarge"], "no price on demand known"),
        (["ND96isr_H100_v5", "--region", "eastus"], "no spot price known in eastus"),
    ],
)
def test_a_missing_price_is_reported_and_is_no_fault(capsys, words, result):
    assert result in catalog(capsys, "show", *words, "-q").out


def test_compare_sets_machines_side_by_side(capsys):
    rows = json.loads(catalog(capsys, "show", "p5.48xlarge", "p4d.24xlarge", "--json").out)
    assert [row["machine"]["name"] for row in rows] == ["p5.48xlarge", "p4d.24xlarge"]


def test_volumes_of_a_size_show_speed_and_cost(capsys):
    listed = json.loads(catalog(capsys, "list", "--volumes", "--tib", "1.2", "--json").out)
    rows = {row["volume"]["name"]: row for row in listed}
    assert rows["fsx-lustre-1000"]["gbyte_per_s"] == pytest.approx(1.2)
    assert rows["managed-lustre-1000"]["gbyte_per_s"] is None  # it begins at 8.8 TiB
    assert json.loads(catalog(capsys, "list", "--volumes", "--json").out)[0]["usd_per_month"] is None
    assert "fsx-lustre-1000" in catalog(capsys, "list", "--volumes").out


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["show", "p4.24xlarge"], "no such machine", "'p4d.24xlarge' or 'p4de.24xlarge'"),
        (["show", "p4de.24xlarge", "--region", "eu-west-1"], "not offered in eu-west-1", "us-west-2"),
        (["show"], "name a machine", "embark catalog list"),
        (["list", "--tib", "2"], "a size of storage", "embark catalog list --volumes --tib 2"),
        (["list", "h100", "--volumes"], "takes no filter", "embark catalog list --volumes"),
        (["show", "p5.48xlarg", "x9"], "'x9': no such machine", "p5.48xlarge"),
        (["list", "--cloud", "ibm"], "no such cloud", "aws"),
        (["list", "--gpu", "B100"], "no such accelerator", "B"),
        (["list", "--region", "us-est-1"], "no such region", "us-east-1"),
        (["list", "--volumes", "--tib", "-1"], "must not be negative", "--tib 1.2"),
        (["list", "--volumes", "--tib", "nan"], "must not be negative", "--tib 1.2"),
        (["refresh", "gone.csv"], "gone.csv: No such file", "name a CSV file"),
        (["refresh", "."], ".: Is a directory", "name a CSV file"),
    ],
)
def test_bad_input_costs_a_sentence(capsys, words, what, fix):
    err = catalog(capsys, *words, code=64).err
    assert what in err
    assert fix in err
    assert "Traceback" not in err


def test_a_newer_price_file_is_taken_in_and_from_then_on_preferred(capsys):
    Path("new.csv").write_text(HEAD + P4D + "p4d.24xlarge,sa-east-1,40,,,,our account,2026-11-14,read\n")
    out = catalog(capsys, "refresh", "new.csv").out
    assert "2 prices changed" in out
    assert "21.96" in out
    assert "20.5" in out
    price = price_of_p4d(capsys)
    assert (price["on_demand_usd_per_hour"], price["origin"]["source"]) == (20.5, "our account")
    assert "40" in catalog(capsys, "show", "p4d.24xlarge", "--region", "sa-east-1").out
    again = json.loads(catalog(capsys, "refresh", "new.csv", "--json").out)
    assert (again["changes"], again["num_same"]) == ([], 2)


def test_a_second_file_keeps_what_the_first_brought(capsys):
    Path("one.csv").write_text(HEAD + P4D)
    Path("two.csv").write_text(HEAD + P4D.replace("us-west-2,20.5", "us-east-1,20.25"))
    catalog(capsys, "refresh", "one.csv", "-q")
    catalog(capsys, "refresh", "two.csv", "-q")
    assert price_of_p4d(capsys)["on_demand_usd_per_hour"] == 20.5
    assert len(prices_path().read_text().splitlines()) == 3


def test_an_older_file_changes_nothing(capsys):
    Path("old.csv").write_text(HEAD + P4D.replace("2026-11-14", "2024-01-01"))
    seen = catalog(capsys, "refresh", "old.csv")
    assert "no price changed" in seen.out
    assert "catalog's: 1" in seen.err
    assert not prices_path().exists()
    assert price_of_p4d(capsys)["on_demand_usd_per_hour"] == pytest.approx(21.95764)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (HEAD + P4D + "p4d.24xlarg,us-east-1,1,,,,x,2026-11,read\n", "new.csv:3: p4d.24xlarg machine = p4d.24xlarg"),
        (HEAD + P4D.replace("9.5", "99"), "new.csv:2: p4d.24xlarge spot_usd_per_hour = 99"),
        (HEAD + P4D.replace("our account", ""), "is missing"),
        (HEAD + P4D + P4D, "a second price"),
        (HEAD + P4D.replace("2026-11-14", "2999-01-01"), "is dated 2999-01-01"),
        (HEAD, "has no prices"),
        ("", "missing in the heading"),
        ("machine,region\np4d.24xlarge,us-west-2\n", "missing in the heading"),
        (HEAD + '"p4d', "is not CSV"),
    ],
)
def test_a_broken_file_changes_nothing(capsys, text, what):
    Path("good.csv").write_text(HEAD + P4D)
    catalog(capsys, "refresh", "good.csv", "-q")
    before = prices_path().read_bytes()
    Path("new.csv").write_text(text)
    assert what in catalog(capsys, "refresh", "new.csv", code=64).err
    assert prices_path().read_bytes() == before
    assert [path.name for path in prices_path().parent.iterdir()] == ["prices.csv"]


def test_bytes_that_are_no_text_are_refused(capsys):
    Path("new.csv").write_bytes(b"\xff\xfe\x00machine")
    assert "is not CSV in UTF-8" in catalog(capsys, "refresh", "new.csv", code=64).err


def test_a_folder_that_cannot_be_written_is_named(capsys, monkeypatch):
    Path("file").write_text("")
    Path("new.csv").write_text(HEAD + P4D)
    monkeypatch.setenv("XDG_DATA_HOME", str(Path("file").resolve()))
    assert "XDG_DATA_HOME" in catalog(capsys, "refresh", "new.csv", code=64).err


def test_the_catalog_starts_without_torch_or_the_rest_of_embark():
    code = (
        "import sys, embark.catalog as c; c.find_machine(c.load_catalog(), 'p4d.24xlarge')\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'embark.store', 'embark.trainers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0


def test_the_page_of_prices_is_what_the_catalog_says():
    spec = importlib.util.spec_from_file_location("make_prices", ROOT / "tools" / "make_prices.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert (ROOT / "docs" / "reference" / "prices.md").read_text() == page, "make docs"
    assert "| `a2-highgpu-8g` | memory | 1.3TB | **680 GiB** |" in page
    assert "| `p5.48xlarge` | on demand | ~$98 | **$55.04** |" in page


def test_the_guide_s_commands_run(tmp_path):
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "PYTHONPATH": str(ROOT / "src")}
    guide = (ROOT / "docs" / "guides" / "catalog.md").read_text()
    blocks = re.findall(r"^```(\w+) (run|file=(\S+))\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    output = ""
    for _language, kind, name, text in blocks:
        if kind != "run":
            (tmp_path / name).write_text(text)
            continue
        text = text.replace("embark ", f"{sys.executable} -m embark ")
        done = subprocess.run(["bash", "-euc", text], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
        output += done.stdout
    assert "1 price changed" in output
