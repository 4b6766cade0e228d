"""Programs are started as words, end in time, and give no more than asked; a dry run starts none."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from limits import HANG_S

from embark.errors import UserError
from embark.launch.shell import DryRunShell, LineMultiplexer, Shell

PACKAGE = Path(__file__).parents[3] / "src" / "embark"
LAUNCH = sorted((PACKAGE / "launch").rglob("*.py"))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_words_are_words_whatever_is_in_them():
    done = Shell().ask(["printf", "%s|", "a b", "$(id)", "; rm -rf /", "'\"`\n"])
    assert done.out == "a b|$(id)|; rm -rf /|'\"`\n|"


def test_a_program_gets_its_text_and_says_how_it_ended():
    done = Shell().change(python("import sys; sys.stderr.write(sys.stdin.read()); sys.exit(7)"), stdin="héllo" * 50_000)
    assert (done.code, done.err, done.is_ok) == (7, "héllo" * 50_000, False)


def test_one_that_takes_too_long_is_ended_even_if_it_does_not_want_to(tmp_path, monkeypatch):
    communicate, mark = subprocess.Popen.communicate, tmp_path / "up"

    def communicate_once_it_is_up(process: subprocess.Popen, *given: bytes, **options: float) -> tuple[bytes, bytes]:
        while not mark.exists():
            time.sleep(0.01)
        return communicate(process, *given, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_it_is_up)
    code = ("import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
            f"pathlib.Path({str(mark)!r}).touch(); time.sleep(6000)")
    done = Shell().ask(python(code), timeout_s=0.1)
    assert done.has_timed_out
    assert done.out == "up\n"


def test_a_program_that_is_not_there_is_reported_with_where_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="kubectl is not installed") as caught:
        Shell().ask(["kubectl", "version"])
    assert "kubernetes.io" in caught.value.fix


def test_ctrl_c_ends_the_program_too(tmp_path):
    mark = tmp_path / "pid"

    def interrupt() -> None:
        until_s = time.monotonic() + HANG_S
        while not (mark.exists() and mark.read_text()) and time.monotonic() < until_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Shell().ask(python(f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_lines_come_while_the_program_runs_and_closing_ends_it():
    lines = Shell().lines(python("import time\nfor i in range(99): print(i, flush=True); time.sleep(0.05)"))
    found = iter(lines)
    assert [next(found), next(found)] == ["0", "1"]
    assert lines.close().code != 0


def test_lines_of_several_programs_arrive_each_under_its_key():
    arriving = LineMultiplexer()
    arriving.add("a", Shell().lines(["printf", "1\\n2\\n"]))
    arriving.add("b", Shell().lines(python("import sys; print('3'); sys.exit('broken')")))
    found, ended = [], {}
    until_s = time.monotonic() + HANG_S
    while arriving.is_busy and time.monotonic() < until_s:
        found += arriving.take(0.05)
        ended.update(arriving.ended())
    assert sorted(found) == [("a", "1"), ("a", "2"), ("b", "3")]
    assert ended["a"].is_ok
    assert ended["b"].err.strip() == "broken"


def test_a_dry_run_says_every_command_as_it_could_be_typed_and_runs_none(tmp_path):
    messages: list[str] = []
    shell, touched = DryRunShell(messages.append), tmp_path / "a b"
    assert shell.change(["touch", str(touched)]).is_ok
    assert shell.ask(["false"]).is_ok
    shell.change(["kubectl", "apply", "-f", "-"], stdin="kind: Job", stdin_name="job.yaml")
    assert messages == [f"touch '{touched}'", "false", "kubectl apply -f - < job.yaml"]
    assert not list(tmp_path.iterdir())


def test_only_the_shell_starts_programs_and_nothing_uses_a_shell_line():
    # The supervisor runs alone on its machine, and detaches itself.
    may_start = {PACKAGE / "launch" / "shell.py", PACKAGE / "launch" / "supervisor.py"}
    for path in LAUNCH:
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert ("subprocess" in imported) == (path in may_start), path
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        started = [call for call in calls if "subprocess" in ast.unparse(call.func)]
        assert "shell" not in {keyword.arg for call in started for keyword in call.keywords}, path
        called = {ast.unparse(call.func) for call in calls}
        assert not called & {"os.system", "os.popen", "os.execvp", "os.posix_spawn"}, path
        assert "os.fork" not in called or path.name == "supervisor.py", path
