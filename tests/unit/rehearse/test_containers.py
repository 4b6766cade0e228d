"""The words that a container is started with: names, address, user, limits, files; and which engine is taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from render_jobs import job_of

from embark.errors import UserError
from embark.launch.shell import CommandResult, Shell
from embark.rehearse import engines
from embark.rehearse.engines import Containers, Folders, Processes, Start
from embark.rehearse.rehearsal import PreparedRehearsal, RehearsalOptions, choose_engine, prepare
from embark.render.targets.kubernetes import render_job

IMAGE = "embark:0.1.0"


class Answers(Shell):
    """A shell where some programs are, and some images."""

    def __init__(self, programs: Sequence[str] = (), images: Sequence[str] = ()) -> None:
        self.programs, self.images = programs, images
        self.network = '[{"dns_enabled": true}]'
        self.containers: list[str] = []
        self.changed: list[list[str]] = []
        self.answer = CommandResult(0)  # To what changes something.

    def ask(self, words, *, stdin="", timeout_s=60.0) -> CommandResult:
        if words[1] == "network":
            return CommandResult(0, self.network)
        if words[1] == "ps" and not self.answer.is_ok:
            return self.answer
        if words[1] == "ps":
            begin = words[words.index("--filter") + 1].removeprefix("name=")
            return CommandResult(0, "".join(f"{name}\n" for name in self.containers if name.startswith(begin)))
        if words[0] not in self.programs:
            raise UserError(f"{words[0]} is not installed")
        return CommandResult(0 if words[1] == "info" or words[-1] in self.images else 1)

    def change(self, words, *, stdin="", stdin_name="", timeout_s=60.0) -> CommandResult:
        self.changed.append(list(words))
        if words[1] == "rm":
            names = words[words.index("0") + 1:]
            if set(names) <= set(self.containers):  # podman 4.3 ends with 0 and removes none where one is not there
                self.containers = [name for name in self.containers if name not in names]
        return self.answer


@cache
def prepared() -> PreparedRehearsal:
    text = render_job(job_of("p4d.24xlarge", volume="fsx-lustre-250", image=IMAGE))[0].text
    return prepare({"job.yaml": text}, "job.yaml", RehearsalOptions())


def words_of(monkeypatch, tmp_path, number: int = 0, program: str = "podman") -> tuple[list[str], dict[str, str]]:
    """Those of `podman run` for the first pod, and the environment it is called with."""
    called = []
    monkeypatch.setattr(engines, "LineStream", lambda words, **more: called.append((words, more["env"])))
    engine = Containers(program, IMAGE, Folders(tmp_path), prepared().workload.names, Answers())
    engine.begin()
    engine.start(Start(prepared().workload.pods[0], number, 0))
    return called[0]


def test_an_engine_is_called_in_the_rehearsal_s_folder(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(engines, "LineStream", lambda words, folder=None, **more: folders.append(folder))
    engine = Containers("podman", IMAGE, Folders(tmp_path), prepared().workload.names, Answers())
    engine.begin()
    engine.start(Start(prepared().workload.pods[0], 0, 0))
    assert folders == [tmp_path]


def after(words: Sequence[str], flag: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == flag]


def test_a_container_answers_to_the_names_of_its_pod_and_to_no_other(monkeypatch, tmp_path):
    words, _ = words_of(monkeypatch, tmp_path)
    assert after(words, "--hostname") == ["dlrm-0"]
    assert "dlrm-0.dlrm" in after(words, "--network-alias")
    assert "dlrm-0" not in [*after(words, "--network-alias"), *after(words, "--name")]
    hosts = next(one.split(":")[0] for one in after(words, "--volume") if one.endswith(":/etc/hosts:ro"))
    address = after(words, "--ip")[0]
    assert Path(hosts).read_text() == (f"127.0.0.1 localhost\n{address} dlrm-0.dlrm.embark.svc.cluster.local dlrm-0\n")


def test_a_name_that_nobody_knows_is_not_waited_for(monkeypatch, tmp_path):
    words, _ = words_of(monkeypatch, tmp_path)
    assert after(words, "--dns-option") == ["timeout:1", "attempts:2"]


def test_it_is_who_the_manifest_says_and_may_what_it_says(monkeypatch, tmp_path):
    words, _ = words_of(monkeypatch, tmp_path)
    assert after(words, "--user") == ["1000:1000"]
    assert after(words, "--cap-drop") == ["ALL"]
    assert after(words, "--cap-add") == ["IPC_LOCK"]
    assert after(words, "--security-opt") == ["no-new-privileges"]
    assert after(words, "--workdir") == ["/scratch"]
    assert "--memory" not in words  # more than this machine has


def test_it_sees_its_files_and_the_folders_that_all_share(monkeypatch, tmp_path):
    words, _ = words_of(monkeypatch, tmp_path)
    volumes = {one.split(":")[1]: (one.split(":")[0], one.split(":")[2:]) for one in after(words, "--volume")}
    assert "spec.toml" in {path.name for path in Path(volumes["/etc/embark"][0]).iterdir()}
    assert volumes["/etc/embark"][1] == ["ro"]
    assert volumes["/mnt/data"] == (str(tmp_path / "shared" / "claim-dlrm-data"), [])
    assert volumes["/mnt/embark-rehearsal"][0] == str(tmp_path / "shared" / "buckets")
    assert Path(volumes["/scratch"][0]).stat().st_mode & 0o777 == 0o777
    assert "/dev/shm" not in volumes
    assert int(after(words, "--shm-size")[0]) > 64 << 20


def test_variables_of_a_pod_are_not_on_the_engines_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/somewhere")
    words, env = words_of(monkeypatch, tmp_path)
    assert after(words, "--entrypoint") == ["/bin/sh"]
    assert words[words.index(IMAGE) + 1] == "-c"
    assert "--rdzv-endpoint=dlrm-0.dlrm:29500" in words[words.index(IMAGE) + 2]
    assert "JOB_COMPLETION_INDEX" in after(words, "--env")
    assert env["JOB_COMPLETION_INDEX"] == "0"
    assert "HOME=/scratch" in after(words, "--env")  # the client needs its own
    assert env["HOME"] == "/somewhere"


def test_what_was_made_is_removed_and_kept_only_on_request(tmp_path):
    shell = Answers()
    engine = Containers("podman", IMAGE, Folders(tmp_path), prepared().workload.names, shell)
    engine.begin()
    network = shell.changed[0][-1]
    assert engine.close(keep=False) == ""
    assert shell.changed[-1] == ["podman", "network", "rm", network]
    assert network in engine.close(keep=True)


def test_a_pod_that_was_never_made_does_not_save_the_others_from_removal(monkeypatch, tmp_path):
    """As when Ctrl-C comes while the second container is being made."""
    monkeypatch.setattr(engines, "LineStream", lambda words, **_: None)
    shell = Answers()
    engine = Containers("podman", IMAGE, Folders(tmp_path / "embark-rehearse-one"), prepared().workload.names, shell)
    engine.begin()
    for number, pod in enumerate(prepared().workload.pods):
        engine.start(Start(pod, number, 0))
    shell.containers = ["embark-rehearse-one-0", "embark-rehearse-another-0"]
    engine.close(keep=False)
    assert shell.containers == ["embark-rehearse-another-0"]


def test_what_the_engine_could_not_remove_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "LineStream", lambda words, **_: None)
    shell = Answers()
    engine = Containers("podman", IMAGE, Folders(tmp_path / "embark-rehearse-one"), prepared().workload.names, shell)
    engine.begin()
    engine.start(Start(prepared().workload.pods[0], 0, 0))
    shell.answer = CommandResult(-9, has_timed_out=True)
    assert engine.close(keep=False) == ("podman rm --force --time 0 embark-rehearse-one-0: no answer; "
                                        "podman network rm embark-rehearse-one: no answer")


def test_a_network_without_names_is_refused_and_removed(tmp_path):
    shell = Answers()
    shell.network = '[{"dns_enabled": false}]'
    engine = Containers("podman", IMAGE, Folders(tmp_path), prepared().workload.names, shell)
    with pytest.raises(UserError, match="no names here"):
        engine.begin()
    engine.close(keep=False)
    assert shell.changed[-1][:3] == ["podman", "network", "rm"]


@pytest.mark.parametrize(("programs", "images", "expected", "words"), [
    (("podman", "docker"), (IMAGE,), "podman", "containers of embark:0.1.0, run by podman"),
    (("docker",), (IMAGE,), "docker", "run by docker"),
    (("podman",), (), "processes", "podman has no image embark:0.1.0 (podman build -t embark:0.1.0"),
    ((), (), "processes", "no podman here; no docker here; pods are processes"),
])
def test_auto_takes_what_is_here_and_says_why(programs, images, expected, words, tmp_path):
    engine, why = choose_engine(prepared(), RehearsalOptions(), Folders(tmp_path), Answers(programs, images))
    assert engine.name == expected
    assert words in why
    assert isinstance(engine, Processes) == (expected == "processes")


@pytest.mark.parametrize(("options", "what"), [
    (RehearsalOptions(engine="podman"), "podman has no image embark:0.1.0"),
    (RehearsalOptions(image="other:1"), "podman has no image other:1"),
    (RehearsalOptions(engine="docker"), "docker is not installed"),
])
def test_what_was_asked_for_and_is_not_there_is_not_replaced_in_silence(options, what, tmp_path):
    with pytest.raises(UserError, match=what) as caught:
        choose_engine(prepared(), options, Folders(tmp_path), Answers(("podman",)))
    assert "--engine processes" in caught.value.fix
