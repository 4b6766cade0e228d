"""`embark rehearse` as a person types it: what it takes, what it refuses, what it says."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

from embark.__main__ import run

POD = """
apiVersion: batch/v1
kind: Job
metadata: {name: j}
spec:
  completionMode: Indexed
  backoffLimit: 1
  template:
    spec:
      restartPolicy: Never
      containers: [{name: c, image: registry.example.com/none:1, command: [sh, -c, "echo hello; %s"]}]
"""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch, tmp_path):
    """Nothing but a shell on the path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "echo", "sleep"):
        (programs / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def manifest(text: str = POD % "exit 0", name: str = "job.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def test_it_says_what_differs_from_the_cluster_and_how_it_ended(capfd):
    assert run(["rehearse", manifest()]) == 0
    out = capfd.readouterr().out
    assert "Job j: 1 pod of 2 processes" in out
    assert "Differences from the cluster:" in out
    assert "limits of memory and CPU: those of the manifest → none" in out
    assert "j-0 | hello" in out
    assert "rehearsed: 1 pod ended well" in out


def test_what_fails_ends_with_1_a_sentence_and_a_fix(capfd):
    assert run(["rehearse", manifest(POD % "exec no-such-program")]) == 1
    out = capfd.readouterr().out
    assert "FAILED: The image does not hold the program or script that the job runs" in out
    assert "no-such-program: not found" in out
    assert "  fix: build the image with the script in it" in out


def test_for_a_program_it_answers_in_json_alone(capfd):
    assert run(["rehearse", manifest(POD % "exit 64"), "--json"]) == 1
    answer = json.loads(capfd.readouterr().out)
    assert answer["verdict"]["is_ok"] is False
    assert (answer["kind"], answer["pods"]) == ("Job", ["j-0"])
    assert [end["code"] for end in answer["ends"]] == [64, 64]
    assert {check["name"] for check in answer["verdict"]["checks"]} >= {"controller"}


def test_a_folder_is_taken_complete_and_the_job_that_trains_is_found(capfd):
    manifest(POD % "exit 0", "deploy/copy.yaml")
    training = (POD % "exit 0").replace("name: j}", "name: train}").replace(
        "image: ", "resources: {limits: {nvidia.com/gpu: 1}}, image: ")
    manifest(training, "deploy/job.yaml")
    assert run(["rehearse", "deploy", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["name"] == "train"


@pytest.mark.parametrize(("words", "what"), [
    (["nothing.yaml"], "nothing.yaml: no such file"),
    (["job.yaml", "--nodes", "3"], "these are manifests"),
    (["job.yaml", "--processes", "0"], "must be greater than 0"),
    (["job.yaml", "--limit", "soon"], "--limit soon: not a duration"),
    (["job.yaml", "--preempt", "5@1s"], "there is no pod 5"),
    (["job.yaml", "--limit", "0s"], "must be greater than 0"),
    (["job.yaml", "--artifact", "runs/a/export"], "--artifact applies to servers"),
    (["two.yaml"], "has 2 jobs in it: Job j, Job k"),
    (["service.yaml"], "has no job in it, only Service"),
    (["part.yaml"], "only a part of one"),
    (["bad.yaml"], "is not readable YAML"),
    (["empty"], "has no manifest in it"),
    (["quickstart"], "files are for a machine of a cloud"),
    (["quickstart", "--set", "place.cloud=aws", "--set", "place.target=torchx", "--set", "store.root=s3://b/r"],
     "has no pods to rehearse"),
])
def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(words, what, capfd):
    manifest()
    manifest((POD % "exit 0") + "---" + (POD % "exit 0").replace("name: j}", "name: k}"), "two.yaml")
    manifest("apiVersion: v1\nkind: Service\nmetadata: {name: s}\n", "service.yaml")
    manifest("spec: {parallelism: 4}\n", "part.yaml")
    manifest("a: [", "bad.yaml")
    Path("empty").mkdir()
    assert run(["rehearse", *words]) == 64
    assert what in capfd.readouterr().err


def test_the_linters_errors_are_shown_first(capfd):
    guide = Path(__file__).parents[2] / "fixtures/lint/guides/aws__option_b_using_kubeflow_training_operato.yaml"
    assert run(["rehearse", str(guide)]) == 1
    out = capfd.readouterr().out
    assert out.index("EMB201") < out.index("FAILED: PyTorchJob torchrec-dlrm-training starts no pod")


def test_a_spec_is_rendered_as_render_would(capfd):
    words = ["rehearse", "quickstart", "--nodes", "2", "--limit", "1s", "--json"]
    for one in ("place.cloud=gcp", "store.root=gs://b/runs"):
        words += ["--set", one]
    assert run(words) == 1  # a second is not enough to meet
    answer = json.loads(capfd.readouterr().out)
    assert answer["pods"] == ["quickstart-0", "quickstart-1"]
    assert answer["lint"] == []
    changes = {change["what"]: change["there"] for change in answer["changes"]}
    assert changes["store.root"] == "gs://b/runs"


def test_the_guides_commands_are_commands():
    from embark.cli.app import app

    guide = (Path(__file__).parents[3] / "docs" / "guides" / "rehearse.md").read_text()
    lines = re.findall(r"^(?:\$ )?(embark rehearse [^#\n]+)", guide, re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_it_leaves_nothing(number):
    """The command in a process of its own, as a terminal or a CI job would stop it."""
    words = [sys.executable, "-m", "embark", "rehearse", manifest(POD % "pwd; exec sleep 300")]
    with subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        folder = next(line.split("| ")[1].strip() for line in process.stdout if "/embark-rehearse-" in line)
        process.send_signal(number)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert f"Stopped by {number.name}" in err
    assert not Path(folder).exists()
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if is_in(path, folder)]


def test_an_error_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    words = [sys.executable, "-m", "embark", "rehearse", manifest(), "--kill", "7@1s"]
    assert subprocess.run(words, capture_output=True, timeout=HANG_S, check=False).returncode == 64
    assert list((tmp_path / "own").iterdir()) == []


def is_in(path: Path, folder: str) -> bool:
    try:
        return str(path.readlink()).startswith(folder)
    except OSError:
        return False
