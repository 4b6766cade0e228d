"""A run on a cluster of Debian's own Slurm: it trains, survives its nodes, is requeued by exit code, and is ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import HANG_S
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = pytest.mark.needs("slurm")

BLOCK = re.compile(r"^```(\w+) (run|file=(\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = ("model.rows_per_table=100", "model.num_tables=4", "model.embedding_dim=8", "model.bottom_mlp=[16]",
         "model.top_mlp=[16]", "data.num_train_samples=1000000", "data.num_eval_samples=512", "train.batch_size=96",
         "train.eval_every=0", "watch.every=1", "watch.tensorboard=false", "place.device=cpu", "place.timeout_s=60")
LONG = ("train.num_steps=400", "store.checkpoint_every=20")
ENDLESS = ("train.num_steps=1000000", "store.checkpoint_every=20")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SHORT = ("train.num_steps=30",)
REAL = f"place.slurm.venv={sys.prefix}"
"""Its processes are children of Slurm's, which signals each of them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def venv(tmp_path_factory, warm_python) -> Path:
    """A virtual environment whose programs are forked from a process that has imported torch."""
    programs = tmp_path_factory.mktemp("venv") / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(warm_python)
    (programs / "embark").write_text(f'#!/bin/sh\nexec {programs}/python -m embark "$@"\n')
    (programs / "embark").chmod(0o755)
    return programs.parent


class Login:
    """A user at the login node: a directory that every node sees, and the commands."""

    def __init__(self, cluster: SlurmCluster, folder: Path, venv: Path) -> None:
        self.cluster, self.folder, self.venv, self.python = cluster, folder, venv, str(venv / "bin" / "python")
        self.env = {**os.environ, **cluster.environment, "XDG_DATA_HOME": str(folder / "data"),
                    "OMP_NUM_THREADS": "1", "EMBARK_LEASE_S": "10"}

    def embark(self, *words: str, code: int | None = 0) -> Any:
        done = subprocess.run([self.python, "-m", "embark", *words], cwd=self.folder, env=self.env,
                              capture_output=True, text=True, timeout=HANG_S)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout) if "--json" in words else done.stdout + done.stderr

    def launch(self, name: str, *sets: str, nodes: int = 2, code: int = 0) -> str:
        """Launch a run; returns its job's number."""
        every = (*SMALL, f"name={name}", "place.target=slurm", f"place.nodes={nodes}",
                 f"place.slurm.venv={self.venv}", *sets)
        self.embark("launch", "quickstart", *settings(every), code=code)
        return self.job_id(name)

    def tune(self, name: str, *words: str) -> str:
        """Submit a search of two workers; returns the number of its array."""
        every = (*SMALL, "place.target=slurm", "place.nodes=3", f"place.slurm.venv={self.venv}", f"name={name}")
        self.embark("tune", "quickstart", *settings(every), "--workers=2", "--search=train.learning_rate=0.001..0.1",
                    *words)
        return self.job_id(f"{name}-tune")

    def job_id(self, name: str) -> str:
        found = self.folder / "data" / "embark" / "runs" / "slurm" / name / "job_id"
        return found.read_text() if found.exists() else ""

    def state(self, name: str) -> str:
        return str(self.embark("status", name, "--json", code=None)["state"])

    def wait_for_end(self, name: str, job_id: str) -> str:
        """Wait until Slurm has ended the job for good; returns the state that `embark status` shows."""
        self.cluster.wait_for(f"{name} ends", lambda: self.cluster.job(job_id)["JobState"] in ENDS)
        return self.state(name)

    def wait_for_checkpoint(self, name: str, job_id: str) -> None:
        committed = self.folder / "runs" / name / "checkpoints"
        self.cluster.wait_for(f"a checkpoint of {name}\n{self.log(name, job_id)}",
                              lambda: committed.is_dir() and list(committed.glob("step*")))

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def losses(self, name: str) -> dict[int, float]:
        """The loss of each step; a step that was repeated after a resume has the same."""
        found: dict[int, float] = {}
        for event in self.events(name, "step"):
            assert found.setdefault(event["step"], event["loss"]) == event["loss"]
        return found

    def log(self, name: str, job_id: str) -> str:
        path = self.folder / f"{name}-{job_id}.log"
        return path.read_text() if path.exists() else ""

    def train_here(self, name: str, *sets: str) -> dict[int, float]:
        """The losses of two ranks on this machine, without Slurm."""
        words = [self.python, "-m", "embark.torchrun", "--standalone", "--nproc-per-node=2", "-m", "embark", "train",
                 "quickstart", *settings((*SMALL, f"name={name}", *sets))]
        subprocess.run(words, cwd=self.folder, env=self.env, check=True, timeout=HANG_S, capture_output=True)
        return self.losses(name)


