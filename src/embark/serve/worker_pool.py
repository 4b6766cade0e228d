"""The processes of `embark serve` on a CPU: one that accepts connections and polls versions, and those that answer.

Each connection goes to the process that has the fewest. Tables are mapped from files, so that all processes share their
pages; each has copies of those only that a delta changed. A new version is loaded and checked by every process before
any answers with it, and refused by all where one refuses it. A process that ends is replaced; while none is left,
clients wait. The server ends only when none is left and several attempts to start one have failed.
"""

import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait as wait_for_all
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from embark.errors import EmbarkError, Fault
from embark.export.artifact import VersionId, copy_folders, fetch_version, open_versions
from embark.export.delta import identity_of
from embark.spec.serve import DRAIN_S
from .endpoint import GRACE_S, MAX_CONNECTIONS, is_ready, is_writable, refuse_new_clients
from .served_model import VersionChange
from .server_metrics import add_up, metrics_text
from .traffic import TrafficLog, Window
from .version_poller import VersionPoller, load_first
from .worker import CALL_S, ProcessChannel, WorkerSettings, run_worker

PRELOADED = ("embark.serve.worker", "embark.trainers.torch.scoring.open_model")  # Once, before processes are forked.
MAX_FAILURES = 3  # Failed attempts to replace a process after which a server without any process ends.
MAX_RESTART_S = 60.0  # Longest pause between two attempts to replace a process.
_EXIT_S = 10.0
_ACCEPTED_AT_ONCE = 64
_FEWER = "see the log; after signal 9 with too little memory, choose fewer --workers"
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
        self._lock = threading.Lock()  # Guards the list of workers and what they counted.
        self._version_lock = threading.RLock()  # Held while a version is loaded, or a process is replaced.
        self._ended_metrics: list[Metric] = []
        self._windows: list[Window] = []  # Not recorded yet.
        self._log = TrafficLog()
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._active = self._previous = self._prepared = VersionId(0, "")  # The previous one is kept for a rollback.
        self._failures: list[str] = []  # Why processes could not be replaced, since one was.
        self.current: int | None = None
        self.refused: VersionChange | None = None

    # The versions, which the poller decides.

    @property
    def version(self) -> int:
        return self._active.version

    @property
    def identity(self) -> str:
        return self._active.identity

    @property
    def folders(self) -> set[Path]:
        """The folders of the active version."""
        return copy_folders(open_versions(self._settings.uri), self._active.chain)

    def set_state(self, current: int | None, refused: VersionChange | None) -> None:
        """Tell every worker which version is current, and why it does not answer."""
        before, self.current, self.refused = (self.current, self.refused), current, refused
        if (current, refused) != before:
            self._on_all("set_state", current, refused)
        if refused and refused != before[1]:
            self._report(refused)

    def _report(self, refused: VersionChange) -> None:
        self._log.add_refused(refused)
        self._on_change(refused)

    def prepare(self, wanted: VersionId) -> None:
        """Prepare a version in every process, or in none."""
        fetched, active = self._previous, self._active
        if wanted[:2] != fetched[:2]:
            self._previous = VersionId(0, "")  # its copies may have made room for this one
            fetched = fetch_version(self._settings.uri, wanted, active.identity)
            if identity_of(fetched.chain[0]) == active.identity:
                fetched = fetched._replace(chain=(*active.chain[:-1], *fetched.chain))
        try:
            self._on_all("load", fetched, is_needed=True)
        except EmbarkError:
            self.discard()
            raise
        self._prepared = fetched

    def switch(self) -> set[Path]:
        change = VersionChange(self._prepared.version, self.version, identity=self._prepared.identity)
        self._previous, self._active = self._active, self._prepared  # a process that ended is replaced by one of these
        self.refused = None
        folders: set[Path] = set().union(*self._on_all("switch").values())
        self._log.add_version(self._about())
        self._on_change(change)
        return folders

    def discard(self) -> None:
        self._on_all("discard")

    # Processes.

    def start(self, version: int | None) -> tuple[str, str]:
        """Start processes that answer with this version, or with the current one. Return the model's name and where it
        runs."""
        self._workers = [self._spawn() for _ in range(self._num_workers)]
        self._active, self.refused = load_first(self._settings.uri, version, self._load_first)
        self.current = self.refused.version if self.refused else self.version
        names = self._on_all("serve", self.current, self.refused, is_needed=True)
        return next(iter(names.values()))  # type: ignore[no-any-return]

    def _load_first(self, version: int | None) -> VersionId:
        fetched = fetch_version(self._settings.uri, version)
        self._on_all("load", fetched, is_needed=True)
        return fetched

    def _spawn(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        handed, taken = socket.socketpair()
        process = self._context.Process(target=run_worker, args=(theirs, taken, self._settings), name="embark-worker",
                                        daemon=True)
        with theirs, taken:
            try:
                process.start()
            except (OSError, EOFError) as error:  # EOFError: what forks processes could not, and has ended
                ours.close()
                handed.close()
                raise Fault(f"a worker process cannot be started: {error or 'no memory, or too many processes'}",
                            _FEWER) from error
        handed.setblocking(False)
        worker = _Worker(process, handed)
        worker.channel = ProcessChannel(ours, {"metrics": self.metrics, "counted": partial(self._counted, worker)})
        self._started.append(worker)
        return worker

    def _on_all(self, name: str, *args: Any, is_needed: bool = False) -> dict[_Worker, Any]:
        """Call a function in each process, and return the answers. A process that is gone is left out, unless it is
        needed."""
        with self._lock:
            workers = list(self._workers)
        if is_needed and not workers:
            raise Fault(f"no worker process is there to {name}", _FEWER)
        answers = {worker: worker.channel.submit(name, *args) for worker in workers}
        wait_for_all(answers.values(), None if is_needed else CALL_S)
        found = {}
        for worker, answer in answers.items():
            try:
                found[worker] = answer.result(0)
            except EmbarkError:
                if is_needed:
                    raise
            except OSError:
                if is_needed:
                    raise Fault(f"a worker process ended ({_how(worker.process)}) while it had to {name}",
                                _FEWER) from None
        return found

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
                worker = None
                try:
                    worker = self._spawn()
                    fetch_version(self._settings.uri, self._active)  # from its copies, if they are intact
                    worker.channel.submit("load", self._active).result()
                    worker.channel.submit("serve", self.current, self.refused).result()
                    with self._lock:
                        self._workers.append(worker)
                        self._failures.clear()
                    self._look_again()
                    return
                except (EmbarkError, OSError) as error:
                    if self._stopping.is_set():
                        return
                    self._failures.append(str(error))
                    _log.warning("a worker process cannot be replaced yet: %s", error)
                    if worker is not None:
                        self._end(worker)
                    self._look_again()
            self._stopping.wait(delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_S)

    def _look_again(self) -> None:
        """Let the loop that accepts connections see which processes there are."""
        with suppress(OSError):  # it was told already, or the server has ended
            self._wake.send(b"\0")

    # What the processes count.

    def _counted(self, worker: _Worker, counts: tuple[Window, list[Metric]]) -> None:
        """Keep what a process counted. It says so itself before it ends."""
        with self._lock:
            self._windows.append(counts[0])
            worker.metrics = counts[1]

    def _count(self) -> None:
        for worker, counts in self._on_all("counts").items():
            self._counted(worker, counts)

    def metrics(self) -> bytes:
        """Return the metrics of all processes, those that ended included."""
        self._count()
        with self._lock:
            families = add_up([*(one.metrics for one in self._workers), self._ended_metrics])
        return metrics_text([*families, *self._log.collect()])

    def _take_windows(self) -> list[Window]:
        if not self._stopping.is_set():
            self._count()
        with self._lock:
            windows, self._windows = self._windows, []
        return windows

    def _about(self) -> dict[str, Any]:
        return next(iter(self._on_all("about").values()), {"version": self.version})

    # The server.

    def run(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Accept connections until SIGTERM or Ctrl-C; then every accepted request is answered."""
        with self._signals():
            on_start()
            try:
                self._accept(listener, self._stopping.is_set)
            finally:
                self._stopping.set()
                self._drain(listener)

    def polling(self, poll_s: float) -> AbstractContextManager[None]:
        """Switch to versions that become current while the block runs; with 0, never."""
        return VersionPoller(self._settings.uri, self, poll_s, self._version_lock).running()

    @contextmanager
    def recording(self, folder: Path | None, url: str) -> Iterator[None]:
        """Record the traffic while the block runs; with a folder, as events in it."""
        with self._log.recording(folder, url, self._about(), self._take_windows):
            if self.refused:  # which each process has counted
                self._report(self.refused)
            yield

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

    def _accept(self, listener: socket.socket, is_done: Callable[[], bool], wait_s: float | None = None) -> None:
        listener.setblocking(False)
        self._woken.setblocking(False)
        while not is_done():
            with self._lock:
                sources: dict[Any, _Worker | None] = {listener: None, self._woken: None}
                for worker in self._workers:
                    sources |= {worker.handed: worker, worker.process.sentinel: worker}
            if len(sources) == 2 and (len(self._failures) >= MAX_FAILURES or self._stopping.is_set()):
                raise Fault(f"no worker process is left, and none can be started: "
                            f"{self._failures[-1] if self._failures else 'it is stopping'}", _FEWER)
            for ready in wait(list(sources), wait_s):
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
            ready = [worker for worker in self._workers if is_writable(worker.handed)]
            if not ready:  # clients wait meanwhile
                time.sleep(0.01)
                return
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
                for worker in sorted(ready, key=lambda one: one.num_open):
                    with suppress(OSError):  # it has gone, or takes no more
                        socket.send_fds(worker.handed, [b"\0"], [client.fileno()])
                        worker.num_open += 1
                        break

    def _drain(self, listener: socket.socket) -> None:
        """Hand out every client that the kernel has accepted, and wait for the workers, which answer them."""
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            worker.process.terminate()
        started_s = time.monotonic()
        ends_s = started_s + DRAIN_S + _EXIT_S
        refuse_new_clients(listener.getsockname()[1])
        with suppress(Fault):
            self._accept(listener, lambda: (time.monotonic() > started_s + GRACE_S and not is_ready(listener))
                         or time.monotonic() > ends_s, 0.01)
        listener.close()
        for worker in workers:
            with suppress(OSError):
                worker.handed.shutdown(socket.SHUT_WR)
        for worker in workers:
            worker.process.join(max(0.0, ends_s - time.monotonic()))


def _how(process: BaseProcess) -> str:
    code = process.exitcode
    if code == -signal.SIGBUS:
        return "signal 7: a file that it mapped was shortened, or cannot be read"
    return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
