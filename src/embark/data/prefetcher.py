"""Values made ahead of time by threads, and handed out in order."""

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`make(0)`, `make(1)`, … up to `count`, at most `depth` of them ready beside those being made.

    An error is raised when its turn comes, after everything before it.
    """

    def __init__(
        self, make: Callable[[int], T], count: int, *, depth: int, num_threads: int = 1, name: str = "embark-loader"
    ) -> None:
        self._make, self._count = make, count
        self._most_begun = max(1, depth) + num_threads
        self._ready: dict[int, T | BaseException] = {}
        self._next_to_make = self._num_taken = 0
        self._lock = threading.Lock()
        self._has_more = threading.Condition(self._lock)  # for the consumer
        self._has_space = threading.Condition(self._lock)  # for the producers
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads and drop what they had ready; each ends after what it is making."""
        with self._lock:
            self._is_closed = True
            self._ready.clear()
            self._has_more.notify_all()
            self._has_space.notify_all()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def take(self) -> Iterator[T]:
        """Each in its turn."""
        while self._num_taken < self._count:
            with self._lock:
                while self._num_taken not in self._ready and not self._is_closed:
                    self._has_more.wait()
                if self._is_closed:
                    raise RuntimeError("the Loader was closed before its last batch")
                made = self._ready.pop(self._num_taken)
                if isinstance(made, BaseException):
                    raise made
                self._num_taken += 1
                self._has_space.notify()
            yield made

    def _run(self) -> None:
        while (number := self._begun()) is not None:
            try:
                made: T | BaseException = self._make(number)
            except BaseException as error:
                made = error
            with self._lock:
                if self._is_closed:
                    return
                self._ready[number] = made
                if isinstance(made, BaseException):
                    self._next_to_make = self._count
                    self._has_space.notify_all()
                if number == self._num_taken:
                    self._has_more.notify()

    def _begun(self) -> int | None:
        """The next to make, once there is space for it; None at the end."""
        with self._lock:
            while not self._is_closed and self._next_to_make < self._count:
                if self._next_to_make - self._num_taken < self._most_begun:
                    self._next_to_make += 1
                    return self._next_to_make - 1
                self._has_space.wait()
        return None
