"""Pods of real processes: started, restarted, taken away and ended as a cluster would."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from limits import HANG_S

from embark.errors import Interrupted
from embark.rehearse.controller import Observer
from embark.rehearse.manifest import read_texts
from embark.rehearse.rehearsal import RehearsalReport, rehearse
from embark.rehearse.training import PreparedTraining, prepare_training

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {{name: j, namespace: n}}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  backoffLimit: 2
  {policy}
  template:
    spec:
      restartPolicy: Never
      subdomain: j
      terminationGracePeriodSeconds: {grace_s}
      containers:
      - name: c
        image: none
        command: [sh, -c, {line}]
        env: [{{name: SEEN, value: {seen}}}]
        volumeMounts: [{{name: own, mountPath: /own}}, {{name: all, mountPath: /all}}]
      volumes: [{{name: own, emptyDir: {{}}}}, {{name: all, persistentVolumeClaim: {{claimName: all}}}}]
---
apiVersion: v1
kind: Service
metadata: {{name: j, namespace: n}}
spec: {{clusterIP: None, selector: {{job-name: j}}}}
"""
IGNORE = """podFailurePolicy: {rules: [
    {action: Ignore, onPodConditions: [{type: DisruptionTarget}]},
    {action: FailJob, onExitCodes: {operator: In, values: [64]}}]}"""
SEEN = "nothing"


class Recorder:
    """Everything it reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []

    @property
    def observer(self) -> Observer:
        return Observer(lambda pod, rank, text: self.lines.append(f"{pod} {text}"), self.notes.append)


def run(line: str, *, policy: str = "", grace_s: int = 30, limit_s: float = HANG_S, manifest: str = JOB,
        seen: Path | str = SEEN, **faults: tuple[str, ...]) -> tuple[RehearsalReport, Recorder]:
    import json

    text = manifest.format(line=json.dumps(textwrap.dedent(line)), policy=policy, grace_s=grace_s, seen=str(seen))
    result = Recorder()
    return rehearse(prepared_job(text, **faults), result.observer, limit_s=limit_s), result


def prepared_job(text: str, **faults: tuple[str, ...]) -> PreparedTraining:
    return prepare_training({"j.yaml": text}, read_texts({"j.yaml": text}), faults=faults)


def test_pods_that_end_well_end_well_and_nothing_is_left():
    done, result = run("echo index $JOB_COMPLETION_INDEX; pwd")
    assert done.verdict.is_ok, done.verdict
    assert {"j-0 index 0", "j-1 index 1"} <= set(result.lines)
    folder = next(Path(line.split()[1]) for line in result.lines if "/embark-rehearse-" in line)
    assert not folder.exists()
    assert any("processes of" in str(change) for change in done.changes)


def test_only_names_that_a_service_resolves_become_the_loopback():
    done, result = run("echo --a=j-0.j:29500 --b=j-1.j.n.svc.cluster.local --c=j-0:29500 --d=k-0.j:29500 --e=j.js "
                      "--master_addr=j --rdzv-id=j")
    assert done.verdict.is_ok
    words = result.lines[0].split()
    assert words[1].startswith("--a=127.0.0.1:")
    assert words[1] != "--a=127.0.0.1:29500"
    assert words[2:] == ["--b=127.0.0.1", "--c=j-0:29500", "--d=k-0.j:29500", "--e=j.js",
                         "--master_addr=127.0.0.1", "--rdzv-id=j"]
    assert len({line.split()[1] for line in result.lines}) == 1  # both pods mean one port


def test_a_volume_is_shared_and_an_empty_dir_is_not():
    done, result = run("touch /own/$JOB_COMPLETION_INDEX /all/$JOB_COMPLETION_INDEX; sleep 0.5; "
                      "echo $(ls /own) of $(ls /all)")
    assert done.verdict.is_ok
    assert sorted(result.lines) == ["j-0 0 of 0 1", "j-1 1 of 0 1"]


def test_a_failed_pod_is_restarted_with_an_empty_dir_until_the_limit():
    done, result = run("test -e /own/here && echo old; touch /own/here; exit 3")
    assert not done.verdict.is_ok
    assert not any("old" in line for line in result.lines)
    assert len(done.ends) == 3
    assert "backoffLimit of 2" in done.reason


def test_a_code_of_the_policy_fails_the_job_at_once():
    done, _ = run("test $JOB_COMPLETION_INDEX = 0 && exit 64; sleep 60", policy=IGNORE)
    assert done.finish == "failed"
    assert [end.code for end in done.ends] == [64]
    assert "matching FailJob rule at index 1" in done.reason


def test_a_preempted_pod_gets_a_notice_and_comes_back_under_its_name():
    line = """
    if [ -e /all/signalled-$JOB_COMPLETION_INDEX ] || [ $JOB_COMPLETION_INDEX = 0 ]; then exit 0; fi
    trap 'touch /all/signalled-1; exit 75' TERM
    while :; do sleep 0.05; done
    """
    done, result = run(line, policy=IGNORE, preempt=("1@2s",))
    assert done.verdict.is_ok, done.verdict
    assert [(end.name, end.code, end.is_preempted) for end in done.ends] == [
        ("j-0", 0, False), ("j-1", 75, True), ("j-1", 0, False)]
    assert any("j-1 is preempted: SIGTERM, and SIGKILL in 30 s" in note for note in result.notes)


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period():
    line = """
    if [ -e /all/again ] || [ $JOB_COMPLETION_INDEX = 0 ]; then exit 0; fi
    touch /all/again; trap '' TERM; while :; do sleep 0.05; done
    """
    done, result = run(line, policy=IGNORE, grace_s=1, preempt=("1@2s",))
    assert done.verdict.is_ok
    killed = next(end for end in done.ends if end.is_preempted)
    assert killed.code == 137
    assert killed.at_s >= 2.9
    assert any("grace period of 1 s is over" in note for note in result.notes)


def test_a_pod_that_exits_with_0_after_sigterm_is_found_out():
    line = "trap 'exit 0' TERM; test $JOB_COMPLETION_INDEX = 0 && exit 0; while :; do sleep 0.05; done"
    done, _ = run(line, policy=IGNORE, preempt=("1@2s",))
    assert done.finish == "succeeded"  # so Kubernetes believes
    assert not done.verdict.is_ok
    assert "exited with 0 after SIGTERM" in done.verdict.sentence
    assert "75" in done.verdict.fix


def test_a_killed_pod_leaves_no_process_of_its_session_or_of_others(tmp_path):
    line = """
    test $JOB_COMPLETION_INDEX = 0 && exit 0
    test -e /all/again && exit 0
    touch /all/again
    setsid sleep 300 & echo $! > "$SEEN"
    wait
    """
    done, _ = run(line, policy=IGNORE, seen=tmp_path / "pid", kill=("1@2s",))
    assert done.verdict.is_ok, done.verdict
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_what_a_pod_leaves_behind_ends_with_its_first_process(tmp_path):
    done, _ = run("setsid sleep 300 & echo $! > \"$SEEN\"; sleep 0.2; exit 0", seen=tmp_path / "pid")
    assert done.verdict.is_ok
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_fault_that_comes_too_late_was_not_rehearsed():
    done, _ = run("exit 0", preempt=("1@600s",))
    assert not done.verdict.is_ok
    assert "before --preempt 1@600s: that fault was not rehearsed" in done.verdict.sentence


def test_the_time_limit_ends_it():
    done, _ = run("sleep 300", limit_s=1.0)
    assert done.finish == "too long"
    assert "j-0 and j-1 had not ended" in done.verdict.sentence


def test_a_program_that_is_not_there_is_named():
    done, _ = run("exec no-such-program")
    assert not done.verdict.is_ok
    assert "The image does not hold the program or script that the job runs" in done.verdict.sentence
    assert "no-such-program" in done.verdict.evidence


JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: s}}
spec:
  failurePolicy: {{maxRestarts: 1}}
  replicatedJobs:
  - name: w
    template:
      spec:
        parallelism: 2
        completions: 2
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {grace_s}
            containers:
            - {{name: c, image: none, command: [sh, -c, {line}], env: [{{name: SEEN, value: {seen}}}],
               volumeMounts: [{{name: all, mountPath: /all}}]}}
            volumes: [{{name: all, persistentVolumeClaim: {{claimName: all}}}}]
"""


