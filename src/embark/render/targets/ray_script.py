"""The script that Ray Train runs: Ray finds the machines, torchrun starts the ranks on each."""

from __future__ import annotations

from embark.render.command import SPEC_PATH
from embark.render.job import Job
from embark.render.python_text import python_text

FAILURES_PER_NODE = 10


def ray_script(job: Job, spec_path: str = SPEC_PATH) -> str:
    """Python source. Its constants are put in as literals, and nothing else is."""
    return script_text(name=job.name, spec_path=spec_path, num_machines=job.num_nodes, num_processes=job.num_processes,
                       num_cpus=job.num_cpus or job.num_processes, use_gpu=True)


def script_text(*, name: str, spec_path: str, num_machines: int, num_processes: int, num_cpus: int,
                use_gpu: bool) -> str:
    values = {"NAME": name, "SPEC": spec_path, "NUM_MACHINES": num_machines, "NUM_PROCESSES": num_processes,
              "NUM_CPUS": num_cpus, "USE_GPU": use_gpu, "MAX_FAILURES": FAILURES_PER_NODE * num_machines}
    return python_text("ray_train.py.j2", values, about=f"Trains {name} on {num_machines} machines with Ray Train.")
