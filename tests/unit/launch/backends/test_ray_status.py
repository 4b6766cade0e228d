"""What a Ray cluster tells of a run, as a person is told of it."""

from __future__ import annotations

from typing import Any

from embark.launch.backend import RunHandle
from embark.launch.backends.ray import status_of

NODES = [{"node_id": "a", "node_ip": "10.0.0.1", "state": "ALIVE", "resources_total": {"CPU": 2.0}},
         {"node_id": "b", "node_ip": "10.0.0.2", "state": "ALIVE", "resources_total": {"CPU": 1.0}}]
JOB: dict[str, Any] = {"status": "RUNNING", "start_time": 1_790_000_000_000, "submission_id": "embark-clicks-1",
                       "entrypoint": "python ray_train.py", "message": "", "job_id": "02"}


def status(actors: Any = (), nodes: Any = NODES, num_cpus: int = 1, **job: Any):
    where = {"num_machines": 2, "num_processes": 1, "num_cpus": num_cpus, "use_gpu": 0}
    handle = RunHandle("clicks", "ray", where, run_uri="s3://b/runs/clicks")
    return status_of({**JOB, **job}, actors, nodes, handle)


def worker(pid: int, state: str = "ALIVE", group: str = "g1", node: str = "a", reason: str = "", said: str = ""):
    cause = {"actor_died_error_context": {"reason": reason, "error_message": said}} if reason else None
    return {"class_name": "RayTrainWorker", "pid": pid, "state": state, "placement_group_id": group, "node_id": node,
            "death_cause": cause}


def test_a_run_that_waits_says_for_what_and_how_much_of_it_there_is():
    waits = status(num_cpus=2)
    assert (waits.state, waits.reason) == ("pending", "waits for 2 x {CPU: 2}: the cluster has 1")
    assert "add machines" in waits.fix
    assert status().reason == "0 of 2 workers started"


def test_workers_that_start_are_counted_and_all_of_them_are_a_run():
    assert status(actors=[worker(1), worker(2, "PENDING_CREATION")]).reason == "1 of 2 workers started"
    up = status(actors=[worker(1), worker(2, node="b")])
    assert (up.state, up.reason, up.num_restarts) == ("running", "", 0)
    assert [part.name for part in up.replicas] == ["worker 1 on 10.0.0.1", "worker 2 on 10.0.0.2"]


def test_a_lost_worker_is_a_restart_and_one_that_ray_train_ended_is_not():
    lost = worker(1, "DEAD", reason="WORKER_DIED", said="The actor is dead because its node has died. More.")
    ended = worker(2, "DEAD", reason="RAY_KILL", said="The actor is dead because it was killed by `ray.kill`.")
    waits = status(actors=[lost, ended], num_cpus=2)
    assert waits.state == "restarting"
    assert waits.reason.startswith("1 worker lost so far (The actor is dead because its node has died); waits for 2 x")
    again = status(actors=[lost, ended, worker(3, group="g2"), worker(4, group="g2")])
    assert (again.state, again.num_restarts) == ("running", 1)
    assert "1 worker lost so far" in again.reason
    assert len(again.replicas) == 2


def test_how_it_ended_is_reported_with_what_was_reported_last():
    assert status(status="SUCCEEDED", end_time=1_790_000_090_000).reason == "took 1 min 30 s"
    assert status(status="STOPPED", end_time=1_790_000_090_000).state == "gone"
    message = ("Job entrypoint command failed with exit code 64, last available logs:\n"
               "(RayTrainWorker pid=1) 2026-11-15T11:00:00.000001Z [rank 0]:error: data.path: no such file\n"
               "(RayTrainWorker pid=1) 2026-11-15T11:00:00.000002Z [rank 0]:  fix: make it\n")
    failed = status(status="FAILED", message=message, driver_exit_code=64)
    assert failed.state == "failed"
    assert "exit code 64" in failed.reason
    assert failed.reason.endswith("data.path: no such file")
    never = status(status="FAILED", message="runtime_env setup failed", driver_exit_code=None)
    assert never.reason == "Ray could not run it: runtime_env setup failed"
