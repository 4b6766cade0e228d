"""A cluster that Slurm manages: the run as a batch script, which starts itself again by exit code."""

import base64
from typing import NamedTuple

from embark.catalog import load_catalog
from embark.errors import ExitCode
from embark.render.command import SPEC_VARIABLE, meeting_conf, meeting_options, one_machine, ranks_words
from embark.render.folder import File, Files
from embark.render.job import EXITS, Job, Setting, make_job
from embark.render.pod import storage_settings
from embark.render.settings import MAX_THREADS, settings_of
from embark.render.shell_text import Shell, quote, render_template
from embark.render.yaml_text import header
from embark.spec import RunSpec, to_toml, with_absolute_paths
from .kubernetes import RETRIES_PER_NODE

SCRIPT = "slurm_job.sh"
GRACE_S = 120  # Time to save before the time limit, and after a notice of preemption if the partition gives as much.
GOOD_S = 600  # An attempt that lasted so long forgives earlier faults.
LAST_TASK_S = 600  # Time for the other tasks when one has ended: they may wait for it at their next rendezvous.
IS_FIRST = '$([ "$SLURM_PROCID" = 0 ] && echo true || echo false)'
ONE_OF_ARRAY = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # SLURM_JOB_ID of one of them stands for all.
FINAL = [row.code for row in EXITS if not row.must_retry]
RAISED = 128  # Added to a final code by a task, so that srun, which ends with the highest of its tasks, shows it.
COMPUTED = ("EMBARK_GRACE_S", "OMP_NUM_THREADS", "NCCL_TOPO_FILE")
"""Settings that are the nodes' own here: their processors and their files are not known before the job runs."""


class Search(NamedTuple):
    """A search by `embark tune`, as an array of jobs that share its trials."""

    spec: RunSpec
    options: tuple[str, ...]  # Options of `embark tune`.
    num_jobs: int


def search_job(spec: RunSpec) -> RunSpec:
    """Return what each job of a search asks for: one node, with one GPU if there are any, as one process trains."""
    num_gpus = min(1, make_job(spec, load_catalog()).machine.num_gpus)
    slurm = spec.place.slurm.changed(gpus_per_node=num_gpus)
    place = spec.place.changed(nodes=1, slurm=slurm)
    return spec.changed(name=f"{spec.name}-tune", place=place)


def render_slurm(job: Job) -> Files:
    about = (f"Trains {job.title}. sbatch {SCRIPT} submits it, from a directory that every node sees: the run's "
             "relative paths go by it.")
    return [File(SCRIPT, script(job, about), is_executable=True)]


def encode(spec: RunSpec) -> str:
    return base64.b64encode(to_toml(with_absolute_paths(spec), only_set=True).encode()).decode()


def script(job: Job, about: str = "", search: Search | None = None) -> str:
    saved = [row.code for row in EXITS if row.code == ExitCode.PREEMPTED]
    faults = [row.code for row in EXITS if row.must_retry and row.code not in saved]
    return render_template(
        "slurm/slurm_job.sh.j2", about=Shell(header(about)), job=job, place=job.place, search=search,
        grace_s=grace_s(job), settings=settings(job), spec_variable=SPEC_VARIABLE,
        spec=encode(search.spec if search else job.spec), setup=job.place.slurm.setup,
        job_id=Shell(ONE_OF_ARRAY if search else "$SLURM_JOB_ID"), max_threads=MAX_THREADS, words=_srun(job, search),
        raised=RAISED, first_raised=RAISED + min(FINAL), final_codes=_pattern(FINAL), saved_codes=_pattern(saved),
        fault_codes=_pattern(faults), max_faults=RETRIES_PER_NODE * job.num_nodes, good_s=GOOD_S)


def grace_s(job: Job) -> int:
    return max(1, int(job.place.grace_s or GRACE_S))


def settings(job: Job) -> list[Setting]:
    grace = Setting("EMBARK_GRACE_S", str(grace_s(job)), "how long there is to save after a notice")
    given = (*settings_of(job, is_pod=False), *storage_settings(job))
    own = [Setting("PYTHONNOUSERSITE", "1", "the image's packages, and not those of the home directory, which a "
                   "container sees too")] if job.place.slurm.container else []
    return [grace, *own, *(setting for setting in given if setting.name not in COMPUTED)]


def _srun(job: Job, search: Search | None) -> list[str]:
    """Return the command that starts one torchrun on each node, in the container if there is one."""
    slurm = job.place.slurm
    words: list[str] = ["srun", "--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={LAST_TASK_S}"]
    if slurm.cpus_per_node is not None:
        words.append(f"--cpus-per-task={slurm.cpus_per_node}")
    image, mounts = slurm.image_file, ["$PWD", *slurm.mounts]
    if slurm.container == "pyxis":
        words += [f"--container-image={image or _enroot_name(job.image)}", Shell('"--container-workdir=$PWD"'),
                  Shell(f'"--container-mounts={",".join(f"{one}:{one}" for one in mounts)}"')]
    elif slurm.container == "apptainer":
        words += ["apptainer", "exec", *(["--nv"] if job.machine.num_gpus else []), "--pwd", Shell('"$PWD"'),
                  "--bind", Shell(f'"{",".join(mounts)}"'), image or f"docker://{_one_name(job.image)}"]
    return [*words, "bash", "-c", task(job, search)]


def task(job: Job, search: Search | None = None) -> str:
    """Return the shell text that every node runs."""
    return render_template("slurm/ranks.sh.j2", spec_variable=SPEC_VARIABLE, line=_ranks(job, search),
                           final_codes=_pattern(FINAL), raised=RAISED)


def _ranks(job: Job, search: Search | None) -> str:
    """Return the line of a node's torchrun. The shell of the task knows where the ranks meet and who is first."""
    if search:
        words = ["python", "-m", "embark", "tune", "$SPEC", *search.options]
    elif job.num_nodes == 1:
        words = one_machine(job, "$SPEC")
    else:
        words = ranks_words(*meeting_options(job, "$MASTER", "$PORT"), meeting_conf(IS_FIRST), spec_path="$SPEC")
    slurm = job.place.slurm
    words[0] = f"{slurm.venv}/bin/python" if slurm.venv and not slurm.container else "python"
    return " ".join(f'"{word}"' if "$" in word else quote(word) for word in words)


def _pattern(codes: list[int]) -> str:
    """Return a pattern of the shell's `case`."""
    return " | ".join(str(int(code)) for code in codes)


def _one_name(image: str) -> str:
    """Drop the tag of an image that has a digest too: Apptainer takes one of them."""
    name, mark, digest = image.partition("@")
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}{mark}{digest}" if mark else image


def _enroot_name(image: str) -> str:
    """Write an image as Enroot reads it: a `#` behind the registry, and no digest."""
    host, slash, rest = image.partition("@")[0].partition("/")
    is_registry = bool(slash) and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if is_registry else image.partition("@")[0]
