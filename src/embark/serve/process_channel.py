"""Calls between two processes of a server, each of which answers the other's while it waits."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from embark.errors import EmbarkError, Fault

_log = logging.getLogger("embark.serve")


class ProcessEnded(Exception):
    """Raised if the other process is gone or does not answer in time."""


class ProcessChannel:
    """One end of a channel. Each process trusts what the other sends: one of them started the other."""

    def __init__(self, connection: Connection, answers: Mapping[str, Callable[..., Any]],
                 on_end: Callable[[], None] = lambda: None) -> None:
        """`answers` are the functions that the other process may call. `on_end` is called when it is gone."""
        self._connection, self._answers, self._on_end = connection, answers, on_end
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="embark-call")
        threading.Thread(target=self._read, name="embark-channel", daemon=True).start()

    def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the other process; raise what it raised."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._has_ended:
                raise ProcessEnded(name)
            self._waiting[number] = answer
        self._send((number, name, args))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise ProcessEnded(name) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def close(self) -> None:
        """Close the channel, which the other process notices."""
        with suppress(OSError):
            self._connection.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._lock, suppress(OSError):  # the thread that reads notices
            self._connection.send(message)

    def _read(self) -> None:
        while True:
            try:
                number, name, value = self._connection.recv()
            except (OSError, EOFError):
                break
            if name:
                self._threads.submit(self._answer, number, name, value)
                continue
            with self._lock:
                waiting = self._waiting.get(number)
            if waiting and isinstance(value, BaseException):
                waiting.set_exception(value)
            elif waiting:
                waiting.set_result(value)
        with self._lock:
            self._has_ended = True
            waiting_for = list(self._waiting.values())
        for one in waiting_for:
            one.set_exception(ProcessEnded("the process ended"))
        self._threads.shutdown(wait=False)
        self._on_end()

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value = self._answers[name](*args)
        except (EmbarkError, ValueError) as error:
            value = error
        except Exception:
            _log.exception("%s failed", name)
            value = Fault("internal error", fix="see the log")
        self._send((number, "", value))
