"""How long a store is waited for, and how often it is asked again."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A request that fails in a way that may pass is sent again, after waits that double and are drawn at random."""

    max_retries: int = 8
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    connect_s: float = 10.0  # To reach the server.
    silence_s: float = 60.0  # Without one byte from it; a piece of an upload has to be through within this too.
    request_s: float = 300.0  # For one request in all.
    give_up_s: float = 180.0  # Past this no further retry begins. Signed requests are good for five minutes.


BRIEF_RETRY = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=20.0)
"""For reads that a command can do without: a store that does not answer is not waited for."""


class RetriesExhausted(Exception):
    """The last failure, and how many attempts there were."""

    def __init__(self, attempts: int, last: Exception) -> None:
        super().__init__(str(last))
        self.attempts = attempts
        self.last = last


def call_with_retries(call: Callable[[], T], retry: RetryPolicy, may_pass: Callable[[Exception], bool]) -> T:
    """For libraries without retries of their own: call again while `may_pass` says so of what it raised."""
    began = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            is_late = time.monotonic() - began > retry.give_up_s
            if attempt > retry.max_retries or is_late:
                raise RetriesExhausted(attempt, error) from None
        longest = min(retry.longest_wait_s, retry.first_wait_s * 2 ** (attempt - 1))
        time.sleep(random.uniform(longest / 2, longest))
