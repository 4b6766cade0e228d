from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

from embark.errors import ExitCode, MissingPackage
from embark.stack import versions as stack

SCRIPT = Path(stack.__file__)
NEEDS = {"tensordict": "1", "iopath": "1", "pyre-extensions": "1", "tqdm": "1"}
NOTHING: dict[str, str | None] = dict.fromkeys(
    ["torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchmetrics", *NEEDS]
)
CPU = NOTHING | NEEDS | {
    "torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "torchmetrics": "1.0.3",
}
CUDA = CPU | {"torch": "2.13.1", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": None}


def wrong(here: dict[str, str | None], **options: bool) -> dict[str, stack.Finding]:
    return {finding.name: finding for finding in stack.check(here, **options) if not finding.ok}


def test_there_is_one_default_triple_and_it_has_both_variants():
    (default,) = [triple for triple in stack.load_triples() if triple.is_default]
    assert (default.torch_minor, default.torchrec, default.fbgemm) == ("2.13", "1.8.0", "1.8.0")
    assert dict(default.distributions) == {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}


def test_no_torch_has_two_triples():
    minors = [triple.torch_minor for triple in stack.load_triples()]
    assert sorted(set(minors)) == sorted(minors) == ["2.11", "2.13", "2.14"]


@pytest.mark.parametrize("triple", stack.load_triples(), ids=lambda t: t.torch)
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_every_triple_of_the_table_passes_its_own_check(triple: stack.Triple, build: stack.Variant):
    here = NOTHING | NEEDS | {
        "torch": triple.torch, "torchrec": triple.torchrec, "torchmetrics": triple.torchmetrics,
        triple.fbgemm_distribution(build): triple.fbgemm,
    }
    assert wrong(here) == {}


@pytest.mark.parametrize(
    "here",
    [
        CPU,
        CUDA,
        CUDA | {"torch": "2.13.0a0+git12ab"},
        CUDA | {"torch": "2.13.0+cu130", "fbgemm-gpu": "1.8.0+cu130"},
        CUDA | {"fbgemm-gpu": stack.UNKNOWN, "torchrec": stack.UNKNOWN},
    ],
)
def test_a_patch_or_a_local_build_of_the_right_versions_is_right(here: dict[str, str | None]):
    assert wrong(here) == {}


def test_the_wrong_torchrec_is_named_with_the_command_that_mends_it():
    findings = wrong(CPU | {"torchrec": "1.9.2"})
    assert list(findings) == ["torchrec"]
    output = str(findings["torchrec"])
    assert "torchrec: 1.9.2; expected 1.8.0, for torch 2.13" in output
    assert output.endswith("-m pip install --no-deps torchrec==1.8.0")


def test_with_the_cuda_build_torchrec_takes_its_dependencies_along():
    assert wrong(CUDA | {"torchrec": "1.6.1"})["torchrec"].fix.endswith("-m pip install torchrec==1.8.0")


def test_without_a_match_for_torch_the_rest_selects_the_triple():
    findings = wrong(CPU | {"torch": "2.15.0+cpu", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"})
    assert list(findings) == ["torch"]
    assert findings["torch"].fix.endswith("-m pip install torch==2.14.1")


def test_a_torch_that_matches_nothing_at_all_is_measured_by_the_default():
    findings = wrong(CPU | {"torch": "2.15.0+cpu", "torchrec": "1.7.0"})
    assert set(findings) == {"torch", "torchrec"}
    assert findings["torch"].expected == "2.13.0"


def test_the_cuda_build_of_fbgemm_beside_a_cpu_torch_is_wrong():
    finding = wrong(CPU | {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"})["fbgemm-gpu-cpu"]
    assert finding.found == "fbgemm-gpu 1.8.0"
    assert "the cpu build, as torch is" in finding.expected
    assert "uninstall -y fbgemm-gpu-cpu fbgemm-gpu" in finding.fix
    assert finding.fix.endswith("install fbgemm-gpu-cpu==1.8.0")


def test_both_builds_of_fbgemm_at_once_are_wrong():
    finding = wrong(CPU | {"fbgemm-gpu": "1.8.0"})["fbgemm-gpu-cpu"]
    assert finding.found == "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0"
    assert "both write the package fbgemm_gpu" in finding.expected


def test_the_newest_torchmetrics_is_refused():
    finding = wrong(CPU | {"torchmetrics": "1.9.0"})["torchmetrics"]
    assert finding.fix.endswith("-m pip install torchmetrics==1.0.3")


@pytest.mark.parametrize(("gpu", "name"), [(True, "fbgemm-gpu"), (False, "fbgemm-gpu-cpu")])
def test_with_nothing_installed_the_machine_selects_the_build(gpu: bool, name: str):
    findings = wrong(NOTHING, gpu=gpu)
    assert set(findings) == {"torch", "torchrec", name, "torchmetrics", *NEEDS}
    assert all(finding.found is None and finding.fix for finding in findings.values())
    assert "missing" in str(findings["torch"])


def test_a_cpu_build_that_was_chosen_on_a_gpu_machine_is_left_alone():
    assert wrong(CPU | {"torch": "2.13.0"}, gpu=True) == {}


def test_what_is_installed_here_is_reported_without_importing_torch():
    code = "import sys; from embark.stack.versions import installed; installed(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0
    here = stack.installed()
    assert here["torchrec"]
    assert set(here) == set(NOTHING)


def test_a_source_tree_on_the_path_is_present_with_a_version_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stack, "_version", lambda name: None)
    here = stack.installed()
    assert here["torch"] == here["torchrec"] == here["fbgemm-gpu"] == stack.UNKNOWN
    assert here["fbgemm-gpu-cpu"] is None


def require_with(monkeypatch: pytest.MonkeyPatch, here: dict[str, str | None], *, gpu: bool = False) -> None:
    monkeypatch.setattr(stack, "installed", lambda: here)
    monkeypatch.setattr(stack, "has_nvidia_gpu", lambda: gpu)
    stack.require_stack()


def test_training_is_refused_with_both_commands_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MissingPackage, match=r"torch, torchrec, fbgemm-gpu-cpu, .* are not installed") as caught:
        require_with(monkeypatch, NOTHING)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    first, second = caught.value.fix.split("\n")
    assert "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 tensordict" in first
    assert second.endswith("pip install --no-deps torchrec==1.8.0")


def test_a_mix_is_refused_and_all_versions_are_named(monkeypatch: pytest.MonkeyPatch):
    here = CPU | {"torch": "2.15.0+cpu", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}
    expected = (
        "torch 2.15.0+cpu, torchrec 1.9.2, fbgemm-gpu-cpu 1.9.0 do not work together; "
        "torch 2.14.1, torchrec 1.9.2 and fbgemm-gpu-cpu 1.9.0 do"
    )
    with pytest.raises(MissingPackage) as caught:
        require_with(monkeypatch, here)
    assert caught.value.what == expected


def test_a_mix_is_let_through_on_request_but_a_missing_package_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMBARK_ANY_STACK", "1")
    require_with(monkeypatch, CPU | {"torchrec": "1.9.2"})
    with pytest.raises(MissingPackage, match="torchrec is not installed"):
        require_with(monkeypatch, CPU | {"torchrec": None})


def test_the_wrong_torchmetrics_does_not_stop_training(monkeypatch: pytest.MonkeyPatch):
    assert require_with(monkeypatch, CPU | {"torchmetrics": None}) is None


def test_on_a_gpu_machine_the_fix_is_the_cuda_build(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MissingPackage) as caught:
        require_with(monkeypatch, NOTHING, gpu=True)
    assert "fbgemm-gpu==1.8.0 torchrec==1.8.0" in caught.value.fix


# The script half, as make runs it: without Embark or anything else on the path.


def run_script(*words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, SCRIPT, *words], capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True, timeout=HANG_S)
    return str(where / "bin" / "python")


def test_a_dry_run_prints_the_cpu_commands_and_installs_nothing(bare_python: str):
    done = run_script("install", "--python", bare_python, "--variant", "cpu", "--dry-run", python=bare_python)
    assert done.returncode == 0, done.stderr
    output, *commands = done.stdout.splitlines()
    assert output.startswith("Would install torch 2.13.0, torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0")
    needs = "tensordict iopath pyre-extensions tqdm"
    assert commands == [
        f"  {bare_python} -m pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 {needs}",
        f"  {bare_python} -m pip install --no-deps torchrec==1.8.0",
    ]
    assert json.loads(run_script("installed", python=bare_python).stdout) == NOTHING


def test_a_dry_run_of_another_triple_for_cuda_is_one_command(bare_python: str):
    done = run_script("install", "--python", bare_python, "--variant", "cuda", "--torch", "2.11", "--dry-run")
    (command,) = done.stdout.splitlines()[1:]
    assert "torch==2.11.0 fbgemm-gpu==1.6.0 torchrec==1.6.1" in command
    assert "--no-deps" not in command


def test_pips_failure_is_the_scripts_failure(bare_python: str):
    done = run_script("install", "--python", bare_python, "--variant", "cpu")  # it has no pip
    assert done.returncode == 1
    assert "pip failed (1)" in done.stdout


def test_an_interpreter_that_does_not_run_is_named():
    done = run_script("install", "--python", "/bin/false", "--dry-run")
    assert done.returncode == 1
    assert "/bin/false does not run" in done.stdout


def test_nothing_is_done_where_the_triple_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretend(monkeypatch, CPU)
    assert stack.main(["install", "--variant", "cpu"]) == 0
    assert capsys.readouterr().out == "Already installed: torch 2.13.0+cpu, torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0\n"


def test_going_to_cuda_removes_the_cpu_builds_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretend(monkeypatch, CPU)
    assert stack.main(["install", "--python", "py", "--variant", "cuda", "--dry-run"]) == 0
    commands = capsys.readouterr().out.splitlines()[1:]
    assert commands[0] == "  py -m pip uninstall -y fbgemm-gpu-cpu torch"
    assert commands[1].startswith("  py -m pip install torch==2.13.0 fbgemm-gpu==1.8.0 torchrec==1.8.0")


def test_a_supported_triple_that_is_not_the_default_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretend(monkeypatch, CPU | {"torch": "2.14.1+cpu", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"})
    stack.main(["install", "--variant", "cpu", "--dry-run"])
    assert "torch==2.13.0" in capsys.readouterr().out
    stack.main(["install", "--variant", "cpu", "--torch", "2.14", "--dry-run"])
    assert capsys.readouterr().out.startswith("Already installed: torch 2.14.1+cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, here: dict[str, str | None]) -> None:
    """Any interpreter that is asked answers `here`; running pip is an error."""

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "installed", command
        return subprocess.CompletedProcess(command, 0, json.dumps(here), "")

    monkeypatch.setattr(subprocess, "run", answer)


def test_this_interpreter_is_usable_and_an_unknown_version_is_reported_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert stack.main(["usable"]) == 0
    monkeypatch.setattr(stack.importlib.util, "find_spec", lambda name: None)
    assert stack.main(["usable"]) == 1
    assert "-venv" in capsys.readouterr().out
    monkeypatch.setattr(sys, "version_info", type("Version", (), {"major": 3, "minor": 99}))
    assert stack.main(["usable"]) == 1
    assert "is Python 3.99; torch 2.13.0 is for 3.11" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "lines"),
    [("echo 'GPU 0: H200'; echo", ["GPU 0: H200"]), ("echo no driver; exit 9", [])],
    ids=["one GPU", "no driver"],
)
def test_nvidia_smi_is_believed_only_when_it_succeeds(
    script: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stack.nvidia_smi("-L") == lines


def test_a_driver_file_without_a_device_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack, "nvidia_smi", lambda *_: [])
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([]))
    assert not stack.has_nvidia_gpu()
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    assert stack.has_nvidia_gpu()


def test_without_nvidia_smi_there_are_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stack.nvidia_smi("-L") == []
