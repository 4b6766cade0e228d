"""The command line itself: mistakes are one sentence with a fix, help is grouped, a closed pipe is no error."""

import json
import shlex
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from limits import HANG_S

import embark.cli
from embark.__main__ import run
from embark.cli.app import COMMANDS, RENAMED, name_clone


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train", "nowhere.toml"], "no such file"),
        (["train", "."], ".: is a directory"),
        (["train", "quikstart"], "quickstart"),
        (["train", "laptop", "--set", "train.batch_sze=3"], "did you mean 'batch_size'?"),
        (["train", "laptop", "--set", "batch_size=3"], "did you mean 'train.batch_size'?"),
        (["train", "laptop", "--set", "seed=3"], "did you mean 'data.seed' or 'train.seed'?"),
        (["train", "laptop", "--set", "train.batch_size=much"], "valid integer"),
        (["train", "laptop", "--set", "data.kind=columns", "--set", "data.path=gone.csv",
          "--set", "model.num_dense=0"], "gone.csv"),
        (["train", "laptop", "--set", "store.root=/proc/none"], "/proc/none"),
        (["train"], "SPEC"),
        (["trian", "laptop"], "trian"),
        (["train", "laptop", "--frsh"], "--frsh"),
        (["init", "nothing"], "no such preset"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_64_and_no_traceback(capsys, words, what):
    assert run(words) == 64
    captured = capsys.readouterr()
    assert what in captured.err
    assert "Traceback" not in captured.err


def test_an_error_is_json_for_programs(capsys):
    assert run(["train", "quikstart", "--json"]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)
    assert error["exit_code"] == 64
    assert "quickstart" in error["fix"]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["train", "laptop", "extra"], "unexpected argument 'extra'", "embark train --help"),
        (["data", "check", "a", "b"], "unexpected argument 'b'", "embark data check --help"),
        (["trian", "laptop"], "trian: no such command", "did you mean 'train'?"),
        (["data", "prepre"], "prepre: no such command", "did you mean 'prepare'?"),
        (["--frsh"], "--frsh: no such option", "embark --help"),
        (["bench", "--seconds", "0"], "--seconds must be greater than 0", "--seconds 8"),
    ],
)
def test_a_wrong_command_line_names_the_help_to_read(capsys, words, what, fix):
    assert run([*words, "--json"]) == 64
    error = json.loads(capsys.readouterr().err)
    assert what in error["error"]
    assert error["fix"] == fix


@pytest.mark.parametrize("name", ["mine.toml", "my specs/mine.toml"])
def test_the_command_of_a_fix_names_the_users_own_spec(capsys, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('[data]\nkind = "prepared"\npath = "out"\n')
    assert run(["train", name, "--json"]) == 64
    assert f"embark data prepare {shlex.quote(name)}" in json.loads(capsys.readouterr().err)["fix"]


@pytest.mark.parametrize(("source", "command"), [
    ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', "pip install -e '/a b[serve]'"),
    ('{"url": "file:///a", "dir_info": {}}', "pip install '/a[serve]'"),
    ('{"url": "file:///a.whl", "archive_info": {}}', "pip install 'embark-rec[serve]'"),
    ("", "pip install 'embark-rec[serve]'"),
])
def test_the_command_that_installs_an_extra_names_the_clone(tmp_path, monkeypatch, source, command):
    folder = tmp_path / "embark_rec-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: embark-rec\nVersion: 1\n")
    (folder / "direct_url.json").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert name_clone("pip install 'embark-rec[serve]'") == command
    of_account = command.replace("embark-rec[serve]", "embark-rec[account]").replace("[serve]", "/cloudsim")
    assert name_clone("pip install 'embark-rec[account]'") == of_account


def test_the_help_of_a_parameter_is_one_line_of_its_docstring():
    """Cyclopts keeps a docstring's line breaks, so a second line breaks the text at any width."""
    files = sorted(Path(embark.cli.__file__).parent.glob("*.py"))
    broken = [f"{path.name}: {line.strip()}"
              for path in files for text in path.read_text().split("    ----------\n")[1:]
              for line, behind in pairwise(text.partition('"""')[0].splitlines())
              if line.startswith(" " * 8) and behind.startswith(" " * 8)]
    assert len(files) > 20
    assert not broken


def test_help_groups_every_command_and_each_has_its_own(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"
    assert run(["--help"]) == 0
    page = capsys.readouterr().out
    for group, commands in COMMANDS.items():
        assert f"─ {group} ─" in page
        assert all(f"│ {name.split()[0]} " in page for name in commands)
        for name in commands:
            assert run([*name.split(), "--help"]) == 0
            own = capsys.readouterr().out
            assert f"Usage: embark {name}" in own
            assert "--json" in own
            assert "Print JSON for" in own
            assert '[default: ""]' not in own
            assert "[choices: ," not in own
            prose = own.split("╭", 1)[0].splitlines()
            assert all(len(f"{line.rstrip()} {after.split()[0]}") > 79 for line, after in pairwise(prose)
                       if line.strip() and after.strip() and not line.startswith("Usage")), own  # no break in mid-line


def test_a_closed_pipe_is_no_error():
    for words in ("--help", "catalog list"):
        done = subprocess.run(["bash", "-c", f"{sys.executable} -m embark {words} | head -1; echo ${{PIPESTATUS[0]}}"],
                              capture_output=True, text=True, check=True, timeout=HANG_S)
        assert done.stdout.endswith("\n0\n"), done.stdout
        assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_and_knows_the_commands(capsys, monkeypatch, tmp_path, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["--install-completion", "--shell", shell]) == 0
    path = Path(capsys.readouterr().out.split()[1].rstrip(";"))
    assert path.is_relative_to(tmp_path)
    assert all(word in path.read_text() for word in ("train", "doctor", "across"))


@pytest.mark.parametrize(("words", "fix"), RENAMED.items())
def test_a_renamed_command_names_its_replacement(capsys, words, fix):
    assert run([*words.split(), "something", "--json"]) == 64
    assert json.loads(capsys.readouterr().err)["fix"] == fix
    command = fix.split()[1]
    assert command in ("--install-completion", "catalog") or any(command in group for group in COMMANDS.values())


def test_a_command_whose_output_is_closed_ends_without_a_traceback(tmp_path):
    ended = subprocess.run(["bash", "-c", f"{sys.executable} -m embark catalog list --volumes >&-"],
                           capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_process_exits_with_its_code_whatever_its_threads_do():
    text = ("import atexit, sys, threading, time\nfrom embark.errors import leave\natexit.register(print, 'saved')\n"
            "threading.Thread(target=time.sleep, args=(600,)).start()\nsys.stdout.write('words ')\nleave(75)")
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (75, "words saved\n")


def test_ctrl_c_before_a_command_runs_is_one_line():
    code = ("import os, signal, sys; sys.argv = ['embark']; import embark.__main__\n"
            "os.kill(os.getpid(), signal.SIGINT); embark.__main__.run(['--help'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped by Ctrl-C\n")


def test_ctrl_c_while_a_command_runs_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("embark.spec.load_spec", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run(["data", "prepare", "laptop"]) == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"


def test_imported_by_another_program_it_leaves_ctrl_c_alone():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