def settings(sets: tuple[str, ...]) -> list[str]:
    return [word for one in sets for word in ("--set", one)]


@pytest.fixture
def login(cluster, tmp_path, venv) -> Iterator[Login]:
    yield Login(cluster, tmp_path, venv)
    cluster.ask("scancel", "--state=PENDING", "--user=" + cluster.user)
    cluster.ask("scancel", "--user=" + cluster.user)
    cluster.wait_for("the queue is empty", lambda: not cluster.ask("squeue", "--noheader"))


def test_two_nodes_train_bit_for_bit_as_two_local_ranks_do(login):
    job_id = login.launch("dlrm", *SHORT)
    assert login.wait_for_end("dlrm", job_id) == "succeeded", login.log("dlrm", job_id)
    assert login.events("dlrm", "start")[0]["world_size"] == 2
    expected = login.train_here("here", *SHORT)
    assert len(expected) == 30
    assert login.losses("dlrm") == expected
    shown = login.embark("logs", "dlrm")
    assert "embark: the ranks ended with exit code 0" in shown
    assert "dlrm rank 0 |" in shown


def test_a_run_resumes_on_other_nodes_when_one_dies(login, cluster):
    job_id = login.launch("lost", *LONG)
    login.wait_for_checkpoint("lost", job_id)
    cluster.kill_node("n2")
    try:
        cluster.wait_for("the job is requeued", lambda: cluster.job(job_id)["Restarts"] != "0")
        ended = login.wait_for_end("lost", job_id)
    finally:
        cluster.start_node("n2")
        idle = ("sinfo", "--noheader", "-N", "--states=idle", "--format=%N")
        cluster.wait_for("n2 is back", lambda: "n2" in cluster.ask(*idle).split())
    assert ended == "succeeded", login.log("lost", job_id)
    assert len(login.events("lost", "start")) >= 2
    expected = login.train_here("undisturbed", *LONG)
    assert len(expected) == 400
    assert login.losses("lost") == expected


def test_a_wrong_spec_is_not_requeued(login, cluster):
    job_id = login.launch("wrong", *SHORT, "train.warm_start=nowhere")
    assert login.wait_for_end("wrong", job_id) == "failed"
    assert cluster.job(job_id)["ExitCode"] == "64:0"
    assert cluster.job(job_id)["Restarts"] == "0"
    assert "the spec or the data is wrong" in login.embark("status", "wrong", code=1)
    assert "nowhere" in login.embark("logs", "wrong")
    assert "wrong: failed: the spec or the data is wrong" in login.embark("diagnose", "wrong", code=1)


def test_a_preempted_run_saves_and_is_requeued(login, cluster):
    job_id = login.launch("preempted", *ENDLESS, REAL, nodes=3)
    login.wait_for_checkpoint("preempted", job_id)
    urgent = cluster.ask("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive",
                         f"--output={login.folder}/urgent.log", "--wrap", "true")
    cluster.wait_for("the urgent job ran", lambda: cluster.job(urgent)["JobState"] == "COMPLETED")
    cluster.wait_for("it resumes", lambda: len(login.events("preempted", "start")) == 2)
    assert cluster.job(job_id)["Restarts"] == "1"
    assert login.state("preempted") == "running"
    assert "the ranks ended with exit code 75" in login.log("preempted", job_id)
    assert login.events("preempted", "start")[1]["first_step"] >= 20


def test_cancel_saves_and_leaves_nothing(login, cluster):
    job_id = login.launch("ended", *ENDLESS, REAL)
    login.wait_for_checkpoint("ended", job_id)
    assert "already exists" in login.embark("launch", "quickstart", *settings((
        *SMALL, "name=ended", "place.target=slurm")), code=64)
    steps = set(os.listdir(login.folder / "runs" / "ended" / "checkpoints"))
    login.embark("cancel", "ended", "--yes")
    assert not cluster.ask("squeue", "--noheader")
    cluster.wait_for("no process is left", lambda: not cluster.job_processes())
    assert set(os.listdir(login.folder / "runs" / "ended" / "checkpoints")) - steps
    assert cluster.job(job_id)["Restarts"] == "0"


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program of this name that parses its words strictly, found before any other."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nimport os, re, sys\n{body}")
    program.chmod(0o755)


