"""Processes that take tasks one at a time, report progress, and end with their parent whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self, cast

from embark.errors import EmbarkError, Fault

_SEND_EVERY_S = 0.2

Report = Callable[[int, int, int], None]  # Work units, rows and bad rows since the last report.


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class Work(Protocol):
    """The work of a pool. It is sent to the workers, so it must pickle."""

    def do(self, task: Any, report: Report) -> Callable[[], Any]:
        """Do the task except for waiting, such as for the disk. Calling what is returned waits and gives the result,
        while the next task runs."""


class Executor(Protocol):
    """Runs tasks while it is entered: processes of this machine, or a cluster."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def run(self, tasks: Sequence[Any], report: Report) -> Iterator[tuple[Any, Any]]:
        """Yield each task with its result, in the order in which they end. `report` is called in this thread."""


class WorkerPool:
    """Runs `num_workers` processes; with 0 this process does the tasks, which is best for few rows."""

    def __init__(self, work: Work, num_workers: int) -> None:
        self._work, self._num_workers = work, num_workers
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection, process in self._workers.items():
            connection.close()  # an idle worker ends by itself
            if kind is not None:
                process.terminate()
        for process in self._workers.values():
            process.join()
        self._workers.clear()

    def run(self, tasks: Sequence[Any], report: Report) -> Iterator[tuple[Any, Any]]:
        if not self._num_workers:
            for task in tasks:
                yield task, self._work.do(task, report)()
            return
        waiting, num_done = deque(enumerate(tasks)), 0
        self._start(min(self._num_workers, len(tasks)))
        for connection in self._workers:
            _send_next(connection, waiting)
        while num_done < len(tasks):
            for ready in wait(list(self._workers)):
                connection = cast(Connection, ready)
                kind, value = self._receive(connection)
                if kind == "progress":
                    report(*value)
                elif kind == "ready":
                    _send_next(connection, waiting)
                elif kind == "error":
                    raise value
                else:
                    num_done += 1
                    yield tasks[value[0]], value[1]

    def _start(self, num: int) -> None:
        # Not by fork: threads of this process may hold locks that a copy of it would wait for.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "embark.data.prepare.tasks"])
        # Blocked in all of them, from their first import on: Ctrl-C reaches this process, which then ends them.
        resource_tracker.ensure_running()  # which unblocks it where it starts the tracker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            while len(self._workers) < num:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._work), name="embark-worker", daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[connection]
            process.join(5)
            code = process.exitcode
            how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
            raise Fault(f"a worker process ended {how} before its task was done",
                        "run the command again. If the system killed it for memory, lower "
                            "data.prepare.memory_gb or data.prepare.num_workers") from None
        return message


def _send_next(connection: Connection, waiting: deque[tuple[int, Any]]) -> None:
    if waiting:
        try:
            connection.send(waiting.popleft())
        except BrokenPipeError:
            return  # the worker is dead, and receiving its answer raises


def _serve(connection: Connection, work: Work) -> None:
    """Run the main loop of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = _Answers(connection)
    finishing: threading.Thread | None = None
    while True:
        try:
            number, task = connection.recv()
        except (EOFError, OSError):
            return
        finish = answers.result_of(lambda task=task: work.do(task, answers.report))  # type: ignore[misc]
        answers.flush()
        if finishing is not None:
            finishing.join()
        if finish is None:
            return
        answers.send("ready", None)
        finishing = threading.Thread(target=_finish, args=(answers, number, finish))
        finishing.start()


def _finish(answers: _Answers, number: int, finish: Callable[[], Any]) -> None:
    result = answers.result_of(lambda: (number, finish()))
    if result is not None:
        answers.send("done", result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Answers:
    """Sends answers of a worker to its parent, from either of its threads; reports are added up and sent now and
    then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._sums = [0, 0, 0]
        self._reported_s = 0.0

    def send(self, kind: str, value: Any) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError:
            os._exit(1)  # the parent is gone

    def result_of(self, call: Callable[[], Any]) -> Any:
        """Return the call's result; None if it failed, and the parent gets the error."""
        try:
            return call()
        except (EmbarkError, OSError) as error:
            self.send("error", error)
        except BaseException:
            self.send("error", Fault(f"a worker process failed:\n{traceback.format_exc()}"))
        return None

    def report(self, num_done: int, num_rows: int, num_bad: int) -> None:
        for i, more in enumerate((num_done, num_rows, num_bad)):
            self._sums[i] += more
        if time.monotonic() - self._reported_s >= _SEND_EVERY_S:
            self.flush()

    def flush(self) -> None:
        self._reported_s = time.monotonic()
        if any(self._sums):
            self.send("progress", tuple(self._sums))
            self._sums = [0, 0, 0]

