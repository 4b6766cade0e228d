"""Pods as processes of one machine, where two rehearsals share the ports."""

from __future__ import annotations

import json
from dataclasses import replace

from render_jobs import job_of

from embark.kubernetes.objects import Objects
from embark.rehearse.batch_job import batch_job
from embark.rehearse.processes import LOOPBACK, Processes, Start
from embark.rehearse.workload import make_workload
from embark.render.job import PORT


def test_batch_jobs_that_are_rehearsed_together_meet_at_ports_of_their_own(tmp_path):
    workload, _ = make_workload(json.loads(batch_job(job_of("p4d.24xlarge", target="slurm"))), Objects([]))
    endpoints = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        processes = Processes(tmp_path / name, workload.names)
        for number, pod in enumerate(workload.pods):
            said = replace(pod, command=("sh", "-c", "echo $MASTER:$PORT"), args=())
            lines = processes.start(Start(said, number, 0))
            endpoints += list(lines)
            lines.close()
        processes.close()
    first, again, second, also = endpoints
    assert (first, second) == (again, also)
    assert len({first, second, f"{LOOPBACK}:{PORT}"}) == 3
    assert all(one.startswith(f"{LOOPBACK}:") for one in endpoints)
