"""A run that was launched is diagnosed by its name: its place's events, its machines' logs, its spec and its own events
together."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from embark.cli.console import Console
from embark.cli.diagnose import diagnose
from embark.errors import ExitCode
from embark.launch.backend import RunHandle
from embark.launch.run_registry import RunRecord, save_record
from embark.spec import load_spec, to_toml
from embark.store import open_store

AWS = ["name=dlrm", "place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://training/runs"]
WHERE = {"context": "east", "kubeconfig": "", "namespace": "embark", "object": "dlrm", "target": "job", "cloud": "aws",
         "num_nodes": 2, "queue": ""}
NO_EFA = "0/3 nodes are available: 3 Insufficient vpc.amazonaws.com/efa."
SOCKETS = "2026-11-15T09:00:00.5Z dlrm-0:41:41 [0] NCCL INFO Using network Socket"

JSON = Console(json=True)


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A function that puts a kubectl on the path which knows one job with two pods, their events and one log."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def make(events: list[tuple[str, str]], log: str, *, fails: str = "") -> None:
        pods = [{"metadata": {"name": f"dlrm-{i}-aaaaa", "uid": str(i), "creationTimestamp": "2026-11-15T08:59:00Z",
                              "labels": {"batch.kubernetes.io/job-completion-index": str(i)}},
                 "status": {"phase": "Running", "startTime": "2026-11-15T09:00:00Z",
                            "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": {"running": {}}}]}}
                for i in range(2)]
        rows = [{"involvedObject": {"kind": "Pod", "name": "dlrm-1-aaaaa"}, "reason": reason, "message": text,
                 "type": "Warning", "lastTimestamp": "2026-11-15T09:00:00Z"} for reason, text in events]
        job = {"kind": "Job", "metadata": {"name": "dlrm", "creationTimestamp": "2026-11-15T08:59:00Z"}, "status": {}}
        for name, text in (("job", job), ("pods", {"items": pods}), ("events", {"items": rows})):
            (programs / name).write_text(json.dumps(text))
        (programs / "log").write_text(log + "\n")
        failing = f'echo "{fails}" >&2; exit 1' if fails else ":"
        (programs / "kubectl").write_text(f"""#!/bin/sh
{failing}
case " $* " in *" get pods "*) cat '{programs}/pods';; *" get events "*) cat '{programs}/events';;
*" logs "*dlrm-0*) cat '{programs}/log';; *" logs "*) ;; *) cat '{programs}/job';;
esac
""")
        (programs / "kubectl").chmod(0o755)
        handle = RunHandle("dlrm", "kubernetes", WHERE, "dlrm on 2 x p5.48xlarge: 16 ranks", str(tmp_path / "far"))
        save_record(RunRecord(handle, to_toml(load_spec("quickstart", AWS)), time.time() - 400, True))

    return make


def diagnosis(capsys) -> dict:
    assert diagnose("dlrm", console=JSON) == ExitCode.OTHER
    return json.loads(capsys.readouterr().out)


def test_events_logs_and_spec_of_a_run_on_a_cluster_count_together(launched, capsys, tmp_path):
    launched([("FailedScheduling", NO_EFA)], SOCKETS)
    run = tmp_path / "far"
    run.mkdir()
    (run / "spec.toml").write_text(to_toml(load_spec("quickstart", AWS)))
    (run / "events.jsonl").write_text('{"event": "step", "time_s": 1, "rank": 0, "step": 7, "loss": null}\n')
    answer = diagnosis(capsys)
    found = {one["name"]: one for one in answer["diagnoses"]}
    assert set(found) == {"resource-name-unknown", "tcp-instead-of-fabric", "loss-not-a-number"}
    assert found["resource-name-unknown"]["evidence"]["source"] == "dlrm (events)"
    assert "vpc.amazonaws.com/efa" in found["resource-name-unknown"]["cause"]
    assert found["tcp-instead-of-fabric"]["evidence"]["source"] == "dlrm (logs)"
    assert answer["runs"] == [{"name": "dlrm", "state": "running", "reason": answer["runs"][0]["reason"]}]


def test_a_rank_of_the_cluster_s_log_is_named_and_commands_name_the_run(launched, capsys):
    launched([], "2026-11-15T09:00:01.5Z [rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, "
                 "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.")
    (one,) = diagnosis(capsys)["diagnoses"]
    assert (one["name"], one["ranks"]) == ("collective-timed-out", [3])
    assert one["command"].startswith("embark logs dlrm ")


def test_a_cluster_that_is_unavailable_stops_nothing_that_lies_elsewhere(launched, capsys, tmp_path):
    launched([], "", fails="Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")
    (tmp_path / "pod.log").write_text("OOMKilled\n")
    assert diagnose("dlrm", "pod.log") == ExitCode.OTHER
    captured = capsys.readouterr()
    assert "host-out-of-memory" in captured.out
    assert "does not answer" in captured.err


def test_the_state_of_a_run_is_shown_though_no_rule_matches(launched, capsys):
    launched([], "step 10")
    assert diagnose("dlrm") == ExitCode.DONE
    assert capsys.readouterr().out.startswith("dlrm: running")


def test_a_run_in_a_store_is_diagnosed_without_writing_anything_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store = open_store("memory://diagnosed/runs/dlrm")
    store.write("spec.toml", to_toml(load_spec("quickstart", ["name=dlrm"])).encode())
    store.write("plan.txt", f"{SOCKETS}\n".encode())
    loss = {"event": "nonfinite", "time_s": 1.0, "what": "loss", "step": 7}
    store.write("events.jsonl", f"{json.dumps(loss)}\n".encode())
    store.write("logs/rank_0", gzip.compress(b"OOMKilled\n"))
    diagnose("memory://diagnosed/runs/dlrm", console=JSON)
    report = json.loads(capsys.readouterr().out)
    assert report["num_sources"] == 3
    assert "host-out-of-memory" in [one["name"] for one in report["diagnoses"]]
    assert list(tmp_path.rglob("*")) == []
