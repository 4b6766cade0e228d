"""From raw files to a trained model, by the commands a person types."""

from __future__ import annotations

import csv
import gzip
import json
import random
import tomllib
from pathlib import Path

import pytest

from embark.__main__ import run

QUIET = ["--set", "place.device=cpu", "--set", "watch.tensorboard=false", "--set", "store.checkpoint_at_end=false"]
SHORT = [*QUIET, "--set", "train.num_steps=12", "--set", "train.batch_size=256", "--set", "watch.every=1"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def events(name):
    return [json.loads(line) for line in (Path("runs") / name / "events.jsonl").read_text().splitlines()]


def losses(name):
    return [event["loss"] for event in events(name) if event["event"] == "step"]


def held_out_auc(name):
    return [event["auc"] for event in events(name) if event["event"] == "eval"][-1]


def test_raw_rows_with_quotes_and_lists_train_in_two_commands(capsys):
    draw = random.Random(1)
    with open("visits.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["visitor", "city", "interests", "bought"])
        for _ in range(8_000):
            city = draw.choice(["Paris, France", "Oslo, Norway", 'The "Big" Apple, USA'])
            liked = draw.sample(["art", "food", "music", "sport"], draw.randrange(4))
            chance = 0.1 + 0.5 * ("art" in liked) + 0.2 * city.startswith("Oslo")
            rows.writerow([f"v {draw.randrange(300)}", city, "|".join(liked), int(draw.random() < chance)])
    text = """[model]
embedding_dim = 16
top_mlp = [64]
[data]
kind = "prepared"
path = "prepared"
label = "bought"
prepare = { input = "visits.csv" }
[train]
batch_size = 128
"""
    assert len(text.splitlines()) == 10
    Path("visits.toml").write_text(text)
    assert run(["data", "prepare", "visits.toml"]) == 0
    assert "next: embark train visits.toml" in capsys.readouterr().out
    assert run(["train", "visits.toml", "-q", *QUIET]) == 0
    assert held_out_auc("visits") > 0.6
    saved = Path("runs/visits/spec.toml").read_text()
    assert 'name = "interests"' in saved


def criteo_line(draw, clicked):
    numbers = [str(draw.randrange(-1, 50)) if draw.random() < 0.8 else "" for _ in range(13)]
    ids = [f"{draw.randrange(1 << 32) if i else (17 if clicked else 99) + draw.randrange(3):08x}" for i in range(26)]
    return "\t".join([str(clicked), *numbers, *ids])


def test_criteo_s_days_train_and_their_bad_rows_are_reported(capsys):
    draw = random.Random(2)
    for day in range(3):
        lines = [criteo_line(draw, int(draw.random() < 0.3)) for _ in range(2_000)]
        if day == 1:
            lines[41] = "1\tcut short"
        if day == 2:
            lines[6] = lines[6].replace("\t", "\tx", 1)
        with gzip.open(f"day_{day}.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    Path("c.toml").write_text("""[model]
embedding_dim = 8
bottom_mlp = [16]
top_mlp = [16]
num_tables = 26
rows_per_table = 500
[data]
kind = "prepared"
path = "prepared"
[data.prepare]
input = "day_*.gz"
split = "file"
validation_files = ["day_2*"]
max_bad_share = 0.01
[train]
batch_size = 128
num_epochs = 3
learning_rate = 0.1
""")
    assert run(["data", "prepare", "c.toml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == {"train": 3_999, "validation": 1_999, "test": 0}
    assert result["bad_rows"]["num"] == 2
    places = [(Path(bad["file"]).name, bad["line"]) for bad in result["bad_rows"]["examples"]]
    assert places == [("day_1.gz", 42), ("day_2.gz", 7)]
    assert run(["data", "prepare", "c.toml"]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert run(["data", "prepare", "c.toml", "--fresh"]) == 0
    printed = capsys.readouterr()
    assert "skipped 2 unreadable rows" in printed.err
    assert "42" in printed.out
    assert run(["data", "check", "c.toml"]) == 0
    assert "hint: cat_0: alone predicts the label" in capsys.readouterr().out
    assert run(["train", "c.toml", "-q", *QUIET]) == 0
    assert held_out_auc("c") > 0.8
    assert run(["data", "prepare", "c.toml", "--fresh", "--set", "data.prepare.max_bad_share=0.0001"]) == 64
    assert "max_bad_share" in capsys.readouterr().err
    assert run(["train", "c.toml", "--fresh", *QUIET]) == 64


def test_a_dry_run_shows_the_guess_and_writes_nothing(capsys):
    Path("a.csv").write_text("user,price,click\n" + "".join(f"u{i % 9},{i / 7:.2f},{i % 2}\n" for i in range(200)))
    Path("a.toml").write_text('[data]\nkind = "prepared"\npath = "out"\nlabel = "click"\n'
                              '[data.prepare]\ninput = "a.csv"\n')
    assert run(["data", "prepare", "a.toml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    shown = tomllib.loads(printed.partition("in the spec:\n")[2].partition("nothing was written")[0])["data"]
    assert (shown["dense_columns"], shown["prepare"]["sparse_columns"]) == (["price"], ["user"])
    assert "by frequency" in printed
    assert run(["data", "prepare", "a.toml", "--dry-run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["column"] for row in result["columns"]] == ["user", "price", "click"]
    assert result["worker_bytes"] * result["num_workers"] <= result["memory_bytes"]
    assert not Path("out").exists()


def test_made_data_gives_the_losses_of_the_synthetic_source(capsys):
    samples = ["--set", "data.num_train_samples=4000", "--set", "data.num_eval_samples=1000"]
    prepared = ["--set", "data.kind=prepared", "--set", "data.shuffle=none", "--set", "data.cache_dir=cache"]
    assert run(["train", "laptop", "-q", *SHORT, *samples]) == 0
    assert run(["data", "make", "laptop", "-q", "--out", "made", *samples]) == 0
    assert run(["data", "copy", "made", "memory://made", "-q"]) == 0
    for name, path in (("local", "made"), ("store", "memory://made")):
        place = ["--set", f"data.path={path}", "--set", f"name={name}"]
        assert run(["train", "laptop", "-q", *SHORT, *prepared, *place]) == 0
    assert len(losses("laptop")) == 12
    assert losses("local") == losses("laptop")
    assert losses("store") == losses("laptop")
    assert held_out_auc("store") == held_out_auc("laptop")
    assert list(Path("cache").rglob("*.bin"))
