"""Checkpoints are listed as they are; pruning removes what no rule keeps and nothing else; a diff finds all."""

import json
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from limits import HANG_S

from embark.errors import Fault, RunInUse, UserError
from embark.spec import load_spec, to_toml
from embark.store import ChecksumWriter, RunDir, checkpoint_name, find_run
from embark.store import checkpoint_diff as compare
from embark.store.atomic_file import SCRATCH_SUFFIX
from embark.store.checkpoint_arrays import ChunkEntry, Index, TensorEntry
from embark.store.checkpoint_diff import Change
from embark.store.checkpoint_diff import diff_checkpoints as difference
from embark.store.checkpoint_inspect import (
    MAY_BE_LIVE_S,
    decide_pruning,
    list_checkpoints,
    prune,
    verify,
)
from embark.store.lease import TTL_S, acquire

FILE = "rank-00000-00.bin"
Tensors = dict[str, np.ndarray]


def put(run: RunDir, step: int, tensors: Tensors | None = None, *, auc: float | None = None, num_chunks: int = 1,
        axis: int = 0, spec: str = "", plan: str = "") -> None:
    """A committed checkpoint as the trainer writes one, each tensor cut into chunks along `axis`."""
    pieces, entries, start = [], {}, 0
    for name, complete in (tensors or {"t": np.arange(12, dtype="f4").reshape(4, 3)}).items():
        chunks, offset = [], 0
        for part in np.array_split(complete, num_chunks, axis) if complete.ndim else [complete]:
            offsets = [0] * complete.ndim
            if complete.ndim:
                offsets[axis] = offset
                offset += part.shape[axis]
            data = np.ascontiguousarray(part).tobytes()
            chunks.append(ChunkEntry(tuple(offsets), part.shape, FILE, start, len(data)))
            pieces.append(data)
            start += len(data)
        entries[name] = TensorEntry(complete.dtype.name, complete.shape, tuple(chunks))
    store = ChecksumWriter(run.checkpoints.store)
    files = {FILE: b"".join(pieces), "index.json": Index(entries).to_json(),
             "spec.toml": spec.encode(), "plan.txt": plan.encode()}
    for name, data in files.items():
        store.write(f"{checkpoint_name(step)}/{name}", data)
    marks = {path.split("/", 1)[1]: mark for path, mark in store.marks.items()}
    evaluated = {"eval": {"step": step, "auc": auc}} if auc is not None else {"eval": {}}
    run.checkpoints.commit(step, marks, {"world_size": 2, **evaluated})


def make_run(tmp_path, *sets: str) -> RunDir:
    run = RunDir(str(tmp_path / "run"))
    run.path.mkdir()
    run.spec.write_text(to_toml(load_spec("laptop", sets)))
    return run


def folder(run: RunDir, step: int):
    return run.path / "checkpoints" / checkpoint_name(step)


def leave_unfinished(run: RunDir, step: int, age_s: float = 2 * MAY_BE_LIVE_S, name: str = FILE) -> None:
    folder(run, step).mkdir(parents=True)
    path = folder(run, step) / name
    path.write_bytes(b"x" * 50)
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def test_each_is_reported_with_why_it_is_stored(tmp_path):
    run = make_run(tmp_path, "store.keep_checkpoints=1", "store.keep_every=20", "store.keep_best=1")
    for step, auc in ((10, 0.9), (20, 0.7), (30, 0.8), (40, 0.6), (50, 0.5)):
        put(run, step, auc=auc)
    leave_unfinished(run, 60)
    listed = list_checkpoints(run)
    assert {one.step: one.kept for one in listed.checkpoints} == {
        10: ("best",), 20: ("every",), 30: (), 40: ("every",), 50: ("newest",), 60: ()}
    assert [one.state for one in listed.checkpoints] == ["committed"] * 5 + ["unfinished"]
    first = listed.checkpoints[0]
    assert (first.num_ranks, first.metric, first.metric_step) == (2, 0.9, 10)
    assert abs(first.time_s - time.time()) < 60
    assert first.size_bytes == sum(p.stat().st_size for p in folder(run, 10).iterdir() if p.name != "commit.json")


