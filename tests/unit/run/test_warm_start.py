"""A new run with the weights of another: known ids keep what was learned of them, and what differs is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import UserError
from embark.run.warm_start import with_sizes_of_source
from embark.spec import RunSpec, resolve
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays, table_weight
from embark.trainers import train

STILL = ("train.learning_rate=0", "train.num_steps=1", "watch.every=1")
METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")


def user_rows(run_dir: str, step: int) -> np.ndarray:
    arrays = CheckpointArrays(RunDir(run_dir).checkpoints.store, f"step-{step:09d}")
    return arrays.rows(table_weight("user"), 0, arrays.entries[table_weight("user")].size[0])


@pytest.fixture(scope="module")
def months(tmp_path_factory) -> Path:
    """Two months of rows; the second has the ids of the first, and new ones."""
    folder, draw = tmp_path_factory.mktemp("months"), random.Random(1)
    for month, first in (("january", 0), ("february", 30)):
        text = "".join(f"{int(draw.random() < 0.2 + 0.6 * (user % 2))},{user},{draw.randrange(9)},{draw.random():.2f}\n"
                       for user in (draw.randrange(first, first + 60) for _ in range(600)))
        (folder / f"{month}.csv").write_text("label,user,item,price\n" + text)
    return folder


def spec_of(root: Path, *sets: str) -> RunSpec:
    return resolve({
        "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]},
        "data": {"kind": "prepared", "eval_fraction": 0.3},
        "train": {"batch_size": 64, "learning_rate": 0.05, "precision": "fp32"}, "place": {"device": "cpu"},
        "watch": {"tensorboard": False}}, [f"store.root={root}", *sets])


def prepared(months: Path, month: str, *, continued: bool = False) -> str:
    """A month's data, with the ids of January if it is `continued`."""
    out = months / (f"{month}-continued" if continued else month)
    if not (out / "manifest.json").exists():
        earlier = (f"data.prepare.id_map_from={months / 'january'}",) if continued else ()
        spec = spec_of(months, f"data.path={out}", f"data.prepare.input={months / month}.csv", *earlier)
        prepare_from_spec(spec, out)
    return f"data.path={out}"


