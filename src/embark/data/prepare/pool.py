"""Processes that take tasks one at a time, tell how far they are, and end with their parent whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, Self, cast

from embark.errors import EmbarkError, Fault

_TELL_EVERY_S = 0.2

Report = Callable[[int, int, int], None]
"""Bytes, rows and bad rows since the last report."""


class Work(Protocol):
    """What a worker can do. It is sent to the workers, so it must pickle."""

    def do(self, task: Any, report: Report) -> Callable[[], Any]:
        """Do the task but for what is only waiting, such as for the disk; calling what comes back does that and gives
        the result, while the next task is begun."""
        ...


class Pool:
    """`num_workers` processes; with 0 the tasks are done here, which is right for few rows."""

    def __init__(self, work: Work, num_workers: int) -> None:
        self._work, self._num_workers = work, num_workers
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in self._workers.items():
            connection.close()  # an idle worker ends by itself
            if kind is not None:
                process.terminate()
        for process in self._workers.values():
            process.join()
        self._workers.clear()

    def run(self, tasks: Sequence[Any], report: Report) -> Iterator[tuple[Any, Any]]:
        """Each task with its result, as they are done. `report` is called here, in this thread."""
        if not self._num_workers:
            for task in tasks:
                yield task, self._work.do(task, report)()
            return
        waiting, num_done = deque(enumerate(tasks)), 0
        self._start(min(self._num_workers, len(tasks)))
        for connection in self._workers:
            _give(connection, waiting)
        while num_done < len(tasks):
            for heard in wait(list(self._workers)):
                connection = cast(Connection, heard)
                kind, value = self._hear(connection)
                if kind == "progress":
                    report(*value)
                elif kind == "ready":
                    _give(connection, waiting)
                elif kind == "error":
                    raise value
                else:
                    num_done += 1
                    yield tasks[value[0]], value[1]

    def _start(self, num: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "embark.data.prepare.work"])
        while len(self._workers) < num:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._work), name="embark-prepare", daemon=True)
            process.start()
            theirs.close()
            self._workers[ours] = process

    def _hear(self, connection: Connection) -> tuple[str, Any]:
        try:
            said: tuple[str, Any] = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[connection]
            process.join(5)
            code = process.exitcode
            how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
            raise Fault(f"a worker process ended {how} in the middle of its work",
                        fix="run it again: what is done is kept. Where the system ended it for memory, "
                            "a smaller data.prepare.memory_gb or data.prepare.num_workers takes less") from None
        return said


def _give(connection: Connection, waiting: deque[tuple[int, Any]]) -> None:
    if waiting:
        try:
            connection.send(waiting.popleft())
        except BrokenPipeError:
            return  # it is dead, which is heard where its answer is waited for


def _serve(connection: Connection, work: Work) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = _Answers(connection)
    finishing: threading.Thread | None = None
    while True:
        try:
            number, task = connection.recv()
        except (EOFError, OSError):
            return
        finish = answers.of(lambda task=task: work.do(task, answers.report))  # type: ignore[misc]
        answers.flush()
        if finishing is not None:
            finishing.join()
        if finish is None:
            return
        answers.send("ready", None)
        finishing = threading.Thread(target=_finish, args=(answers, number, finish))
        finishing.start()


def _finish(answers: _Answers, number: int, finish: Callable[[], Any]) -> None:
    result = answers.of(lambda: (number, finish()))
    if result is not None:
        answers.send("done", result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Answers:
    """What a worker says to its parent, from either of its threads. Reports are gathered: one a chunk would be many."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._sums = [0, 0, 0]
        self._told_at = 0.0

    def send(self, kind: str, value: Any) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError:
            os._exit(1)  # nobody is there to work for

    def of(self, call: Callable[[], Any]) -> Any:
        """What the call gives; None if it failed, which is told."""
        try:
            return call()
        except EmbarkError as error:
            self.send("error", error)
        except BaseException:
            self.send("error", Fault(f"a worker process failed:\n{traceback.format_exc()}"))
        return None

    def report(self, num_bytes: int, num_rows: int, num_bad: int) -> None:
        """See `Report`."""
        for i, more in enumerate((num_bytes, num_rows, num_bad)):
            self._sums[i] += more
        if time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self.flush()

    def flush(self) -> None:
        self._told_at = time.monotonic()
        if any(self._sums):
            self.send("progress", tuple(self._sums))
            self._sums = [0, 0, 0]