def test_a_jobset_ends_all_pods_and_starts_them_again():
    line = """
    echo start >> /all/starts-$JOB_COMPLETION_INDEX
    if [ $(wc -l < /all/starts-$JOB_COMPLETION_INDEX) = 2 ]; then exit 0; fi
    test $JOB_COMPLETION_INDEX = 1 && sleep 0.5 && exit 70
    trap 'echo signalled; exit 75' TERM; while :; do sleep 0.05; done
    """
    done, result = run(line, manifest=JOBSET)
    assert done.verdict.is_ok, done.verdict
    assert "s-w-0-0 signalled" in result.lines
    assert [end.code for end in done.ends] == [70, 75, 0, 0]


def test_a_jobset_gives_up_when_its_restarts_are_used():
    done, _ = run("exit 70", manifest=JOBSET)
    assert done.finish == "failed"
    assert "has used its 1 restarts" in done.reason


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    pid = os.getpid()
    result = Recorder()

    def stop(pod: str, rank: str, text: str) -> None:
        result.lines.append(text)
        if len(result.lines) == 2:
            os.kill(pid, signal.SIGINT)

    text = JOB.format(line='"pwd; exec sleep 300"', policy="", grace_s=1, seen="x")
    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        rehearse(prepared_job(text), Observer(stop, result.notes.append))
    root = Path(result.lines[0]).parents[3]
    assert root.name.startswith("embark-rehearse-")
    assert not root.exists()
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if str(root).encode() in read(path)]
    assert not marked


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    until_s = time.monotonic() + HANG_S
    while time.monotonic() < until_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def test_a_deadline_of_the_manifest_ends_it():
    done, _ = run("sleep 300", policy="activeDeadlineSeconds: 1")
    assert done.finish == "failed"
    assert "DeadlineExceeded" in done.reason


def test_a_lost_machine_has_no_replacement():
    line = """
    if [ $JOB_COMPLETION_INDEX = 1 ]; then while :; do sleep 0.05; done; fi
    sleep 4
    """
    policy = IGNORE + "\n  successPolicy: {rules: [{succeededIndexes: '0'}]}"
    done, result = run(line, policy=policy, lose=("1@1s",))
    assert done.finish == "succeeded", done
    assert [(end.name, end.code) for end in done.ends] == [("j-1", 137), ("j-0", 0)]
    assert any("j-1 is killed, as when its machine dies, and there is no other" in note for note in result.notes)
