"""A batch job of Slurm as a JobSet, so that it is rehearsed as one: it has the same tasks, all start again together,
and an exit code that is final ends them."""

from dataclasses import replace

from embark.render.command import SPEC_VARIABLE
from embark.render.job import PORT, Job
from embark.render.shell_text import render_template
from embark.render.targets.kubernetes import RETRIES_PER_NODE
from embark.render.targets.slurm import FINAL, RAISED, encode, settings, task

START = """
export SLURM_PROCID=$JOB_COMPLETION_INDEX
trap 'trap : TERM; kill -TERM 0' TERM
bash -c "$1" &
while true; do
  CODE=0
  wait "$!" || CODE=$?
  kill -0 "$!" 2>/dev/null || exit "$CODE"
done
"""
"""Shell text. Slurm sends a notice to all processes of a task, and Kubernetes to the first of a pod."""


def batch_job(job: Job) -> str:
    """Return what the tasks of the job are as pods. What they save goes below their own directory."""
    store = job.spec.store.changed(root="runs")
    job = replace(job, spec=job.spec.changed(store=store))
    env = {one.name: one.value for one in settings(job)} | {
        SPEC_VARIABLE: encode(job.spec), "MASTER": f"{job.name}-node-0-0.{job.name}", "PORT": str(PORT)}
    return render_template(
        "slurm/jobset.json.j2", job=job, start=START, task=task(job), max_restarts=RETRIES_PER_NODE * job.num_nodes,
        env=[{"name": name, "value": value} for name, value in env.items()],
        final_codes=[RAISED + code for code in FINAL])
