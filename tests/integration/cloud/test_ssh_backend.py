"""Machines reached by ssh, with OpenSSH's own server on loopback: they train, come back, are followed and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from limits import HANG_S
from render_jobs import job_of
from ssh_servers import children_of, free_port, keygen, servers
from warm_python import processes_with

from embark.errors import UserError
from embark.launch.backend import read_logs
from embark.launch.shell import Shell
from embark.launch.supervisor import mark_of
from embark.launch.supervisor_client import (
    Host,
    SupervisorClient,
    Unreachable,
    job_json,
    names_of,
    ssh_words,
    status_of,
    write_known_hosts,
)
from embark.render.targets.vm_node import STATE, VENV, node_program
from embark.spec import load_spec, to_toml

pytestmark = pytest.mark.needs("sshd")

ROOT = Path(__file__).parents[3]
SMALL = ["model.num_tables=2", "model.rows_per_table=50", "train.batch_size=16", "data.num_eval_samples=32",
         "watch.tensorboard=false"]
COUNTS = """\
trap 'echo stopping; exit 75' TERM
for number in $(seq 1000); do echo "number $number"; sleep 0.02; done
"""


@pytest.fixture
def machines(tmp_path):
    """Two machines, and what they were left with is ended."""
    with servers(tmp_path, "dlrm-0", "dlrm-1") as (made, key, known_hosts):
        hosts = [server.host(index, key, known_hosts) for index, server in enumerate(made)]
        try:
            yield made, hosts
        finally:
            for host in hosts:
                started = read(host, "started.json")
                if started:
                    for stop in (os.kill, os.killpg):
                        try:
                            stop(started["pid"], signal.SIGTERM if stop is os.kill else signal.SIGKILL)
                            time.sleep(0.2)
                        except ProcessLookupError:
                            break


@pytest.fixture
def ssh() -> SupervisorClient:
    return SupervisorClient(Shell(), notify=lambda _: None)


def read(host: Host, name: str) -> dict | None:
    path = Path(host.folder) / name
    return json.loads(path.read_text()) if path.exists() else None


def bash(text: str, **order) -> Callable[[Host], Mapping[str, str]]:
    return lambda host: {"start.sh": f"#!/usr/bin/env bash\n{text}",
                         "job.json": job_json([f"{host.folder}/start.sh"], wait_s=0.2, **order)}


def until(is_so: Callable[[], object], *, every_s: float = 0.1) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(every_s)


def state(ssh: SupervisorClient, hosts: list[Host]) -> str:
    return status_of(ssh.states(hosts), names_of(hosts), "file:///runs").state


def training(tmp_path: Path, num_steps: int, python: str) -> Callable[[Host], Mapping[str, str]]:
    """What the plain machines of a cloud are given, but for where things stand on them."""
    port = free_port()
    spec = load_spec("laptop", ["name=small", *SMALL, f"train.num_steps={num_steps}",
                                f"data.num_train_samples={16 * num_steps}", f"store.root=file://{tmp_path}/runs",
                                "store.checkpoint_every=20"])
    job = job_of("g5.xlarge", nodes=2, target="vm", name="small")

    def files(host: Host) -> Mapping[str, str]:
        program = node_program(job, f"RANK={host.index}\nMASTER=127.0.0.1")
        for there, here in ((f"{VENV}/bin/python", python), (f"cd {STATE}", f"cd {host.folder}"),
                            ("/etc/embark/spec.toml", f"{host.folder}/spec.toml"), (":29500", f":{port}"),
                            ("OMP_NUM_THREADS=3", "OMP_NUM_THREADS=1")):
            program = program.replace(there, here)
        env = {"PYTHONPATH": str(ROOT / "src"), "EMBARK_CACHE": f"{host.folder}/cache", "PYTHONWARNINGS": "ignore"}
        return {"spec.toml": to_toml(spec), "node.sh": program,
                "job.json": job_json([f"{host.folder}/node.sh"], env=env, wait_s=1.0)}

    return files


@pytest.mark.slow
def test_killed_machine_of_two_comes_back_and_continues(tmp_path, machines, ssh, warm_python):
    _, hosts = machines
    events = tmp_path / "runs/small/events.jsonl"
    ssh.start(hosts, training(tmp_path, 200, warm_python), is_fresh=True)
    until(lambda: events.exists() and '"save"' in events.read_text())
    # The second machine's ranks die as those of a machine do that is taken away without a word.
    pid = read(hosts[1], "started.json")["pid"]
    for one in {pid, *children_of(pid), *processes_with("EMBARK_CACHE", f"{hosts[1].folder}/cache")}:
        os.kill(one, signal.SIGKILL)
    until(lambda: ssh.states(hosts[1:])[1].is_lost, every_s=1.0)  # a connection takes longer to open than a step
    assert state(ssh, hosts) == "restarting"
    ssh.start(hosts, training_again(hosts), is_fresh=False)
    until(lambda: state(ssh, hosts) not in ("restarting", "running"), every_s=2.0)
    payload = [json.loads(line) for line in events.read_text().splitlines()]
    output = "\n".join(line.text for line in read_logs(ssh.log_sources(hosts, {})))
    assert state(ssh, hosts) == "succeeded", output
    resumed = [event["step"] for event in payload if event["event"] == "resume"]
    assert resumed, output
    assert resumed[-1] >= 20, "it went on from a checkpoint"
    assert payload[-1]["outcome"] == "done"
    assert max(event["step"] for event in payload if event["event"] == "step") == 200


def training_again(hosts: list[Host]) -> Callable[[Host], Mapping[str, str]]:
    """The same files once more."""
    return lambda host: {name: (Path(host.folder) / name).read_text()
                         for name in ("spec.toml", "node.sh", "job.json")}


def test_cut_connection_neither_loses_nor_repeats_a_line(tmp_path, machines, ssh):
    made, hosts = machines
    done = tmp_path / "done"
    ssh.start(hosts, bash(f"number=0\nwhile [ ! -e {done} ]; do number=$((number + 1)); echo $number; sleep 0.02; "
                              "done"), is_fresh=True)
    messages: list[str] = []
    lines, positions = [], {}
    ssh = SupervisorClient(Shell(), notify=messages.append)
    until(lambda: (Path(hosts[0].folder) / "log").exists())
    sources = ssh.log_sources(hosts, positions)
    for server in made:
        server.cut()
    lines += read_logs(sources)
    done.touch()
    until(lambda: all(one and one.code == 0 for one in ssh.states(hosts).values()))
    lines += read_logs(ssh.log_sources(hosts, positions))
    for host in hosts:
        numbers = [int(line.text) for line in lines if line.index == host.index]
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers[-1] == len((Path(host.folder) / "log").read_text().splitlines())
    assert all(line.time_ns > 0 for line in lines)


def test_a_server_that_is_unavailable_for_a_while_is_waited_for(machines, ssh):
    made, hosts = machines
    ssh.start(hosts, bash(COUNTS), is_fresh=True)
    made[1].stop()
    seen = ssh.states(hosts)
    assert seen[1] is None
    status = status_of(seen, names_of(hosts), "file:///runs")
    assert (status.state, status.reason) == ("restarting", "dlrm-1 does not answer")
    back = threading.Timer(0.5, made[1].start)
    back.start()
    ssh.wait_for(hosts, 20)
    assert state(ssh, hosts) == "running", "its ranks went on meanwhile"


def test_asked_to_stop_the_ranks_end_by_themselves(machines, ssh):
    _, hosts = machines
    ssh.start(hosts, bash(COUNTS), is_fresh=True)
    assert ssh.stop(hosts, 20) == []
    status = status_of(ssh.states(hosts), names_of(hosts), "file:///runs")
    assert status.state == "gone"
    lines = list(read_logs(ssh.log_sources(hosts, {})))
    assert [line.text for line in lines].count("stopping") == 2


def test_ranks_that_do_not_end_are_killed_after_their_grace(machines, ssh):
    _, hosts = machines
    ssh.start(hosts, bash("trap '' TERM\nwhile true; do sleep 0.1; done"), is_fresh=True)
    assert ssh.stop(hosts, 1.0) == hosts
    until(lambda: all(not one.is_alive for one in ssh.states(hosts).values()))


@pytest.mark.parametrize(("code", "ends"), [(64, True), (70, False), (75, False)])
def test_the_table_of_exit_codes_says_what_is_started_again(machines, ssh, code, ends):
    _, hosts = machines
    body = f"if [ -e {hosts[0].folder}/was ]; then exit 0; fi\ntouch {hosts[0].folder}/was\nexit {code}"
    ssh.start(hosts[:1], bash(body), is_fresh=True)
    until(lambda: ssh.states(hosts[:1])[0].code is not None)
    status = status_of(ssh.states(hosts[:1]), names_of(hosts), "file:///runs")
    assert (status.state, status.num_restarts) == (("failed", 0) if ends else ("succeeded", 1))
    assert (f"exit code {code}" in status.reason) == ends


def test_faults_one_after_the_other_are_given_up(machines, ssh):
    _, hosts = machines
    files = bash("exit 70")

    def fast(host: Host) -> Mapping[str, str]:
        return {**files(host), "job.json": files(host)["job.json"].replace('"wait_s": 0.2', '"wait_s": 0')}

    ssh.start(hosts[:1], fast, is_fresh=True)
    until(lambda: ssh.states(hosts[:1])[0].code is not None)
    assert ssh.states(hosts[:1])[0].code == 70
    assert any("giving up" in line.text for line in read_logs(ssh.log_sources(hosts[:1], {})))


def test_a_second_hand_over_leaves_what_runs_and_what_has_ended_alone(machines, ssh):
    _, hosts = machines
    ssh.start(hosts, bash(COUNTS), is_fresh=True)
    pids = [read(host, "started.json")["pid"] for host in hosts]
    ssh.start(hosts, bash(COUNTS), is_fresh=False)
    assert [read(host, "started.json")["pid"] for host in hosts] == pids
    ssh.stop(hosts, 20)
    ssh.start(hosts, bash(COUNTS), is_fresh=False)
    assert all(not seen.is_alive for seen in ssh.states(hosts).values())


def test_ranks_of_a_killed_supervisor_end_and_are_started_again(machines, ssh):
    _, (host, *_) = machines
    quiet = bash("trap 'touch saved; exit 75' TERM\nwhile true; do sleep 0.1; done")  # nobody reads its output any more
    ssh.start([host], quiet, is_fresh=True)
    until(lambda: children_of(read(host, "started.json")["pid"]))
    (child, *_) = children_of(read(host, "started.json")["pid"])
    os.kill(read(host, "started.json")["pid"], signal.SIGKILL)
    until(lambda: not mark_of(child))
    assert ssh.states([host])[host.index].is_lost
    ssh.start([host], quiet, is_fresh=False)
    assert state(ssh, [host]) == "running"
    assert ssh.stop([host], 20) == []


def test_an_attempt_is_ended_so_that_the_next_finds_the_others_elsewhere(machines, ssh):
    _, hosts = machines
    ssh.start(hosts[:1], bash(COUNTS), is_fresh=True)
    ssh.restart(hosts[:1])
    until(lambda: ssh.states(hosts[:1])[0].num_restarts == 1)
    assert state(ssh, hosts[:1]) in ("running", "restarting")


def test_a_machine_with_another_host_key_is_not_spoken_to(tmp_path, machines, ssh):
    _, hosts = machines
    keygen(tmp_path / "other")
    write_known_hosts(tmp_path / "known_hosts", {"dlrm-0": (tmp_path / "other.pub").read_text()})
    with pytest.raises(UserError, match="another host key"):
        ssh.wait_for(hosts, 10)
    with pytest.raises(UserError, match="another host key"):
        ssh.start(hosts[:1], bash(COUNTS), is_fresh=True)
    assert not (Path(hosts[0].folder) / "job.json").exists()


def test_a_machine_that_nobody_vouches_for_is_not_spoken_to(tmp_path, machines, ssh):
    _, hosts = machines
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(UserError, match="another host key"):
        ssh.start(hosts[:1], bash(COUNTS), is_fresh=True)


def test_one_who_has_no_key_is_reported_and_asked_no_password(tmp_path, machines, ssh):
    made, hosts = machines
    keygen(tmp_path / "stranger")
    words = ssh_words("127.0.0.1", user=hosts[0].words[-1].partition("@")[0], key=tmp_path / "stranger",
                      known_hosts=tmp_path / "known_hosts", alias="dlrm-0", port=made[0].port)
    stranger = Host("dlrm-0", 0, words, hosts[0].folder)
    with pytest.raises(Unreachable, match="Permission denied"):
        ssh.start([stranger], bash(COUNTS), is_fresh=True)


def test_a_folder_with_a_space_and_a_percent_sign_works(tmp_path, ssh):
    folder = tmp_path / "my runs 100%"
    folder.mkdir()
    with servers(tmp_path, "dlrm-0") as (made, key, known_hosts):
        for path in (key, known_hosts):
            shutil.copy(path, folder)
        host = made[0].host(0, folder / "key", folder / "known_hosts", folder / "run")
        ssh.start([host], bash("echo $((6 * 7))"), is_fresh=True)
        until(lambda: ssh.states([host])[0].code == 0)
        assert [line.text for line in read_logs(ssh.log_sources([host], {}))] == ["42"]


def test_what_is_to_come_after_the_end_comes_and_not_when_someone_ended_it(tmp_path, machines, ssh):
    _, hosts = machines
    marks = [tmp_path / "after-0", tmp_path / "after-1"]

    def files(host: Host) -> Mapping[str, str]:
        return {**bash("sleep 0.2" if host.index == 0 else COUNTS)(host), "job.json": job_json(
            [f"{host.folder}/start.sh"], after=["touch", str(marks[host.index])])}

    ssh.start(hosts, files, is_fresh=True)
    ssh.stop(hosts[1:], 20)
    until(lambda: marks[0].exists())
    time.sleep(0.5)
    assert not marks[1].exists()
