"""What a run costs is told from its events, from what its cluster says of its machines, and from a dated price."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from limits import HANG_S

from embark.__main__ import run
from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.cli.cost import cost
from embark.dashboard.api import summary
from embark.dashboard.runs import WatchedRun
from embark.errors import UserError
from embark.events.events import Event
from embark.launch.backend import RunHandle
from embark.launch.run_registry import RunRecord, save_record
from embark.report.context import read_run
from embark.report.run_files import RunFiles
from embark.spec import load_spec, to_toml
from embark.store import open_store

AWS = ["name=dlrm", "place.machine=p5.48xlarge", "place.nodes=2", "place.region=us-west-2",
       "store.root=s3://training/runs"]
KUBERNETES = {"context": "east", "kubeconfig": "", "namespace": "embark", "object": "dlrm", "target": "job",
              "cloud": "aws", "num_nodes": 2, "queue": ""}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def steps(begin_s: float, first: int, last: int, step_s: float = 0.5) -> list[Event]:
    return [Event("step", {"step": step, "step_s": step_s}, begin_s + (step - first) * step_s)
            for step in range(first + 10, last + 1, 10)]


def killed_once(now_s: float, **start: object) -> list[Event]:
    """Up to 100 s ago: 100 steps, away for 60 s, loading for 20 s, and on from step 60 to 160."""
    values = {"num_steps": 1000, **start}
    t = now_s - 300
    return [Event("start", {"first_step": 0, **values}, t), *steps(t + 20, 0, 100),
            Event("start", {"first_step": 60, **values}, t + 130), Event("resume", {"step": 60}, t + 130),
            *steps(t + 150, 60, 160)]


def write_run(folder: Path, events: list[Event], sets: list[str] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(to_toml(load_spec("quickstart", sets or [])))
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    return folder


def cost_of(capsys, word: str, budget: float | None = None) -> tuple[int, dict]:
    code = cost(word, budget=budget, console=Console(json=True))
    return code, json.loads(capsys.readouterr().out)


def test_a_run_is_split_into_useful_redone_and_waiting(tmp_path, capsys):
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000, usd_per_hour=3600.0))
    code, answer = cost_of(capsys, "dlrm")
    assert code == 0
    assert tuple(answer["spending"][key] for key in ("useful_s", "redone_s", "waiting_s")) == pytest.approx(
        (80, 20, 100), abs=0.01
    )
    assert answer["spent_usd"] == pytest.approx(200, abs=0.01)
    assert answer["left_s"] == pytest.approx(840 * 0.5)
    assert answer["total_usd"] == pytest.approx(620, abs=0.01)
    assert (answer["spending"]["lost"]["num"], answer["spending"]["lost"]["lost_steps"]) == (1, 40)
    assert answer["price_source"] == "the price the run was started with"


def test_a_run_without_a_price_is_reported_in_hours_only(tmp_path, capsys):
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000))
    assert cost("dlrm", budget=None, console=Console()) == 0
    out = capsys.readouterr().out
    assert "3 min 20 s so far" in out
    assert "hours only" in out
    assert "$" not in out


def test_a_budget_without_a_price_is_bad_input(tmp_path, capsys):
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000))
    assert run(["cost", "dlrm", "--budget", "5"]) == 64
    told = capsys.readouterr()
    assert "cannot check the budget of $5.00: the run has no price" in told.out
    assert "has no price: --budget has no effect" in told.err
    assert "EMBARK_USD_PER_HOUR" in told.err


def test_a_budget_of_the_spec_without_a_price_is_a_note(tmp_path, capsys):
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000), ["place.budget_usd=5"])
    code, answer = cost_of(capsys, "dlrm")
    assert (code, answer["spent_usd"], answer["is_within_budget"]) == (0, None, None)
    assert "cannot check the budget" in answer["budget_verdict"]


def test_the_price_of_a_machine_is_the_catalogs_with_its_date(tmp_path, capsys):
    price = load_catalog().prices["p5.48xlarge", "us-west-2"]
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000), AWS)
    _, answer = cost_of(capsys, "dlrm")
    assert answer["usd_per_hour"] == pytest.approx(2 * price.on_demand_usd_per_hour)
    assert answer["spent_usd"] == pytest.approx(answer["usd_per_hour"] * 200 / 3600, rel=1e-3)
    assert price.origin.date in answer["price_source"]
    assert price.origin.source in answer["price_source"]
    assert answer["predicted_usd"] > 0


@pytest.mark.parametrize(("start", "is_priced"), [
    ({"device": "cpu", "device_name": "2 CPU threads", "world_size": 1}, False),
    ({"device": "cuda", "world_size": 1}, False),
    ({"device": "cuda", "world_size": 8}, True),
])
def test_cost_report_and_dashboard_price_a_run_alike(start, is_priced, tmp_path, capsys):
    now = time.time()
    sets = ["place.machine=p4d.24xlarge", "place.region=us-west-2"]
    folder = write_run(tmp_path / "runs" / "dlrm", killed_once(now - 1000, **start), sets)
    per_hour = load_catalog().prices["p4d.24xlarge", "us-west-2"].on_demand_usd_per_hour if is_priced else None
    _, answer = cost_of(capsys, "dlrm")
    reported = read_run("dlrm", is_brief=True)
    watched = WatchedRun(RunFiles(folder))
    while watched.look(now):
        pass
    money = summary(watched, now)["money"]
    assert (answer["usd_per_hour"], reported.price.usd_per_hour, money["usd_per_hour"]) == (per_hour,) * 3
    assert answer["spent_usd"] == pytest.approx(reported.spent.usd) == pytest.approx(money["spent_usd"])
    assert answer["held_s"] == pytest.approx(reported.record.held_s)  # machine time has one definition
    assert ("hours only" in reported.price.text) is not is_priced
    assert (answer["price_source"] == "") is not is_priced


def test_a_run_that_speaks_is_counted_to_now_and_one_that_is_silent_is_not(tmp_path, capsys):
    now = time.time()
    write_run(tmp_path / "runs" / "live", killed_once(now + 85, usd_per_hour=3600.0))
    write_run(tmp_path / "runs" / "dead", killed_once(now - 5000, usd_per_hour=3600.0))
    _, live = cost_of(capsys, "live")
    _, dead = cost_of(capsys, "dead")
    assert (live["is_running"], dead["is_running"]) == (True, False)
    assert live["held_s"] == pytest.approx(215, abs=5)
    assert dead["held_s"] == pytest.approx(200, abs=0.01)


@pytest.mark.parametrize(("budget", "code", "words"), [
    (100.0, 1, "the budget of $100.00 is spent"), (500.0, 1, "will exceed its budget of $500.00 by $120.00"),
    (1000.0, 0, "within its budget of $1,000"),
])
def test_a_budget_is_checked_once(tmp_path, capsys, budget: float, code: int, words: str):
    write_run(tmp_path / "runs" / "dlrm", killed_once(time.time() - 1000, usd_per_hour=3600.0))
    assert cost("dlrm", budget=budget, console=Console()) == code
    assert words in capsys.readouterr().out


def test_a_runs_own_budget_is_the_one_to_keep(tmp_path, capsys):
    events = killed_once(time.time() - 1000, usd_per_hour=3600.0)
    write_run(tmp_path / "runs" / "dlrm", events, ["place.budget_usd=500"])
    assert cost("dlrm", budget=None, console=Console()) == 1
    assert "it stops itself at $500.00" in capsys.readouterr().out


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(UserError, match="must be greater than 0"):
        cost("dlrm", budget=0.0, console=Console())


def test_a_run_that_is_not_there_is_reported():
    with pytest.raises(UserError, match="no such run"):
        cost("nothing", budget=None, console=Console())


def test_a_run_that_has_reported_nothing_has_spent_nothing(tmp_path, capsys):
    write_run(tmp_path / "runs" / "dlrm", [])
    assert cost("dlrm", budget=None, console=Console()) == 0
    assert "nothing spent yet" in capsys.readouterr().out


# On a cluster


def stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A function that puts a kubectl on the path which knows one job with two pods, up since so many seconds."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(created_s: float, pods_s: float | None, *, phase: str = "Running", fails: str = "") -> None:
        job = {"kind": "Job", "metadata": {"name": "dlrm", "creationTimestamp": stamp(created_s)}, "status": {}}
        state = {"running": {}} if phase == "Running" else {"waiting": {}}
        pods = [{"metadata": {"name": f"dlrm-{i}", "uid": str(i), "creationTimestamp": stamp(created_s),
                              "labels": {"batch.kubernetes.io/job-completion-index": str(i)}},
                 "status": {"phase": phase, **({"startTime": stamp(pods_s)} if pods_s else {}),
                            "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": state}]}}
                for i in range(2)]
        for name, text in (("job", job), ("pods", {"items": pods}), ("events", {"items": []})):
            (folder / name).write_text(json.dumps(text))
        failing = f'echo "{fails}" >&2; exit 1' if fails else ":"
        (folder / "kubectl").write_text(f"""#!/bin/sh
{failing}
case " $* " in *" get pods "*) cat '{folder}/pods';; *" get events "*) cat '{folder}/events';; *) cat '{folder}/job';;
esac
""")
        (folder / "kubectl").chmod(0o755)

    return make


def launch(run_uri: str, sets: list[str] | None = None) -> None:
    spec = load_spec("quickstart", sets or AWS)
    handle = RunHandle("dlrm", "kubernetes", KUBERNETES, "dlrm on 2 x p5.48xlarge: 16 ranks", run_uri, 3600.0)
    save_record(RunRecord(handle, to_toml(spec), time.time() - 400, True))


def test_a_run_on_kubernetes_is_paid_since_its_nodes_took_it(tmp_path, capsys, cluster):
    now = time.time()
    events = [Event("start", {"first_step": 0, "num_steps": 1000, "usd_per_hour": 3600.0}, now - 100),
              *steps(now - 80, 0, 100)]
    write_run(tmp_path / "elsewhere" / "dlrm", events)
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(now - 500, now - 160)  # 340 s in the queue are nobody's money
    _, answer = cost_of(capsys, "dlrm")
    assert answer["is_running"]
    assert answer["lead_s"] == pytest.approx(60, abs=2)
    assert answer["spent_usd"] == pytest.approx(160, abs=4)


def test_a_run_on_kubernetes_without_events_is_counted_by_its_pods(tmp_path, capsys, cluster):
    now = time.time()
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(now - 500, now - 120)
    _, answer = cost_of(capsys, "dlrm")
    assert answer["spent_usd"] == pytest.approx(120, abs=4)
    assert "no events yet" in " ".join(answer["notes"])


def test_pods_that_wait_for_a_machine_cost_nothing(tmp_path, capsys, cluster):
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(time.time() - 500, None, phase="Pending")
    code, answer = cost_of(capsys, "dlrm")
    assert (code, answer["spent_usd"], answer["held_s"]) == (0, 0.0, 0.0)


def test_a_cluster_that_is_unavailable_leaves_what_the_events_say(tmp_path, capsys, cluster):
    now = time.time()
    write_run(tmp_path / "elsewhere" / "dlrm", killed_once(now, usd_per_hour=3600.0))
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(now, None, fails="Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")
    _, answer = cost_of(capsys, "dlrm")
    assert answer["spent_usd"] == pytest.approx(200, abs=0.01)
    assert "does not answer" in " ".join(answer["notes"])


def test_the_price_of_the_launch_counts_though_the_catalog_has_another(tmp_path, capsys, cluster):
    write_run(tmp_path / "elsewhere" / "dlrm", killed_once(time.time() - 1000))
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(time.time() - 2000, None, phase="Pending")
    _, answer = cost_of(capsys, "dlrm")
    assert (answer["usd_per_hour"], answer["price_source"]) == (3600.0, "the catalog's on the day of the launch")


@pytest.mark.parametrize(("budget", "code"), [(100.0, 1), (500.0, 1), (100_000.0, 0)],
                         ids=["spent", "would be passed", "enough"])
def test_the_exit_code_says_that_a_run_will_pass_its_budget(tmp_path, cluster, budget, code):
    now = time.time()
    write_run(tmp_path / "elsewhere" / "dlrm", killed_once(now + 85, usd_per_hour=3600.0))
    launch(str(tmp_path / "elsewhere" / "dlrm"))
    cluster(now - 500, now - 250)
    assert cost("dlrm", budget=budget, console=Console()) == code


def test_a_run_over_its_budget_is_cancelled_with_its_checkpoint_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_USD_PER_HOUR", "36000")
    events, checkpoints = tmp_path / "runs/laptop/events.jsonl", tmp_path / "runs/laptop/checkpoints"
    assert run(["launch", "laptop", "--yes", "--set", "train.num_steps=1000000", "--set", "watch.every=1"]) == 0
    try:
        until(lambda: events.is_file() and '"event": "step"' in events.read_text())
        assert run(["cost", "laptop", "--budget", "100000000"]) == 0
        assert not list(checkpoints.glob("*"))
        assert run(["cost", "laptop", "--budget", "0.01"]) == 1
        assert run(["cancel", "laptop", "--yes"]) == 0
        assert list(checkpoints.iterdir())
        assert run(["checkpoints", "laptop", "--verify"]) == 0
    finally:
        run(["cancel", "laptop", "--yes"])


def until(is_so, limit_s: float = HANG_S) -> None:
    end_s = time.time() + limit_s
    while not is_so():
        assert time.time() < end_s
        time.sleep(0.1)


def test_the_cost_of_a_run_in_a_store_writes_nothing_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    folder = write_run(tmp_path / "elsewhere" / "dlrm", killed_once(time.time() - 1000, usd_per_hour=3600.0))
    store = open_store("memory://costs/runs/dlrm")
    for name in ("spec.toml", "events.jsonl"):
        store.write(name, (folder / name).read_bytes())
    before = sorted(tmp_path.rglob("*"))
    _, answer = cost_of(capsys, "memory://costs/runs/dlrm")
    assert answer["spent_usd"] == pytest.approx(200, abs=0.01)
    assert sorted(tmp_path.rglob("*")) == before
