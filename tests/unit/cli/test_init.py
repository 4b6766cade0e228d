"""`embark init` writes a spec, and never overwrites one unasked."""

import gzip
import json

import pytest

from embark.__main__ import run
from embark.spec import load_spec


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_init_writes_a_spec_and_never_overwrites_one(capsys, tmp_path):
    assert run(["init", "laptop"]) == 0
    assert "embark train laptop.toml" in capsys.readouterr().out
    assert run(["init", "laptop"]) == 0  # nothing of anyone's is lost
    (tmp_path / "laptop.toml").write_text("mine")
    assert run(["init", "laptop"]) == 64
    assert (tmp_path / "laptop.toml").read_text() == "mine"
    assert run(["init", "laptop", "--force"]) == 0
    assert "[model]" in (tmp_path / "laptop.toml").read_text()


def test_init_writes_where_out_says(capsys, tmp_path):
    assert run(["init", "quickstart", "--out", "a.toml", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {"path": "a.toml", "model": None, "preset": "quickstart", "new_folder": None}
    assert run(["init", "--out", "new/my specs/a.toml"]) == 0
    told = capsys.readouterr().out
    assert "created new/my specs; wrote new/my specs/a.toml; next: embark train 'new/my specs/a.toml'" in told
    for path, name in (("a.toml", "a"), ("new/my specs/a.toml", "a"), ("my spec.toml", "quickstart")):
        assert run(["init", "--out", path, "--force"]) == 0
        assert load_spec(path).name == name
        assert f"# Train it: {capsys.readouterr().out.partition('next: ')[2]}" in (tmp_path / path).read_text()
    assert run(["init", "--out", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "a.toml").read_text().replace("a.toml", "quickstart.toml").replace(
        'name = "a"', 'name = "quickstart"')
    assert run(["init", "--out", "-", "--json"]) == 64
    assert "--out - and --json are mutually exclusive" in capsys.readouterr().err
    assert run(["init", "--out", "/proc/none/x.toml"]) == 64


def test_init_writes_a_model_of_one_s_own_beside_the_spec(capsys, tmp_path):
    assert run(["init", "laptop", "--model", "--out", "new/mine.toml"]) == 0
    assert "wrote new/mine.toml and new/my_model.py; next: embark train new/mine.toml" in capsys.readouterr().out
    model = load_spec("new/mine.toml").model
    assert (model.kind, model.code) == ("my_model:MyModel", (tmp_path / "new" / "my_model.py").read_text())
    (tmp_path / "my_model.py").write_text("mine")
    assert run(["init", "laptop", "--model"]) == 64
    assert "my_model.py: exists already" in capsys.readouterr().err
    assert ((tmp_path / "my_model.py").read_text(), (tmp_path / "laptop.toml").exists()) == ("mine", False)
    assert run(["init", "--model", "--out", "-"]) == 64


def test_init_writes_a_spec_for_a_file_of_one_s_own(capsys, tmp_path):
    (tmp_path / "shop.csv.gz").write_bytes(gzip.compress(
        b"age,member,bought\n" + b"".join(b"%d.5,%d,%d\n" % (i, i % 3 > 0, i % 2) for i in range(60))))
    assert run(["init", "shop.csv.gz"]) == 0
    assert "wrote shop.toml; next: embark data prepare --dry-run shop.toml" in capsys.readouterr().out
    data = load_spec("shop.toml").data
    assert (data.kind, data.path, data.label) == ("prepared", "shop-prepared", "bought")
    assert "these may be it: member, bought" in (tmp_path / "shop.toml").read_text()
    assert run(["data", "prepare", "--dry-run", "shop.toml"]) == 0
    rows = "".join(f"{'CH' if i % 3 else 'MM'},{i}.25\n" for i in range(60))
    (tmp_path / "juice.csv").write_text("kind,price\n" + rows)
    assert run(["init", "juice.csv", "--out", "new/juice.toml"]) == 0
    data = load_spec("new/juice.toml").data
    assert (data.label, data.prepare.label_is, data.prepare.input) == ("kind", "MM", "juice.csv")
    log = "".join(f"u{i % 7},i{i % 5},{1_700_000_000 + i}\n" for i in range(90))
    (tmp_path / "plays.csv").write_text("listener,album,played\n" + log)
    assert run(["init", "plays.csv"]) == 0
    assert run(["data", "prepare", "plays.toml"]) == 0
    assert load_spec("plays.toml").model.kind == "sasrec"
    assert run(["init", "plays.csv", "--model", "--out", "mine.toml"]) == 0
    assert load_spec("mine.toml").data.label
    assert run(["init", "shop.toml"]) == 64
    assert "is a spec" in capsys.readouterr().err
    assert run(["init", "shp.csv"]) == 64
    assert "no such preset, and no file" in capsys.readouterr().err