# `srun` with the options of Pyxis as its args.c parses them: an image or a file, pairs of absolute paths, a folder.
PYXIS = r"""
rest, given = [], {}
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    if not rest and name.startswith("--container-"):
        assert value and name not in given, word
        given[name] = value
    elif rest or not word.startswith("--"):
        rest.append(word)
    else:
        given[word] = ""
image, mounts = given.pop("--container-image"), given.pop("--container-mounts").split(",")
assert re.fullmatch(r"([^@#]+@)?([^@#/]+#)?[^@#]+(:[\w.-]+)?", image) and image == "ghcr.io#me/embark:1", image
for mount in mounts:
    source, target = mount.split(":")
    assert source == target and os.path.isdir(source), mount
assert os.path.isdir(given.pop("--container-workdir"))
os.environ["PATH"] = PYTHON + ":" + os.environ["PATH"]
os.execv("/usr/bin/srun", ["srun", *given, *rest])
"""
# `apptainer exec` with the options of its action_flags.go that are used here.
APPTAINER = r"""
words = sys.argv[1:]
assert words.pop(0) == "exec"
given = {}
while words[0].startswith("--"):
    name = words.pop(0)
    assert name in ("--pwd", "--bind"), name  # without GPUs no --nv
    given[name] = words.pop(0)
assert words.pop(0) == "docker://ghcr.io/me/embark:1"
for path in given["--bind"].split(","):
    assert os.path.isdir(path), path
os.chdir(given["--pwd"])
os.environ["PATH"] = PYTHON + ":" + os.environ["PATH"]
os.execvp(words[0], words)
"""


@pytest.mark.parametrize(("container", "name", "body"), [("pyxis", "srun", PYXIS),
                                                         ("apptainer", "apptainer", APPTAINER)])
def test_a_container_gets_options_that_its_program_takes(login, container, name, body):
    """Neither Pyxis nor Apptainer is here: a stand-in checks the options, then runs the ranks without a container."""
    stand_in(login.folder, name, body.replace("PYTHON", repr(str(login.venv / "bin"))))
    login.env["PATH"] = f"{login.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job_id = login.launch("boxed", *SHORT, f"place.slurm.container={container}", "place.image=ghcr.io/me/embark:1",
                          f'place.slurm.mounts=["{login.folder.parent}"]')
    assert login.wait_for_end("boxed", job_id) == "succeeded", login.log("boxed", job_id)
    assert len(login.losses("boxed")) == 30


def test_the_jobs_of_an_array_share_the_trials_of_a_search(login, cluster):
    array = login.tune("found", "--trials=3", *settings(SHORT))
    cluster.wait_for("the search ends", lambda: login.state("found-tune") == "succeeded")
    logs = [login.log("found-tune", f"{array}_{index}") for index in range(2)]
    assert all("embark: the ranks ended with exit code 0" in log for log in logs)
    result = json.loads((login.folder / "runs/found-tune/tune.json").read_text())
    assert result["stopped_by"] == "trials"
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 3
    assert [len(login.events(f"found-tune/trial-000{index}", "start")) for index in range(3)] == [1, 1, 1]
    best = tomllib.loads((login.folder / "runs/found-tune/best.toml").read_text())
    assert best["place"]["nodes"] == 3
    shown = login.embark("logs", "found-tune")
    assert "found-tune_0 |" in shown
    assert "found-tune_1 |" in shown
    assert "found-tune: succeeded" in login.embark("diagnose", "found-tune")


def test_workers_of_a_search_are_requeued_and_cancelled_together(login, cluster):
    array = login.tune("long", "--trials=9", *settings(ENDLESS))
    for index in range(2):
        login.wait_for_checkpoint(f"long-tune/trial-000{index}", array)
    status = login.embark("status", "long-tune", "--json")
    assert (status["state"], [one["index"] for one in status["replicas"]]) == ("running", [0, 1])
    cluster.ask("scancel", "--signal=TERM", f"{array}_1")
    cluster.wait_for("the worker is requeued", lambda: cluster.job(f"{array}_1")["Restarts"] == "1")
    assert login.state("long-tune") == "running"
    cluster.wait_for("it begins another trial", lambda: login.events("long-tune/trial-0002", "step"))
    login.embark("cancel", "long-tune", "--yes")
    assert not cluster.ask("squeue", "--noheader")
    cluster.wait_for("no process is left", lambda: not cluster.job_processes())
    assert cluster.job(f"{array}_0")["Restarts"] == "0"
    assert "embark: the ranks ended with exit code 75" in login.log("long-tune", f"{array}_0")


