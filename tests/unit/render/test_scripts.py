"""Every rendered script is sound shell, does what it says when it runs, and changes nothing in a dry run."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from limits import HANG_S
from recorded_commands import STUB, run_script
from render_jobs import MACHINES, VOLUMES, job_of

from embark.lint.check import lint_texts
from embark.render.folder import File
from embark.render.render import render_infrastructure
from embark.render.shell_text import TEMPLATES, script

SETTINGS = {"PROJECT": "my-project", "EMAIL": "me@example.com", "SUBNET_ID": "subnet-1"}
CHANGING = {
    "aws": ("create", "put-", "run-instances", "terminate", "delete", "attach", "add-", "authorize", "subscribe",
            "send-", "update-"),
    "az": ("create", "delete", "add", "register", "update", "invoke", "get-credentials"),
    "gcloud": ("create", "delete", "enable", "add-iam-policy-binding", "get-credentials", "connect", "start", "scp"),
    "kubectl": ("apply", "delete", "create", "annotate", "patch"), "helm": ("upgrade", "repo"),
    "eksctl": ("create", "delete", "scale"),
}


def cases() -> list[tuple[str, dict[str, object]]]:
    found: list[tuple[str, dict[str, object]]] = [(machine, {"target": "job"}) for machine in MACHINES]
    for machine, cloud in (("p4d.24xlarge", "aws"), ("Standard_ND96asr_v4", "azure"), ("a2-highgpu-8g", "gcp")):
        found += [(machine, {"volume": volume}) for volume in VOLUMES[cloud]]
        found.append((machine, {"target": "vm", "image": "registry.example.com/embark:1"}))
        found.append((machine, {"spot": True, "queue": "ml", "image": "ghcr.io/me/embark:1"}))
    found += [("p5.48xlarge", {"target": "vm", "spot": True}), ("Standard_ND96asr_v4", {"target": "vm", "spot": True}),
              ("p4d.24xlarge", {"target": "trainjob"}), ("Standard_ND96asr_v4", {"target": "ray"}),
              ("a2-highgpu-8g", {"target": "pytorchjob"}), ("a3-highgpu-8g", {"target": "jobset"}),
              ("v5litepod-16", {"target": "tpu-vm"}), ("v6e-8", {"target": "tpu-vm", "spot": True, "nodes": 1})]
    return found


CASES = cases()


def name_of(case: tuple[str, dict[str, object]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@cache
def rendered(number: int) -> list[File]:
    machine, place = CASES[number]
    return render_infrastructure(job_of(machine, **place))


@pytest.fixture(params=range(len(CASES)), ids=lambda number: name_of(CASES[number]))
def files(request) -> list[File]:
    return rendered(request.param)


@pytest.mark.needs("shellcheck")
def test_shellcheck_finds_nothing(tmp_path: Path):
    """Each line of all cases, in a script that has it: as few scripts as that takes, since each costs a second."""
    texts: dict[str, str] = {}
    for number, case in enumerate(CASES):
        scripts = {file.path: file.text for file in rendered(number) if file.path.endswith(".sh")}
        assert scripts, case
        for file in rendered(number):
            if file.path == "cloud_init.yaml":  # the programs in it are scripts too
                written = [one["content"] for one in yaml.safe_load(file.text)["write_files"]]
                scripts |= {f"inner-{i}.sh": text for i, text in enumerate(written) if text.startswith("#!")}
        texts |= {text: f"{name_of(case)}-{path}".replace("/", "-") for path, text in scripts.items()}
    unseen = {line for text in texts for line in text.splitlines()}
    while unseen:
        text = max(texts, key=lambda one: len(unseen.intersection(one.splitlines())))
        unseen.difference_update(text.splitlines())
        (tmp_path / texts.pop(text)).write_text(text)
    done = subprocess.run(["shellcheck", "--severity=style", *tmp_path.iterdir()], capture_output=True, text=True,
                          timeout=HANG_S)
    assert done.returncode == 0, done.stdout


@pytest.mark.needs("shellcheck")
def test_shellcheck_parses_the_templates(tmp_path: Path):
    """Statements are comments to it; a value is a word, or the name of a variable."""
    templates = sorted(TEMPLATES.rglob("*.sh.j2"))
    assert len(templates) > 20
    for path in templates:
        copy = tmp_path / str(path.relative_to(TEMPLATES)).replace("/", "-")
        copy.write_text(re.sub("@@.*?@@", "64", re.sub(r"\$@@.*?@@", "$NAME", path.read_text())))
    done = subprocess.run(["shellcheck", "--shell=bash", "--severity=error", *tmp_path.iterdir()],
                          capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


def test_the_linter_finds_nothing_either(files: list[File]):
    findings = lint_texts({file.path: file.text for file in files})
    assert not [(one.code, one.hit) for one in findings]


def test_what_is_a_script_can_be_run_and_what_is_not_cannot(files: list[File]):
    assert all(file.is_executable == file.text.startswith("#!") for file in files)


def test_every_path_stands_once_and_stays_inside(files: list[File]):
    paths = [file.path for file in files]
    assert len(paths) == len(set(paths))
    assert all(not path.startswith("/") and ".." not in path for path in paths)


def test_a_dry_run_says_what_it_would_do_and_does_none_of_it(files: list[File], tmp_path: Path):
    verbs = {"vm.sh": ["up"], "tpu_vm.sh": ["up"], "budget.sh": ["budget"]}
    for file in files:
        if not file.path.endswith(".sh") or file.path == "tpu_node.sh":
            continue
        ran = run_script(files, file.path, verbs.get(file.path, []), tmp_path, {**SETTINGS, "DRY_RUN": "1"})
        assert ran.code == 0, (file.path, ran.output)
        assert "+ " in ran.output, file.path
        for words in ran.commands:
            verb = " ".join(words[1:4])
            assert not any(f" {w}".startswith(f" {c}") for c in CHANGING.get(words[0], ()) for w in verb.split()), words


def test_run_for_real_every_script_ends_well(files: list[File], tmp_path: Path):
    verbs = {"vm.sh": ["up"], "tpu_vm.sh": ["up"], "budget.sh": ["budget"]}
    for file in files:
        if not file.path.endswith(".sh") or file.path == "tpu_node.sh":
            continue
        words = ["clean"] if file.path.startswith("train_dlrm") else verbs.get(file.path, [])
        words = [*words, "--yes"]
        ran = run_script(files, file.path, words, tmp_path, SETTINGS)
        assert ran.code == 0, (file.path, ran.output)
        assert ran.commands, file.path


def test_a_script_stops_at_an_error_in_a_function_whose_output_it_reads(tmp_path):
    text = script("Tries.", "made() { false; printf 'id\\n'; }", "id=$(made)", "printf 'on with %s\\n' \"$id\"")
    done = run_script([File("try.sh", text, is_executable=True)], "try.sh", [], tmp_path)
    assert (done.code, done.output) == (1, "")


def test_nothing_waits_for_a_file_system_that_was_refused(tmp_path):
    refusal = '  *" create-file-system "*) echo refused >&2; exit 254 ;;\n'
    stub = STUB.replace("case $words in\n", f"case $words in\n{refusal}", 1)
    files = render_infrastructure(job_of("p4d.24xlarge", volume=VOLUMES["aws"][0]))
    done = run_script(files, "storage.sh", ["volume"], tmp_path, SETTINGS, stub=stub)
    assert done.code == 254
    assert done.output.rstrip().endswith("refused")
    assert not any("describe-data-repository-associations" in words for words in done.commands)
