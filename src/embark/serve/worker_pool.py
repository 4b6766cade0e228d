"""The processes of `embark serve` on a CPU: one that accepts connections and polls versions, and those that answer.

Each connection goes to the process that has the fewest. Tables are mapped from files, so that all processes share their
pages; each has copies of those only that a delta changed. A new version is loaded and checked by every process before
any answers with it, and refused by all where one refuses it. A process that ends is replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from embark.errors import EmbarkError, Fault
from embark.export.artifact import fetch_version
from embark.serve.endpoint import MAX_CONNECTIONS
from embark.serve.served_model import VersionChange
from embark.serve.server_metrics import add_up, metrics_text
from embark.serve.traffic import TrafficLog, Window
from embark.serve.version_poller import VersionPoller, load_first
from embark.serve.worker import CALL_S, ProcessChannel, ProcessEnded, WorkerSettings, run_worker
from embark.spec.serve import DRAIN_S

PRELOADED = ("embark.serve.worker", "embark.trainers.torch.scoring.open_model")  # Once, before processes are forked.
MAX_RESTART_S = 60.0  # Longest pause between two attempts to replace a process.
_EXIT_S = 10.0
_ACCEPTED_AT_ONCE = 64
_FEWER = "see the log; with too little memory, choose fewer --workers"
_log = logging.getLogger("embark.serve")


@dataclass(eq=False, slots=True)
class _Worker:
    process: BaseProcess
    handed: socket.socket
    channel: ProcessChannel = field(init=False)
    num_open: int = 0  # Open connections of the worker.
    metrics: list[Metric] = field(default_factory=list)  # The last metrics of the process.


class WorkerPool:
    """Serves with several processes."""

    def __init__(self, settings: WorkerSettings, num_workers: int, on_change: Callable[[VersionChange], None]) -> None:
        self._settings, self._num_workers, self._on_change = settings, num_workers, on_change
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._workers: list[_Worker] = []  # Workers that answer.
        self._started: list[_Worker] = []  # These, and workers that do not accept requests yet.
        self._lock = threading.Lock()  # Guards the list of workers.
        self._version_lock = threading.RLock()  # Held while a version is loaded, or a process is replaced.
        self._ended_metrics: list[Metric] = []
        self._last_windows: list[Window] = []
        self._log = TrafficLog()
        self._url = ""
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self.version, self._prepared = 0, 0
        self._current: int | None = None
        self._refused: VersionChange | None = None

    # The state that the poller reads and sets.

    @property
    def current(self) -> int | None:
        return self._current

    @current.setter
    def current(self, current: int | None) -> None:
        self._set_state(current, self._refused)

    @property
    def refused(self) -> VersionChange | None:
        return self._refused

    @refused.setter
    def refused(self, refused: VersionChange | None) -> None:
        self._set_state(self._current, refused)

    def _set_state(self, current: int | None, refused: VersionChange | None) -> None:
        if (current, refused) != (self._current, self._refused):
            self._current, self._refused = current, refused
            self._on_all("set_state", current, refused)

    def report(self, change: VersionChange) -> None:
        """Tell every worker that a version was rejected."""
        self._on_all("report", change)
        self._log.add_refused(change)
        self._on_change(change)

    def prepare(self, wanted: int) -> None:
        """Prepare a version in every process, or in none."""
        fetch_version(self._settings.uri, wanted, self.version)
        try:
            self._load(wanted)
        except EmbarkError:
            self.discard()
            raise
        self._prepared = wanted

    def switch(self) -> set[Path]:
        change = VersionChange(self._prepared, self.version)
        self.version, self._refused = self._prepared, None  # a process that ended is replaced by one of this version
        folders: set[Path] = set().union(*self._on_all("switch"))
        self._record_version(is_start=False)
        self._on_change(change)
        return folders

    def discard(self) -> None:
        self._on_all("discard")

    # Processes.

    def start(self, version: int | None) -> tuple[str, str]:
        """Start processes that answer with this version, or with the current one. Return the model's name and where it
        runs."""
        self._workers = [self._spawn() for _ in range(self._num_workers)]
        self.version, self._refused = load_first(self._settings.uri, version, self._load_first)
        self._current = self._refused.version if self._refused else self.version
        names = self._on_all("serve", self._current, self._refused, is_needed=True)
        return names[0]  # type: ignore[no-any-return]

    def _load_first(self, version: int | None) -> int:
        version = fetch_version(self._settings.uri, version)
        self._load(version)
        return version

    def _load(self, version: int) -> None:
        self._on_all("load", version, is_needed=True)

    def _spawn(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        handed, taken = socket.socketpair()
        process = self._context.Process(target=run_worker, args=(theirs, taken, self._settings), name="embark-worker",
                                        daemon=True)
        process.start()
        theirs.close()
        taken.close()
        handed.setblocking(False)
        worker = _Worker(process, handed)
        worker.channel = ProcessChannel(ours, {
            "metrics": self.metrics, "feedback": partial(self._feedback, worker),
            "ended": partial(self._ended, worker)})
        self._started.append(worker)
        return worker

    def _on_all(self, name: str, *args: Any, is_needed: bool = False) -> list[Any]:
        """Call a function in each process. One that is gone is left out, unless it is needed."""
        with self._lock:
            workers = list(self._workers)

        def call(worker: _Worker) -> tuple[Any, EmbarkError | None]:
            try:
                return worker.channel.call(name, *args, timeout_s=None if is_needed else CALL_S), None
            except EmbarkError as error:
                return None, error
            except ProcessEnded:
                return None, Fault(f"a worker process ended ({_how(worker.process)}) while it had to {name}",
                                   fix=_FEWER)

        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            found = list(threads.map(call, workers))
        for _, error in found:
            if error and is_needed:
                raise error
        return [value for value, error in found if error is None]

    def _ended(self, worker: _Worker, window: Window, metrics: list[Metric]) -> None:
        """Keep the last counts of a process that ends."""
        worker.metrics = metrics
        with self._lock:
            self._last_windows.append(window)

    def _remove(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.remove(worker)
            self._ended_metrics = add_up([self._ended_metrics, worker.metrics], is_ended=True)
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.channel.close()
        worker.handed.close()
        self._started.remove(worker)

    def _replace(self) -> None:
        """Start processes until another one answers or the server ends."""
        delay_s = 1.0
        while not self._stopping.is_set():
            with self._version_lock:
                worker = self._spawn()
                try:
                    fetch_version(self._settings.uri, self.version)
                    worker.channel.call("load", self.version)
                    worker.channel.call("serve", self._current, self._refused)
                    with self._lock:
                        self._workers.append(worker)
                    with suppress(OSError):  # the server has ended
                        self._wake.send(b"\0")
                    return
                except (EmbarkError, ProcessEnded) as error:
                    if self._stopping.is_set():
                        return
                    _log.warning("a worker process cannot be replaced yet: %s", error)
                    self._end(worker)
            self._stopping.wait(delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_S)

    # Requests for all processes.

    def metrics(self) -> bytes:
        """Return the metrics of all processes, those that ended included."""
        def read(worker: _Worker) -> None:
            with suppress(ProcessEnded, EmbarkError):
                worker.metrics = worker.channel.call("metrics", timeout_s=CALL_S)

        with self._lock:
            workers = list(self._workers)
        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            list(threads.map(read, workers))
        with self._lock:
            families = add_up([*(one.metrics for one in self._workers), self._ended_metrics])
        return metrics_text([*families, *self._log.collect()])

    def _feedback(self, asking: _Worker, body: Mapping[str, Any]) -> int:
        with self._lock:
            others = [one for one in self._workers if one is not asking]
        for worker in others:
            with suppress(ProcessEnded):
                if num_rows := worker.channel.call("feedback", body, timeout_s=CALL_S):
                    return int(num_rows)
        return 0

    # The server.

    def run(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Accept connections until SIGTERM or Ctrl-C; then every accepted request is answered."""
        with self._signals():
            on_start()
            try:
                self._accept(listener)
            finally:
                self._stopping.set()
                listener.close()
                self._drain()

    def polling(self, poll_s: float) -> AbstractContextManager[None]:
        """Switch to versions that become current while the block runs; with 0, never."""
        return VersionPoller(self._settings.uri, self, self, poll_s, self._version_lock).running()

    @contextmanager
    def recording(self, folder: Path | None, url: str) -> Iterator[None]:
        """Record the traffic while the block runs; with a folder, as events in it."""
        self._url = url
        self._log.open(folder)
        self._record_version(is_start=True)
        if self._refused:  # which each process has counted
            self._log.add_refused(self._refused)
            self._on_change(self._refused)
        thread = threading.Thread(target=self._write_windows, name="embark-traffic", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(_EXIT_S)
            self._write([])
            self._log.close()

    def stop(self) -> None:
        """End processes that are still running."""
        self._stopping.set()
        for worker in list(self._started):
            self._end(worker)
        self._wake.close()
        self._woken.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self._stopping.set()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        self._wake.setblocking(False)
        woken_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)  # whichever thread gets it
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._woken.setblocking(False)
        while not self._stopping.is_set():
            with self._lock:
                sources: dict[Any, _Worker | None] = {listener: None, self._woken: None}
                for worker in self._workers:
                    sources |= {worker.handed: worker, worker.process.sentinel: worker}
            if len(sources) == 2:
                raise Fault("no worker process is left", fix=_FEWER)
            for ready in wait(list(sources)):
                known = sources[ready]
                if ready is listener:
                    self._hand_out(listener)
                elif ready is self._woken:
                    with suppress(BlockingIOError):
                        self._woken.recv(4_096)
                elif known and ready is known.handed:
                    with suppress(OSError):
                        known.num_open -= len(known.handed.recv(4_096))
                elif known and known in self._workers:
                    _log.warning("worker process %s ended (%s); another one is started", known.process.pid,
                                 _how(known.process))
                    self._remove(known)
                    threading.Thread(target=self._replace, name="embark-replace", daemon=True).start()

    def _hand_out(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # such as too many open files
                _log.warning("a connection cannot be accepted: %s", error)
                time.sleep(0.01)
                return
            with client:
                if sum(worker.num_open for worker in self._workers) >= MAX_CONNECTIONS:
                    continue
                for worker in sorted(self._workers, key=lambda one: one.num_open):
                    with suppress(OSError):  # it is gone, or takes no more
                        socket.send_fds(worker.handed, [b"\0"], [client.fileno()])
                        worker.num_open += 1
                        break

    def _drain(self) -> None:
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            worker.process.terminate()
        ends_s = time.monotonic() + DRAIN_S + _EXIT_S
        for worker in workers:
            worker.process.join(max(0.0, ends_s - time.monotonic()))

    # The record of the traffic.

    def _record_version(self, *, is_start: bool) -> None:
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            with suppress(ProcessEnded):
                self._log.add(worker.channel.call("version_event", self._url, is_start, timeout_s=CALL_S))
                return

    def _write_windows(self) -> None:
        while not self._stopping.wait(1.0):
            if self._log.is_due:
                self._write(self._on_all("window"))

    def _write(self, windows: Sequence[Window]) -> None:
        with self._lock:
            ended, self._last_windows = self._last_windows, []
        self._log.write([*windows, *ended])


def _how(process: BaseProcess) -> str:
    code = process.exitcode
    return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
