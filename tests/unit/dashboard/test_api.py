"""What the page is told of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from watched_runs import append, line, write_run

from embark.dashboard.api import detail, event_text, log_lines
from embark.dashboard.runs import WatchedRun
from embark.events.events import parse_event
from embark.report.run_files import RunFiles
from embark.store.lease import TTL_S, acquire
from embark.store.run_dir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo", rich=True)


def run_of(folder: Path) -> WatchedRun:
    run = WatchedRun(RunFiles(folder))
    while run.look(time.time()):
        pass
    return run


def overview(folder: Path) -> dict:
    return detail(run_of(folder), time.time())


def test_a_straggler_is_marked_and_says_where_its_time_goes(folder: Path):
    slow = [rank for rank in overview(folder)["ranks"] if rank["slower_than"]]
    assert [(rank["rank"], sorted(rank["slower_than"])) for rank in slow] == [(2, ["input_s", "step_s"])]
    assert slow[0]["step_s"] == pytest.approx(0.15)
    assert slow[0]["slower_than"]["step_s"] == pytest.approx(0.1)


def test_a_rank_is_known_by_its_own_work_where_all_wait_for_it(tmp_path: Path):
    folder = write_run(tmp_path / "waiting")
    append(folder, line("ranks", time.time(), step=1, step_s=[0.2, 0.2, 0.2], input_s=[0, 0, 0]),
           line("phases", time.time(), step=1, seconds={"all_to_all": 0.1}, own_s=[0.1, 0.19, 0.1]))
    assert [sorted(rank["slower_than"]) for rank in overview(folder)["ranks"]] == [[], ["own_s"], []]


def test_ranks_that_keep_pace_are_not_marked(tmp_path: Path):
    folder = write_run(tmp_path / "even")
    append(folder, line("ranks", time.time(), step=1, step_s=[0.1, 0.101, 0.099], input_s=[1e-6, 5e-6, 1e-6]))
    assert not any(rank["slower_than"] for rank in overview(folder)["ranks"])


def test_the_plan_has_the_largest_table_first_and_each_gpu_s_memory(folder: Path):
    plan = overview(folder)["plan"]
    assert [table["table"] for table in plan["tables"]][:2] == ["cat_5", "cat_4"]
    assert plan["per_rank"][0] == {"rank": 0, "bytes": 25_600_000 * 6}
    assert plan["gpus"][1] == {"used_bytes": 31e9, "total_bytes": 80e9}


def test_prediction_stands_beside_fact(folder: Path):
    rows = {row["name"]: row for row in overview(folder)["prediction"]["rows"]}
    assert (rows["step time"]["predicted"], rows["step time"]["actual"]) == (0.09, 0.1)
    assert (rows["memory"]["predicted"], rows["memory"]["actual"]) == (31e9, 33e9)


def test_parts_of_a_step_are_means_of_late(folder: Path):
    assert overview(folder)["phases"]["all_to_all"] == pytest.approx(0.03)


def test_what_happened_is_marked_on_the_time_line(folder: Path):
    kinds = [mark["kind"] for mark in overview(folder)["marks"]]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert (kinds.count("save"), kinds.count("eval")) == (4, 4)


def test_the_page_shows_the_checkpoint_that_early_stopping_kept(tmp_path: Path):
    folder = write_run(tmp_path / "early", rich=True, ends=False)
    append(folder, line("eval", time.time(), step=200, auc=0.71, log_loss=0.7, normalized_entropy=0.91))
    assert overview(folder)["eval_auc"] == 0.71
    append(folder, line("end", time.time(), outcome="done", step=200, early_stopping={
        "metric": "auc", "best": 0.79, "best_step": 100, "path": "runs/early/checkpoints/step-000000100"}))
    shown = overview(folder)
    assert (shown["eval_auc"], shown["eval_normalized_entropy"], shown["evals"]["step"]) == (0.79, 0.66, 100)


def test_secrets_are_cut_out_of_the_spec_and_of_log_lines(folder: Path):
    secret = "password=c2VjcmV0LXNlY3JldA"
    (folder / "spec.toml").write_text(f'name = "{secret}"\n')
    (folder / "train.log").write_text(f"connected by {secret}\n")
    assert "c2VjcmV0" not in overview(folder)["spec"]
    assert "c2VjcmV0" not in log_lines(run_of(folder), file=1, words="")["lines"][0]["text"]


@pytest.mark.parametrize("event", [
    line("start", 1), line("ranks", 1, step_s=None), line("phases", 1, seconds={"input": None}), line("plan", 1),
    line("predict", 1), line("note", 1, text=None), line("other", 1, a=[1], b={"c": 2}), line("step", 1, loss="x"),
])
def test_every_event_can_be_put_into_words(event: str):
    read = parse_event(event.encode())
    assert read is not None
    assert isinstance(event_text(read), str)


def test_logs_are_the_run_s_own_files_newest_lines_last(folder: Path):
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    answer = log_lines(run_of(folder), file=1, words="")
    assert answer["files"] == ["events", "logs/rank-0.txt"]
    assert len(answer["lines"]) == 500
    assert answer["lines"][-1]["text"] == "line 1999"


def test_a_filter_finds_lines_that_hold_all_its_words_in_any_case_far_back(folder: Path):
    lines = [f"filler {i} {'x' * 200}\n" for i in range(20_000)]
    lines[3] = "NCCL WARN: something Odd\n"
    (folder / "train.log").write_text("".join(lines))
    found = log_lines(run_of(folder), file=1, words="odd nccl")["lines"]
    assert [one["text"] for one in found] == ["NCCL WARN: something Odd"]
    assert found[0]["level"] == "warning"


def test_events_are_a_log_in_words(folder: Path):
    found = log_lines(run_of(folder), file=0, words="save")["lines"]
    assert len(found) == 4
    assert found[0]["text"].startswith("checkpoint at step 50: 1.30 GB")


def test_a_file_number_that_there_is_not_is_the_events(folder: Path):
    assert log_lines(run_of(folder), file=99, words="")["file"] == 0


def test_the_page_says_which_process_trains_the_run(folder: Path):
    assert "held by" not in dict(overview(folder)["about"])
    lease = acquire(RunDir(str(folder)).store, TTL_S)
    try:
        assert dict(overview(folder)["about"])["held by"].startswith(f"process {os.getpid()} of ")
    finally:
        lease.release()
