"""The page shows the search that a run is a trial of."""

from __future__ import annotations

import json
import time
from pathlib import Path

from watched_runs import write_run

from embark.dashboard.api import detail
from embark.dashboard.runs import WatchedRun
from embark.report.run_files import RunFiles

TRIALS = [{"number": number, "state": state, "value": value, "values": {"train.learning_rate": 0.0123456},
           "seconds": 3.0, "usd": None}
          for number, state, value in ((0, "complete", 0.7), (1, "pruned", None), (2, "complete", 0.6))]
TUNE = {"metric": "auc", "trials": TRIALS, "best": 0, "own_value": 0.7, "num_wanted": 30, "best_spec": "best.toml"}


def watched(folder: Path) -> WatchedRun:
    run = WatchedRun(RunFiles(write_run(folder)))
    look(run)
    return run


def look(run: WatchedRun) -> None:
    while run.look(time.time()):
        pass


def test_a_trial_shows_all_trials_and_the_best_so_far(tmp_path):
    (tmp_path / "tune.json").write_text(json.dumps(TUNE))
    run = watched(tmp_path / "trial-0000")
    shown = detail(run, time.time())["tuning"]
    assert (shown["numbers"], shown["values"], shown["best_values"]) == ([0, 2], [0.7, 0.6], [0.7, 0.7])
    assert shown["sentence"] == "3 trials of 30; best held-out AUC 0.7000, of the spec's own values 0.7000"
    assert shown["trials"][1] == {"number": 1, "state": "pruned", "value": None, "seconds": 3.0, "usd": None,
                                  "values": {"train.learning_rate": "0.0123"}}
    version = run.version
    look(run)
    assert run.version == version
    (tmp_path / "tune.json").write_text(json.dumps({**TUNE, "metric": "log_loss", "trials": TRIALS[:1] * 2}))
    look(run)
    assert run.version > version
    assert detail(run, time.time())["tuning"]["metric"] == "log loss"


def test_other_runs_and_other_files_show_none(tmp_path):
    for number, text in enumerate(("{", "[]", '{"metric": "auc"}', json.dumps({**TUNE, "trials": [{"number": "x"}]}))):
        folder = tmp_path / str(number)
        run = watched(folder / "trial-0000")
        (folder / "tune.json").write_text(text)
        look(run)
        assert detail(run, time.time())["tuning"] is None
    (tmp_path / "tune.json").write_text(json.dumps(TUNE))
    assert detail(watched(tmp_path / "demo"), time.time())["tuning"] is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tune.json").symlink_to(tmp_path / "tune.json")
    assert detail(watched(tmp_path / "other/trial-0000"), time.time())["tuning"] is None
