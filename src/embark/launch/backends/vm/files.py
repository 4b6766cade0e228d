"""What a plain machine is handed by ssh: the same programs that a rendered machine finds at its first start."""

from __future__ import annotations

from collections.abc import Mapping

from embark.launch.backends.vm.clouds import RUN_FOLDER
from embark.launch.backends.vm.ssh import job_json, supervisor_text
from embark.render.clouds.aws.vm import plugin_text
from embark.render.command import SPEC_PATH
from embark.render.job import Job
from embark.render.pod import config_data
from embark.render.shell_text import quote, script
from embark.render.targets.vm_node import node_program, setup_program

READY = "/run/embark-ready"
"""Gone when the machine is started again, and with it what was on its own disks."""
OFF_AFTER_S = 1800
"""From the run's end to the machine's own: to read what it said, and not to pay all night."""


def machine_files(job: Job, index: int, master: str) -> Mapping[str, str]:
    """`index` is the machine's number, `master` what the others reach the first one by."""
    config = config_data(job)
    folder = SPEC_PATH.rpartition("/")[0]
    start = script(
        "Readies this machine once after each of its starts, then becomes its ranks.",
        f"cd {RUN_FOLDER}\nmkdir -p {folder}\ncp {' '.join(quote(name) for name in config)} {folder}/",
        f"if [ ! -e {READY} ]; then\n  ./setup.sh\n  touch {READY}\nfi",
        "exec ./node.sh")
    place = f"RANK={index}\nMASTER={quote(master)}{plugin_text(job)}"
    return {
        **config, "keeper.py": supervisor_text(), "setup.sh": setup_program(job), "node.sh": node_program(job, place),
        "start.sh": start,
        "order.json": job_json([f"{RUN_FOLDER}/start.sh"], cwd="/", after=["shutdown", "--poweroff", "now"],
                                 after_s=OFF_AFTER_S),
    }
