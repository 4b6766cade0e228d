"""A project with a file of every format that Embark reads, each written by Embark's own commands."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import NoReturn

import pytest
from limits import HANG_S

from embark.__main__ import run
from embark.data.prepared import Manifest
from embark.errors import ExitCode, Interrupted
from embark.launch import supervisor
from embark.launch.backends.local import Local
from embark.launch.backends.machines import SUBMITTED
from embark.launch.run_registry import RunRecord, registry_dir, save_record
from embark.launch.shell import Shell
from embark.launch.supervisor_client import job_json
from embark.plan.calibration import SHIPPED, calibration_path, read_calibrations
from embark.plan.calibration import to_toml as calibration_toml
from embark.spec import load_spec, to_toml
from embark.store import write_atomic
from embark.store.transfer import Transfer

SPEC = """\
name = "clicks"

[model]
embedding_dim = 4
bottom_mlp = [8]
top_mlp = [8]

[data]
kind = "prepared"
path = "data"
label = "clicked"
dense_columns = ["price"]

[data.prepare]
input = "rows.csv"
sparse_columns = ["word"]
list_columns = ["tags"]
list_delimiter = "|"

[features]
numbers = "standardize"

[train]
batch_size = 64
precision = "fp32"
num_steps = 4

[place]
device = "cpu"

[store]
checkpoint_every = 2

[watch]
every = 1
tensorboard = false
"""
STREAM = ("name=stream", "stream.source=files", "stream.path=events", "train.num_steps=3", "store.checkpoint_every=1")
RENDER = ("render", "quickstart", "--target", "job", "--set", "place.machine=p5.48xlarge", "--set",
          "store.root=s3://bucket/runs", "--out", "deploy")
PRICES = """\
machine,region,on_demand_usd_per_hour,spot_usd_per_hour,commit_1y_discount,commit_3y_discount,source,date,confidence
p5.48xlarge,us-east-1,55.04,20.1,,,a letter,2026-10-01,read
p4d.24xlarge,us-east-1,21.96,,,,a letter,2026-10-01,read
"""


def build_project(folder: Path) -> None:
    """Write the project into the working directory, which is `folder`; XDG_DATA_HOME lies in it."""
    draw = random.Random(1)
    rows = [[draw.randrange(2), f"w{draw.randrange(30)}", "|".join(f"t{draw.randrange(9)}" for _ in range(
        draw.randrange(4))), round(draw.random(), 3)] for _ in range(400)]
    lines = ["clicked,word,tags,price", *(",".join(map(str, row)) for row in rows), ""]
    (folder / "rows.csv").write_text("\n".join(lines))
    (folder / "clicks.toml").write_text(SPEC)
    (folder / "events").mkdir()
    records = "".join(json.dumps({"clicked": row[0], "word": row[1], "tags": row[2], "price": row[3]}) + "\n"
                      for row in rows)
    for number in (1, 2):  # either has enough for all steps, should the other one be lost
        (folder / "events" / f"{number}.jsonl").write_text(records)
    (folder / "prices.csv").write_text(PRICES)
    (folder / "options.toml").write_text('user = "ann"\n[tls]\nca = "ca.pem"\n')
    for words in (
        ("data", "prepare", "clicks.toml"), ("train", "clicks.toml"), ("export", "clicks", "--to", "model"),
        ("train", "clicks.toml", "--set", "train.num_steps=6"), ("publish", "clicks", "--to", "model"),
        ("export", "clicks", "--to", "model"), ("train", "clicks.toml", "--set", "name=other"),
        ("follow", "clicks.toml", *(word for one in STREAM for word in ("--set", one))),
        ("tune", "clicks.toml", "--trials", "1"), ("catalog", "refresh", "prices.csv"),
        RENDER,
    ):
        code = run([*words, "-q"])
        assert code == 0, (words, code)
    for name in ("away", "near"):
        launch(name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Manifest, "to_text", _stop)
        assert run(["data", "prepare", "clicks.toml", "--set", "data.path=half", "-q"]) == ExitCode.INTERRUPTED
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Transfer, "_check_sizes", _stop)
        assert run(["data", "copy", "data", "copied", "-q"]) == ExitCode.INTERRUPTED
    write_atomic(calibration_path(), calibration_toml(read_calibrations(SHIPPED)["cpu"]))
    submitted = registry_dir() / "local" / "away" / SUBMITTED
    submitted.write_text(json.dumps({"time_s": time.time()}))  # as the launch on cloud machines writes it
    for path in folder.rglob("report.html"):
        path.unlink()


def _stop(*_: object) -> NoReturn:
    raise Interrupted("stopped here")


def launch(name: str) -> None:
    """Launch a run on this machine whose process only prints, under a real supervisor, until it has ended."""
    spec = load_spec("clicks.toml", [f"name={name}"])
    handle = Local(Shell(), notify=lambda _: None).handle_of(spec)
    folder = handle.folder
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(to_toml(spec, only_set=True))
    (folder / supervisor.JOB).write_text(job_json(["echo", "trained"], restarts=False))
    save_record(RunRecord(handle, to_toml(spec, only_set=True), time.time(), True))
    supervisor.start(folder, is_fresh=True)
    until_s = time.monotonic() + HANG_S
    while not (folder / supervisor.ENDED).exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
