"""Data from the user's own file: checked as it comes, the same at any number of ranks; its contract can be tried."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embark.__main__ import run
from embark.data import Loader, open_source
from embark.data.custom_contract import check_contract
from embark.data.custom_data import CustomSource
from embark.errors import UserError
from embark.spec import load_spec, resolve
from embark.spec.paths import with_absolute_paths

SOURCE = """
import random
import numpy as np

class Source:
    num_train_samples, num_eval_samples = 70_000, 300

    def __init__(self, data, model):
        self.seed, self.num_dense = data.seed, model.num_dense

    def rows(self, split, positions):
        at = positions + (1_000_000 if split == "eval" else 0)
        user, lengths = at * 7 % 50, at % 3
        tags = np.repeat(at, lengths) % 9
        dense = np.stack([at % 10, at % 4], axis=1)
        {line}
        return (user % 2 == at % 2).astype(int), dense, {{"user": user, "tags": (tags, lengths)}}
"""
TABLES = "[{name='user', rows=50}, {name='tags', rows=9, multi_hot=2}]"
KIND = "my_data:Source"


def spec(line: str = "", *sets: str):
    return resolve({"model": {"num_dense": 2}, "data": {"kind": KIND, "code": SOURCE.format(line=line)},
                    "train": {"batch_size": 64}}, [f"model.tables={TABLES}", *sets])


def source(line: str = "") -> CustomSource:
    opened = open_source(spec(line))
    assert isinstance(opened, CustomSource)
    return opened


def test_every_position_comes_once_an_epoch_in_an_order_of_the_seed_alone():
    whole = source()
    orders = []
    for epoch in (0, 1):
        taken = []
        whole._own.rows = lambda split, positions, taken=taken: taken.append(positions) or type(whole._own).rows(
            whole._own, split, positions)
        for start in range(0, 70_000, 7_000):
            whole.train_rows(epoch, start, start + 7_000)
        orders.append(np.concatenate(taken))
    assert all((np.sort(order) == np.arange(70_000)).all() for order in orders)
    assert (orders[0] != orders[1]).mean() > 0.99


def test_two_ranks_and_a_resumed_run_take_the_same_samples():
    def labels(rank: int, world_size: int, start_step: int) -> list[list[float]]:
        with Loader(source(), batch_size=64, rank=rank, world_size=world_size, start_step=start_step,
                    stop_step=5) as loader:
            return [batch.label.tolist() for batch in loader]

    one = labels(0, 1, 0)
    assert [a + b for a, b in zip(labels(0, 2, 0), labels(1, 2, 0), strict=True)] == one
    assert labels(0, 1, 3) == one[3:]


def test_its_samples_are_laid_out_as_training_wants_them():
    batch = source().eval_rows(0, 3)
    assert (batch.dense.dtype, batch.ids.dtype, batch.lengths.dtype, batch.label.dtype) == (
        np.float32, np.int32, np.int32, np.float32)
    assert batch.lengths.tolist() == [[1, 1, 1], [1, 2, 0]]
    assert batch.ids.tolist() == [0, 7, 14, 1, 2, 2]
    assert batch.dense.tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(("line", "expected"), [
    ("user = user + 1", "rows returned ids of user = 50 for position 7 of train"),
    ("return 1", "rows returned int"),
    ("return at % 2, dense, [1]", "rows returned list for ids"),
    ("return at % 2, dense, {'user': user}", "rows returned ids without table tags"),
    ("return at % 3, dense, {'user': user, 'tags': (tags, lengths)}", "rows returned label = 2.0 for position 2 of"),
    ("return at[:1] % 2, dense, {'user': user, 'tags': (tags, lengths)}", "rows returned label of shape (1,) for 8"),
    ("dense = dense[:, :1]", "rows returned dense of shape (8, 1) for 8 samples"),
    ("dense = np.where(dense == 3, np.nan, dense)", "rows returned dense = [nan nan] for position 3 of train"),
    ("user = user.astype(float)", "rows returned ids of user of type float64"),
    ("return at % 2, dense, {'user': user[:3], 'tags': (tags, lengths)}",
     "rows returned ids of user of shape (3,) for 8 samples"),
    ("lengths = lengths + 1", "rows returned ids of tags whose lengths"),
    ("tags, lengths = np.repeat(at, 3) % 9, lengths * 0 + 3", "rows returned number of ids of tags = 3 for position 0"),
    ("positions[0] = 3", "my_data.py:16: ValueError in rows: assignment destination is read-only"),
    ("tags = [[1]] + [[]] * 7; return at % 2, dense, {'user': user, 'tags': tags}",
     "rows returned ids of tags that are not an array"),
    ("lengths = lengths.astype(float)", "rows returned ids of tags with lengths of type float64"),
    ("import sys; sys.exit(0)", "my_data.py:16: SystemExit in rows: 0"),
    ("self.nothing", "my_data.py:16: AttributeError in rows: 'Source' object has no attribute 'nothing'"),
])
def test_what_is_wrong_is_told_with_the_file_its_line_and_the_position(line, expected):
    opened = source(line)
    with pytest.raises(UserError) as raised:
        opened.rows("train", np.arange(8))
    place = "" if expected.startswith("my_data.py") else "my_data.py:11: "
    assert raised.value.what.startswith(f"{place}{expected}"), raised.value.what
    assert raised.value.fix


@pytest.mark.parametrize(("change", "expected"), [
    (("70_000", "None"), "my_data.py: num_train_samples is None"),
    (("70_000", "0"), "my_data.py:11: num_train_samples is 0"),
    (("def rows", "def row"), "my_data.py: Source has no method rows"),
    (("data.seed", "data.sed"), "my_data.py:9: AttributeError in __init__"),
    (("data.seed", "exit(0)"), "my_data.py:9: SystemExit in __init__: 0"),
    (("self, data, model", "self"), "my_data.py: class Source: Source.__init__() takes 1 positional argument but 3"),
    (("import random", "raise SystemExit"), "my_data.py:2: SystemExit"),
])
def test_a_class_that_cannot_be_a_source_is_refused(change, expected):
    code = SOURCE.format(line="").replace(*change)
    data = spec().data.model_copy(update={"code": code})
    with pytest.raises(UserError) as raised:
        CustomSource(spec().model, data)
    assert raised.value.what.startswith(expected)


@pytest.mark.parametrize(("change", "expected"), [
    (("split, positions", "split"), "my_data.py:11: Source.rows() takes 2 positional arguments but 3 were given"),
    (("    def rows", "    @__import__('functools').lru_cache\n    def rows"), "my_data.py:11: unhashable type"),
])
def test_a_call_that_rows_does_not_take_is_told_with_its_signature(change, expected):
    data = spec().data.model_copy(update={"code": SOURCE.format(line="").replace(*change)})
    with pytest.raises(UserError) as raised:
        CustomSource(spec().model, data).rows("train", np.arange(8))
    assert raised.value.what.startswith(expected)
    assert raised.value.fix == "def rows(self, split, positions)"


def test_other_samples_have_another_fingerprint():
    assert source().fingerprint() == source().fingerprint()
    assert source("dense = dense + 1").fingerprint() != source().fingerprint()


def test_a_path_is_the_code_s_own_affair(tmp_path):
    (tmp_path / "my_data.py").write_text(SOURCE.format(line=""))
    (tmp_path / "run.toml").write_text(f"[model]\nnum_dense = 2\ntables = {TABLES.replace('=', ' = ')}\n"
                                       f'[data]\nkind = "{KIND}"\npath = "rows.bin"\n')
    data = with_absolute_paths(load_spec(str(tmp_path / "run.toml"))).data
    assert (data.path, data.code) == (str(tmp_path / "rows.bin"), SOURCE.format(line=""))


HOLDS = {"ids": "types, shapes, labels and ids", "positions": "a position gives the same sample"}


@pytest.mark.parametrize(("line", "promise", "problem"), [
    ("user = user + 9", "ids", " of train; table user has ids 0 to 49"),
    ("dense = dense + getattr(self, 'n', 0); self.n = 1", "positions", "give other samples the second time"),
    ("dense = dense + (len(at) > 1)", "positions", "gives another sample alone than among 20,000"),
    ("dense = dense + np.random.random()", "positions", "give other samples the second time"),
    ("dense = dense + random.random()", "positions", "give other samples the second time"),
])
def test_the_check_finds_what_would_break_resuming(monkeypatch, line, promise, problem):
    monkeypatch.setattr("embark.data.custom_contract._other_process", lambda spec, fingerprint: "")
    report = check_contract(spec(line))
    found = next(one for one in report.problems if one.where.startswith(HOLDS[promise]))
    assert problem in found.what
    assert report.columns == ()


def test_what_the_code_prints_while_it_is_checked_is_not_on_stdout(capsys, monkeypatch):
    monkeypatch.setattr("embark.data.custom_contract._other_process", lambda spec, fingerprint: "it failed")
    check_contract(spec("print('said in rows')"))
    told = capsys.readouterr()
    assert told.out == ""
    assert "said in rows" in told.err


def test_the_check_passes_code_that_keeps_the_contract(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").write_text(SOURCE.format(line=""))
    text = f"[model]\nnum_dense = 2\ntables = {TABLES.replace('=', ' = ')}\n[data]\nkind = \"{KIND}\"\n"
    (tmp_path / "run.toml").write_text(text)
    assert run(["data", "check", "run.toml"]) == 0
    told = capsys.readouterr().out
    assert "my_data:Source: complete" in told
    assert "rows: train 70,000, validation 300" in told
    (tmp_path / "my_data.py").write_text(SOURCE.format(line="dense = dense + __import__('os').getpid()"))
    assert run(["data", "check", "run.toml"]) == 1
    assert "its samples are others" in capsys.readouterr().err


def test_the_drifting_world_keeps_the_contract():
    code = (Path(__file__).parents[3] / "examples" / "drifting_world.py").read_text()
    report = check_contract(resolve({
        "model": {"num_dense": 3, "tables": [{"name": name, "ids": "dynamic", "capacity": 64} for name in ("a", "b")]},
        "data": {"kind": "drifting_world:Samples", "code": code, "num_train_samples": 4096, "num_eval_samples": 300},
        "train": {"batch_size": 64}}))
    assert report.problems == ()
    assert report.rows == {"train": 4096, "validation": 300}
