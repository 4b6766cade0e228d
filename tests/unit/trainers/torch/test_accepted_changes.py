"""Real training: data and settings that changed between two starts stop the second, or go on the record."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import UserError
from embark.report.compare import compare_runs
from embark.report.context import read_run
from embark.report.document import html_page
from embark.report.report import report
from embark.spec import load_spec, resolve
from embark.trainers import train

RATE = "train.learning_rate"


def test_a_changed_run_is_refused_untouched_and_resumed_on_the_record(tmp_path):
    def prepare(flip: bool) -> None:
        rows = "".join(f"{(i % 5 < 2) ^ flip:d},u{i % 5},{i % 3}\n" for i in range(400))
        (tmp_path / "visits.csv").write_text(f"label,user,price\n{rows}")
        prepare_from_spec(spec(), tmp_path / "out", fresh=True)

    def spec(*sets: str):
        return resolve({
            "name": "visits", "model": {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
            "data": {"kind": "prepared", "path": str(tmp_path / "out"),
                     "prepare": {"input": str(tmp_path / "visits.csv")}},
            "train": {"batch_size": 32, "num_steps": 6, "precision": "fp32", "learning_rate": 0.01},
            "place": {"device": "cpu"},
            "store": {"root": str(tmp_path / "runs"), "checkpoint_every": 3, "keep_checkpoints": 9},
            "watch": {"every": 1, "tensorboard": False},
        }, sets)

    prepare(flip=False)
    run = Path(train(spec())["run_dir"])
    shutil.copytree(run, tmp_path / "runs" / "before")
    prepare(flip=True)
    (run / "spec.toml").unlink()  # the checkpoints decide
    before = contents(run)
    longer = ("train.num_steps=9", f"{RATE}=0.5")
    with pytest.raises(UserError) as raised:
        train(spec(*longer))
    assert raised.value.fix.endswith(f": --accept-change {RATE} --accept-change data")
    assert contents(run) == before

    train(spec(*longer), accept_change=[RATE, "data"])
    train(spec(*longer, "train.num_steps=10"))  # now it is what the run is
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    changes = [event for event in events if event["event"] == "change"]
    assert [(one["step"], one["field"], one["old"], one["new"]) for one in changes if one["field"] == RATE] == [
        (6, RATE, 0.01, 0.5)]
    assert len(changes) == 2
    rates = {event["step"]: event["learning_rate"] for event in events if event["event"] == "step"}
    assert [rates[6], rates[7], rates[10]] == [0.01, 0.5, 0.5]
    assert load_spec(str(run / "spec.toml")).store.accept_changes == ()

    contexts = [read_run(str(tmp_path / "runs" / name), is_brief=True) for name in ("visits", "before")]
    compared = compare_runs(contexts)
    assert {one.field: one.values for one in compared.spec}[RATE] == ("0.01, then 0.5 after step 6", "0.01")
    assert f"visits changed {RATE} at step 6; visits changed data at step 6: compare with care." in compared.sentence
    page = html_page(report(contexts[0]))
    assert "Changes on resume" in page
    cells = re.findall(r"<code>(.*?)</code>", page[page.index("Changes on resume"):])
    assert cells[:3] == [RATE, "0.01", "0.5"]
    assert "Changes on resume" not in html_page(report(contexts[1]))


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent.name != "lease"}
