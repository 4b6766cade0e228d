"""Retries of requests to a platform's API, which may be away for minutes while its control plane is upgraded."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from embark.errors import Fault
from embark.formatting import format_duration
from embark.launch.backend import Notify
from embark.store.retry_policy import RetriesExhausted, RetryPolicy, call_with_retries

API_RETRY = RetryPolicy(max_retries=1000, first_wait_s=1.0, longest_wait_s=15.0, request_s=20.0, give_up_s=180.0)
NO_RETRY = replace(API_RETRY, max_retries=0)
"""For a list of all runs: one platform that is away does not hold up the others."""
T = TypeVar("T")


class Unavailable(Exception):
    """The API does not answer now; its text says why."""


def retry_api(call: Callable[[], T], retry: RetryPolicy, notify: Notify, *, name: str, fix: str) -> T:
    """Calls again while it raises `Unavailable`, and says so."""
    def is_unavailable(error: Exception) -> bool:
        if isinstance(error, Unavailable) and retry.max_retries:
            notify(f"{name} does not answer ({error}); retrying for {format_duration(retry.give_up_s)}")
        return isinstance(error, Unavailable)

    try:
        return call_with_retries(call, retry, is_unavailable)
    except RetriesExhausted as error:
        raise Fault(f"{name} does not answer: {error.last}", fix=fix) from None
