"""A process of `embark serve` that answers requests, beside others that `worker_pool` started and tells what to do."""

import gc
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from embark.errors import EmbarkError, Fault
from embark.export.artifact import VersionId
from embark.values import frozen
from .app import ModelServer, ServeLimits
from .http_server import serve_requests
from .request_rows import RequestScorer
from .served_model import Load, ServedModel, VersionChange
from .traffic import Window, about_version

_log = logging.getLogger("embark.serve")


class ProcessChannel:
    """One end of a channel. Each process trusts what the other sends: one of them started the other."""

    def __init__(self, connection: Connection, answers: Mapping[str, Callable[..., Any]],
                 on_end: Callable[[], None] = lambda: None) -> None:
        """`answers` are the functions that the other process may call. `on_end` is called when it is gone."""
        self._connection, self._answers, self._on_end = connection, answers, on_end
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        threading.Thread(target=self._read, name="embark-channel", daemon=True).start()

    def submit(self, name: str, *args: Any) -> Future[Any]:
        """Call a function of the other process. The future raises what it raised, or `ConnectionError` if the process
        is gone."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._has_ended:
                answer.set_exception(ConnectionError(name))
            else:
                self._waiting[number] = answer
        self._send((number, name, args))
        return answer

    def close(self) -> None:
        """Close the channel, which the other process notices."""
        with suppress(OSError):
            self._connection.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._lock, suppress(OSError):  # the thread that reads notices
            self._connection.send(message)

    def _read(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                number, name, value = self._connection.recv()
                if name:
                    threading.Thread(target=self._answer, args=(number, name, value), daemon=True).start()
                    continue
                with self._lock:
                    waiting = self._waiting.pop(number)
                if isinstance(value, BaseException):
                    waiting.set_exception(value)
                else:
                    waiting.set_result(value)
        with self._lock:
            self._has_ended = True
        for waiting in self._waiting.values():
            waiting.set_exception(ConnectionError("the process ended"))
        self._on_end()

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value = self._answers[name](*args)
        except EmbarkError as error:
            value = error
        except Exception:
            _log.exception("%s failed", name)
            value = Fault("internal error", "see the log")
        self._send((number, "", value))


CALL_S = 30.0  # Longest wait for what another process answers at once.


@frozen
class WorkerSettings:
    """Settings that all processes of a server share."""

    uri: str
    name: str  # Name of the model for clients; empty for the name of its run.
    load: Load
    limits: ServeLimits  # Limits of one process.
    token: str
    certificate: tuple[Path, Path] | None  # The chain and its private key.
    grpc_address: tuple[str, int] | None
    num_threads: int  # Threads of torch.


def run_worker(calls: Connection, handed: socket.socket, settings: WorkerSettings) -> None:
    """Run the process from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it gets Ctrl-C too
    gc.freeze()  # Modules imported before the fork stay in memory that all processes share.
    try:
        _Worker(calls, handed, settings).run()
    finally:
        os._exit(0)  # a version that is being loaded is given up


class _Worker:
    _model: ServedModel | None = None
    _server: ModelServer

    def __init__(self, calls: Connection, handed: socket.socket, settings: WorkerSettings) -> None:
        self._handed, self._settings = handed, settings
        self._first: RequestScorer | None = None
        self._to_serve: queue.SimpleQueue[tuple[int | None, VersionChange | None]] = queue.SimpleQueue()
        self._started: Future[tuple[str, str]] = Future()
        self._channel = ProcessChannel(calls, {
            "load": self._load, "serve": self._serve, "counts": self._counts,
            "about": lambda: about_version(self._server.model),
            **{name: lambda *args, name=name: getattr(self._model, name)(*args)
               for name in ("switch", "discard", "set_state")}}, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def run(self) -> None:
        """Serve the loaded model, once the pool says so."""
        from embark.trainers.torch.scoring.cpu_model import num_threads

        state, settings = self._to_serve.get(), self._settings
        assert self._first is not None
        model = ServedModel(self._first, settings.name, settings.load)
        self._first = None  # its memory is released when another version takes over
        try:
            model.record_empty_request()
            model.set_state(*state)
            self._server = server = ModelServer(model, settings.limits, settings.token, self._metrics)
            self._model = model
            with server.traffic.running(), num_threads(settings.num_threads):
                about = model.name, model.scorer.device
                serve_requests(server, settings.certificate, settings.grpc_address,
                               lambda _: self._started.set_result(about), handed=self._handed)
        except EmbarkError as error:
            self._started.set_exception(error)
            return
        with suppress(OSError):
            self._channel.submit("counted", self._counts()).result(CALL_S)

    def _metrics(self) -> bytes:
        """Return the metrics of all processes, or those of this one if the pool is gone."""
        try:
            found: bytes = self._channel.submit("metrics").result(2 * CALL_S)
            return found
        except OSError:
            return self._server.metrics.text()

    def _counts(self) -> tuple[Window, list[Metric]]:
        return self._server.traffic.take(), list(self._server.metrics.registry.collect())

    def _load(self, version: VersionId) -> None:
        """Load a version beside the active one, if there is one."""
        if self._model:
            self._model.prepare(version)
        else:
            self._first = None
            self._first = self._settings.load(version)

    def _serve(self, current: int | None, refused: VersionChange | None) -> tuple[str, str]:
        """Return the name of the model and where it runs, once it answers."""
        self._to_serve.put((current, refused))
        return self._started.result()