def test_the_commit_s_time_is_reported_and_an_older_one_s_is_its_file_s(tmp_path):
    run = make_run(tmp_path)
    put(run, 10)
    mark = folder(run, 10) / "commit.json"
    written = json.loads(mark.read_text())
    mark.write_text(json.dumps({**written, "time_s": 1e9}))
    assert list_checkpoints(run).checkpoints[0].time_s == 1e9
    del written["time_s"]
    mark.write_text(json.dumps(written))
    os.utime(mark, (5e8, 5e8))
    assert list_checkpoints(run).checkpoints[0].time_s == 5e8


def test_verify_reads_every_byte_and_names_every_damaged_file(tmp_path):
    run = make_run(tmp_path)
    put(run, 10)
    put(run, 20)
    (folder(run, 20) / FILE).write_bytes(b"x" * (folder(run, 20) / FILE).stat().st_size)
    (folder(run, 20) / "index.json").unlink()
    seen = []
    listed = list_checkpoints(run)
    checked = verify(run, listed, lambda done, total: seen.append((done, total)))
    assert [one.state for one in checked.checkpoints] == ["committed", "damaged"]
    text = " ".join(checked.checkpoints[1].damage)
    assert f"{FILE}: its bytes changed" in text
    assert "index.json" in text
    missing = listed.checkpoints[1].committed.files["index.json"].size_bytes
    assert max(seen) == (listed.size_bytes - missing, listed.size_bytes)


def test_what_is_cut_short_is_seen_without_reading(tmp_path):
    run = make_run(tmp_path)
    put(run, 10)
    (folder(run, 10) / FILE).write_bytes(b"x")
    (one,) = list_checkpoints(run).checkpoints
    assert one.state == "damaged"
    assert "cut short" in one.damage[0]


def test_a_changed_text_is_named_and_is_no_damage(tmp_path):
    run = make_run(tmp_path)
    put(run, 10, plan="26 tables")
    for text in ("27 tables", "a longer plan"):
        (folder(run, 10) / "plan.txt").write_text(text)
        listed = list_checkpoints(run)
        (one,) = verify(run, listed).checkpoints
        assert (one.state, one.damage, len(one.changed_texts), one.kept) == ("committed", (), 1, ("newest",))
        assert listed.checkpoints[0].state == "committed"


@pytest.mark.parametrize("text", ["", "[]", '{"step": 20, "files": {}}'])
def test_one_whose_mark_cannot_be_read_is_damaged_not_unfinished(tmp_path, text):
    run = make_run(tmp_path)
    put(run, 10)
    (folder(run, 10) / "commit.json").write_text(text)
    listed = list_checkpoints(run)
    assert listed.checkpoints[0].state == "damaged"
    assert not decide_pruning(listed, time.time()).removed


def pruned(run: RunDir) -> list[int]:
    return [one.step for one in prune(run, decide_pruning(list_checkpoints(run), time.time())).removed]


def test_a_run_in_training_is_listed_with_its_holder_and_not_pruned(tmp_path):
    run = make_run(tmp_path, "store.keep_checkpoints=1")
    for step in (100, 110):
        put(run, step)
    lease = acquire(run.store, TTL_S)
    try:
        assert list_checkpoints(run).held_by.startswith(f"process {os.getpid()} of ")
        with pytest.raises(RunInUse, match="is being trained by"):
            pruned(run)
    finally:
        lease.release()
    assert list_checkpoints(run).held_by == ""
    assert pruned(run) == [100]
    assert list_checkpoints(run).held_by == ""


def test_prune_takes_what_the_rules_let_go_and_old_leftovers(tmp_path):
    run = make_run(tmp_path, "store.keep_checkpoints=2", "store.keep_every=100")
    for step in (100, 110, 120, 130):
        put(run, step)
    leave_unfinished(run, 105)
    leave_unfinished(run, 140, name=f".{FILE}.1{SCRATCH_SUFFIX}")
    assert pruned(run) == [105, 110, 140]
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == [checkpoint_name(s) for s in (100, 120, 130)]
    assert pruned(run) == []