def trained(root: Path, *sets: str, fresh: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the run returned, and its events."""
    values = train(spec_of(root, *sets), fresh=fresh)
    return values, [json.loads(line) for line in Path(values["run_dir"], "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def january(months) -> dict[str, Any]:
    """How a run ended that was trained on January, saved at steps 2 and 4."""
    sets = ("train.num_steps=4", "watch.every=4", "store.checkpoint_every=2", "store.keep_checkpoints=2")
    return trained(months, "name=trained", *sets, prepared(months, "january"))[0]


def test_a_run_has_the_sizes_of_the_one_it_begins_with(months, january):
    def sizes(source: str, **model: object) -> tuple[object, ...]:
        spec = resolve({"model": model, "train": {"warm_start": source}, "store": {"root": str(months)}})
        found = with_sizes_of_source(spec).model
        return found.embedding_dim, found.bottom_mlp, found.top_mlp

    assert sizes(january["run_dir"]) == (8, (16,), (16,))
    assert sizes("trained@2", embedding_dim=4, top_mlp=[7]) == (4, (16,), (7,))
    assert sizes("not-there") == (64, (512, 256), (512, 256))


@pytest.mark.parametrize(("sets", "kind"), [
    (("model.kind=tabm", "model.num_members=2"), "tabm"), (("model.kind=wide_deep",), "wide_deep")])
def test_a_run_has_the_kind_of_the_one_it_begins_with(months, tmp_path, sets, kind):
    source = trained(tmp_path, "name=first", "train.num_steps=1", *sets, prepared(months, "january"))[0]["run_dir"]

    def model_of(**model: object):
        return with_sizes_of_source(resolve({"model": model, "train": {"warm_start": source}})).model

    found = model_of()
    assert found.kind == kind
    assert found.num_members == (2 if kind == "tabm" else 16)
    assert model_of(kind="dcnv2").kind == "dcnv2"


@pytest.fixture
def old(january, tmp_path) -> str:
    """That run, to be spoilt."""
    return shutil.copytree(january["run_dir"], tmp_path / "trained")


def test_a_warm_start_evaluates_like_the_run_it_starts_from(january, months, tmp_path):
    new, events = trained(tmp_path, prepared(months, "january"), *STILL, f"train.warm_start={january['run_dir']}")
    cold, _ = trained(tmp_path, "name=cold", prepared(months, "january"), *STILL)
    assert {name: new[name] for name in METRICS} == {name: january[name] for name in METRICS}
    assert cold["log_loss"] != january["log_loss"]
    (event,) = [event for event in events if event["event"] == "warm_start"]
    assert (event["run"], event["from_step"], event["num_fresh_rows"]) == (january["run_dir"], 4, 0)
    assert event["num_rows"] == 61 + 10


def test_rows_of_new_ids_keep_their_initial_values(january, months, tmp_path):
    february = prepared(months, "february", continued=True)
    new, events = trained(tmp_path, february, *STILL, f"train.warm_start={january['run_dir']}@4")
    cold, _ = trained(tmp_path, "name=cold", february, *STILL)
    learned, warm, drawn = (user_rows(*run) for run in (
        (january["run_dir"], 4), (new["run_dir"], 1), (cold["run_dir"], 1)))
    is_fresh = np.arange(len(warm)) >= len(learned)
    assert len(warm) > len(learned)
    assert np.array_equal(warm[is_fresh], drawn[is_fresh])
    assert np.array_equal(warm[~is_fresh], learned)
    assert not np.array_equal(drawn[~is_fresh], warm[~is_fresh])
    (event,) = [event for event in events if event["event"] == "warm_start"]
    assert event["num_fresh_rows"] == is_fresh.sum()


def test_a_resume_does_not_load_again(old, months, tmp_path):
    sets = ("name=new", prepared(months, "january"), "watch.every=9")
    warm = f"train.warm_start={old}"
    trained(tmp_path, *sets, warm, "train.num_steps=1", fresh=False)
    shutil.rmtree(old)
    _, events = trained(tmp_path, *sets, warm, "train.num_steps=2", fresh=False)
    kinds = [event["event"] for event in events]
    assert (kinds.count("warm_start"), kinds.count("resume"), kinds.count("end")) == (1, 1, 2)
    with pytest.raises(UserError, match=r"train\.warm_start: .* at step 2, none now"):
        trained(tmp_path, *sets, "train.num_steps=3", fresh=False)


def test_data_that_does_not_continue_the_ids_is_refused(january, months, tmp_path):
    with pytest.raises(UserError, match=r"ids .* does not continue: the same id would mean another row") as raised:
        trained(tmp_path, prepared(months, "february"), *STILL, f"train.warm_start={january['run_dir']}")
    assert "data.prepare.id_map_from" in raised.value.fix


@pytest.mark.parametrize(("sets", "message"), [
    ("model.top_mlp=[32]", r"model\.dense\.top\.0\.weight: \[16, \d+\] there, \[32, \d+\] here"),
    ("model.embedding_dim=12", r"model\.tables\.embedding_bags\.user\.weight: \[61, 8\] there, \[61, 12\] here"),
    ("model.kind=dcnv2", r"model\.dense\.down\.0\.weight: none there"),
    ("model.tables=[{name='item', rows=10}, {name='user', rows=61}]", "tables: user, item there, item, user here"),
])
def test_another_model_is_refused_with_the_difference(january, months, tmp_path, sets, message):
    with pytest.raises(UserError, match=message):
        trained(tmp_path, prepared(months, "january"), *STILL, sets, f"train.warm_start={january['run_dir']}")


def test_damaged_checkpoints_are_passed_over_and_an_absent_step_is_refused(old, months, tmp_path):
    (Path(old) / "checkpoints/step-000000004/rank-00000-00.bin").write_bytes(b"short")
    data = prepared(months, "january")
    _, events = trained(tmp_path, data, *STILL, f"train.warm_start={old}")
    assert [event["from_step"] for event in events if event["event"] == "warm_start"] == [2]
    assert any("step-000000004 is damaged" in event.get("text", "") for event in events)
    with pytest.raises(UserError, match="no checkpoint is intact"):
        trained(tmp_path, data, *STILL, f"train.warm_start={old}@4")
    with pytest.raises(UserError, match="has no checkpoint of step 3") as raised:
        trained(tmp_path, data, *STILL, "name=b", f"train.warm_start={old}@3")
    assert raised.value.fix == "its checkpoints are of steps 4, 2"