def test_scancel_of_a_user_is_not_undone_by_the_script(login, cluster):
    job_id = login.launch("gone", *ENDLESS)
    login.wait_for_checkpoint("gone", job_id)
    cluster.ask("scancel", job_id)
    assert login.wait_for_end("gone", job_id) == "failed"
    cluster.wait_for("no process is left", lambda: not cluster.job_processes())
    assert not cluster.ask("squeue", "--noheader")


def test_the_guide_is_walked(login, cluster):
    text = (Path(__file__).parents[3] / "docs/guides/slurm.md").read_text()
    env = {**login.env, "PATH": f"{login.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    shown = ""
    for _, action, name, body in BLOCK.findall(text):
        if name:
            (login.folder / name).write_text(body)
            continue
        assert action == "run"
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=login.folder, env=env, text=True,
                              capture_output=True, timeout=HANG_S, check=False)
        shown += done.stdout + done.stderr
        assert done.returncode == 0, shown
    assert login.state("dlrm") == "succeeded"
    assert "nothing found" in shown
    assert not cluster.ask("squeue", "--noheader")


def python_that(folder: Path, line: str) -> str:
    """A virtual environment whose `python` does this instead of training; returns the setting that names it."""
    program = folder / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/bash\n{line}\n")
    program.chmod(0o755)
    return f"place.slurm.venv={folder / 'venv'}"


def test_faults_are_retried_a_few_times(login, cluster):
    cases = {"fault": ("exit 70", "70:0", "3"), "other": ("exit 1", "1:0", "0"), "killed": ("kill -9 $$", "137:0", "3")}
    job_ids = {name: login.launch(name, python_that(login.folder / name, line), nodes=1)
               for name, (line, *_) in cases.items()}
    for name, (_, code, num_restarts) in cases.items():
        assert login.wait_for_end(name, job_ids[name]) == "failed"
        job = cluster.job(job_ids[name])
        assert (job["ExitCode"], job["Restarts"]) == (code, num_restarts), name


@pytest.mark.parametrize(("sets", "is_requeued"), [(("place.max_hours=5",), False), ((), True)])
def test_a_time_limit_is_passed_on_and_max_hours_end_the_run(login, cluster, sets, is_requeued):
    """Slurm sends the notice of `--signal=B:TERM@…` to the shell of the script alone, as `scancel --batch` does."""
    line = "trap 'exit 75' TERM; touch ready; while true; do sleep 0.1; done"
    job_id = login.launch("late", python_that(login.folder, line), *sets, nodes=2)
    cluster.wait_for("the ranks run", (login.folder / "ready").exists)
    (login.folder / "ready").unlink()
    cluster.ask("scancel", "--batch", "--signal=TERM", job_id)
    if is_requeued:
        cluster.wait_for("it runs again", lambda: cluster.job(job_id)["Restarts"] == "1" and
                         (login.folder / "ready").exists())
    else:
        assert login.wait_for_end("late", job_id) == "failed"
        assert cluster.job(job_id)["Restarts"] == "0"
        assert "hours are over" in login.log("late", job_id)


def test_an_unknown_partition_is_refused_before_anything_is_submitted(login, cluster):
    sets = (*SMALL, "place.target=slurm", "place.slurm.partition=nowhere")
    shown = login.embark("launch", "quickstart", *settings(sets), code=64)
    assert "no such partition" in shown
    assert "place.slurm.partition" in shown
    assert "no such partition" in login.embark("doctor", "quickstart", "--cloud", *settings(sets), code=1)
    assert "to start at" in login.embark("doctor", "quickstart", "--cloud", *settings(sets[:-1]))
    with_gpus = (*sets[:-1], "place.slurm.gpus_per_node=4", "place.device=auto")
    gpus = login.embark("doctor", "quickstart", "--cloud", *settings(with_gpus), code=1)
    assert "gpus_per_node" in gpus
    many = login.embark("doctor", "quickstart", "--cloud", *settings((*sets[:-1], "place.nodes=32")), code=1)
    assert "no nodes of the partition" in many
    assert not cluster.ask("squeue", "--noheader")