def test_prune_leaves_alone_what_may_be_being_written(tmp_path):
    run = make_run(tmp_path)
    put(run, 10)
    leave_unfinished(run, 20, age_s=-5)
    (decision,) = decide_pruning(list_checkpoints(run), time.time()).checkpoints
    assert not decision.is_removed
    assert "may be in progress" in decision.reason
    leave_unfinished(run, 5, age_s=60)  # touched before the last commit, so its save is over
    assert [one.step for one in decide_pruning(list_checkpoints(run), time.time()).removed] == [5]


def test_no_complete_one_goes_for_the_sake_of_a_damaged_one(tmp_path):
    run = make_run(tmp_path, "store.keep_checkpoints=2")
    for step in (10, 20, 30):
        put(run, step)
    for step in (20, 30):
        (folder(run, step) / FILE).unlink()
    assert pruned(run) == []
    assert list_checkpoints(run).checkpoints[0].kept == ("newest",)


@pytest.mark.parametrize("text", [None, "not toml [", "[store]\nkeep = 1\n"])
def test_without_rules_all_is_listed_and_nothing_pruned(tmp_path, text):
    run = make_run(tmp_path)
    for step in (1, 2, 3):
        put(run, step)
    if text is None:
        run.spec.unlink()
    else:
        run.spec.write_text(text)
    listed = list_checkpoints(run)
    assert len(listed.checkpoints) == 3
    assert listed.rules_error
    with pytest.raises(UserError, match="what to keep is not known"):
        decide_pruning(listed, time.time())


def test_an_unknown_step_is_refused_with_those_there_are(tmp_path):
    run = make_run(tmp_path)
    put(run, 10)
    leave_unfinished(run, 20)
    for step in (11, 20):
        with pytest.raises(UserError) as caught:
            list_checkpoints(run).committed(step)
        assert "10" in caught.value.fix


def test_a_diff_finds_all_that_differs(tmp_path):
    run = make_run(tmp_path)
    a = {"same": np.ones(5, "f4"), "moved": np.array([1.0, 2.0, -4.0], "f4"), "gone": np.zeros(1, "f4"),
         "grown": np.zeros((2, 2), "f4"), "count": np.int64(7).reshape(())}
    b = {"same": np.ones(5, "f4"), "moved": np.array([1.0, 2.5, -4.0], "f4"), "new": np.zeros(1, "f4"),
         "grown": np.zeros((3, 2), "f4"), "count": np.int64(9).reshape(())}
    put(run, 1, a, auc=0.5, spec="[train]\nseed = 1\nx = 3\n", plan="table rows\nt_0   5\n\nrank 0: 1 GiB of tables\n")
    put(run, 2, b, auc=0.6, spec="[train]\nseed = 2\nx = 3\n", plan="table rows\nt_0   6\n\nrank 0: 2 GiB of tables\n")
    listed = list_checkpoints(run)
    messages: list[tuple[int, int]] = []
    found = difference(run.checkpoints, listed.committed(1), listed.committed(2), lambda *done: messages.append(done))
    assert found.spec == (Change("train.seed", 1, 2),)
    assert Change("eval.auc", 0.5, 0.6) in found.values
    assert (found.only_in_a, found.only_in_b) == (("gone",), ("new",))
    assert found.shapes == (Change("grown", "float32 [2, 2]", "float32 [3, 2]"),)
    assert found.num_same == 1
    by_name = {change.name: change for change in found.tensors}
    assert set(by_name) == {"moved", "count"}
    assert by_name["moved"].num_differing == 1
    assert by_name["moved"].max_abs == 0.5
    assert (by_name["count"].shape, by_name["count"].max_abs) == ((), 2.0)
    assert messages[-1] == (5 * 4 + 3 * 4 + 8, 5 * 4 + 3 * 4 + 8)


@pytest.mark.parametrize(("num_chunks", "axis"), [(1, 0), (3, 0), (2, 1), (4, 1)])
def test_a_diff_does_not_see_how_a_tensor_was_cut(tmp_path, monkeypatch, num_chunks, axis):
    monkeypatch.setattr(compare, "BLOCK_BYTES", 500)
    run = make_run(tmp_path)
    table = np.random.default_rng(0).normal(size=(101, 8)).astype("f4")
    changed = table.copy()
    changed[77, 3] += 1
    put(run, 1, {"t": table})
    put(run, 2, {"t": table}, num_chunks=num_chunks, axis=axis)
    put(run, 3, {"t": changed}, num_chunks=num_chunks, axis=axis)
    listed = list_checkpoints(run)
    assert difference(run.checkpoints, listed.committed(1), listed.committed(2)).num_same == 1
    (change,) = difference(run.checkpoints, listed.committed(1), listed.committed(3)).tensors
    assert change.num_differing == 1
    assert change.max_abs == pytest.approx(1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "max_abs"),
    [
        ("float16", np.array([1, 2], "f2"), np.array([1, 4], "f2"), 2.0),
        ("float64", np.array([1, 2.0]), np.array([1, 2.25]), 0.25),
        ("bool", np.array([True, False]), np.array([True, True]), 1.0),
        ("uint8", np.array([1, 255], "u1"), np.array([1, 0], "u1"), 255.0),
    ],
)
def test_a_diff_counts_in_every_dtype(tmp_path, dtype, a, b, max_abs):
    run = make_run(tmp_path)
    put(run, 1, {"t": a})
    put(run, 2, {"t": b})
    listed = list_checkpoints(run)
    (change,) = difference(run.checkpoints, listed.committed(1), listed.committed(2)).tensors
    assert (change.dtype, change.num_differing, change.max_abs) == (dtype, 1, max_abs)


def test_a_diff_measures_finite_elements_alone(tmp_path):
    run = make_run(tmp_path)
    put(run, 1, {"t": np.array([1, np.nan, np.inf, 0.0, 0.0], "f4")})
    put(run, 2, {"t": np.array([np.nan, np.nan, -np.inf, -0.0, 3.0], "f4")})
    listed = list_checkpoints(run)
    (change,) = difference(run.checkpoints, listed.committed(1), listed.committed(2)).tensors
    assert (change.num_differing, change.max_abs) == (4, 3.0)


def test_a_diff_takes_little_memory_however_large_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "BLOCK_BYTES", 64 << 10)
    run = make_run(tmp_path)
    table = np.zeros((100_000, 32), "f4")
    put(run, 1, {"t": table})
    put(run, 2, {"t": table + 1})
    listed = list_checkpoints(run)
    tracemalloc.start()
    (change,) = difference(run.checkpoints, listed.committed(1), listed.committed(2)).tensors
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert change.num_differing == table.size
    assert peak < 2 << 20 < table.nbytes


def test_a_diff_of_a_damaged_one_says_so(tmp_path):
    run = make_run(tmp_path)
    put(run, 1)
    put(run, 2)
    (folder(run, 2) / FILE).write_bytes(b"xx")
    listed = list_checkpoints(run)
    with pytest.raises(Fault, match=r"ends beyond rank-00000-00\.bin"):
        difference(run.checkpoints, listed.committed(1), listed.committed(2))
    (folder(run, 2) / "index.json").write_text("{}")
    with pytest.raises(Fault, match="not the index"):
        difference(run.checkpoints, listed.committed(1), listed.committed(2))


def test_a_run_is_found_by_its_directory_its_name_and_its_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs")
    assert find_run("run").uri == "runs/run"
    assert find_run("runs/run/").path.samefile(tmp_path / "runs" / "run")
    assert find_run(f"file://{tmp_path}/runs/run").path.samefile(tmp_path / "runs" / "run")
    with pytest.raises(UserError, match="no such run") as caught:
        find_run("rnu")
    assert "'run'" in caught.value.fix
    with pytest.raises(UserError, match="not a run's directory"):
        find_run("runs")


def test_looking_at_checkpoints_imports_no_torch(tmp_path):
    run = make_run(tmp_path)
    put(run, 1)
    put(run, 2)
    code = (
        "import sys, embark.__main__\n"
        f"for words in ([], ['--verify'], ['--diff', '1', '2'], ['--prune', '--dry-run']):\n"
        f"    assert embark.__main__.run(['checkpoints', {str(run.path)!r}, *words]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
