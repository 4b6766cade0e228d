"""What went wrong with a store, in one sentence with its fix and without the secrets that a library's error may quote;
and how often a store is asked again."""

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from embark.errors import DataError, EmbarkError, Fault, UserError
from embark.formatting import redact
from embark.values import frozen, read_table

T = TypeVar("T")


@frozen
class RetryPolicy:
    """A request that fails in a way that may pass is sent again, after waits that double and are drawn at random."""

    max_retries: int = 8
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    connect_s: float = 10.0  # Limit for reaching the server.
    silence_s: float = 60.0  # Limit without one byte from it; also for a piece of an upload.
    request_s: float = 300.0  # Limit for one request.
    give_up_s: float = 180.0  # After this no further retry begins. Signed requests are valid for five minutes.


BRIEF_RETRY = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=20.0)
"""For reads that a command can do without: a store that does not answer is not waited for."""


class RetriesExhausted(Exception):
    """The last failure, and the number of attempts."""

    def __init__(self, attempts: int, last: Exception) -> None:
        super().__init__(str(last))
        self.attempts = attempts
        self.last = last


def call_with_retries(call: Callable[[], T], retry: RetryPolicy, may_pass: Callable[[Exception], bool]) -> T:
    """Call again while `may_pass` accepts what was raised, for libraries without retries of their own."""
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


MAX_CAUSE = 240
CODE = re.compile(r"<Code>([\w.]+)</Code>")
STATUS = re.compile(r"\bstatus: (\d{3})\b")  # The form of obstore's description of the last answer.


_TABLES = read_table(__file__, "failures.toml")
FIXES: dict[str, str] = _TABLES["fixes"]
DAMAGED = FIXES["damaged"]


class NotFound(UserError):
    """There is no such file in the store."""


def explain(error: Exception, operation: str, where: str) -> EmbarkError:
    """Make the error of the tree for what a library raised while it did `operation` to `where`."""
    if isinstance(error, RetriesExhausted):
        return _said(Fault, operation, where, _cause(error.last), error.attempts)
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error, operation, where)
    text = str(error)
    retries = [int(number) for number in re.findall(r"\bretries: (\d+)", text)]
    attempts = max(retries, default=0) + 1
    codes = {*CODE.findall(text), *STATUS.findall(text)}
    for known in _TABLES["failure"]:
        if codes.intersection(known.get("codes", ())) or any(words in text for words in known.get("words", ())):
            return _said(Fault if known.get("is_retryable", True) else UserError, operation, where,
                         f"{known['what']} ({_cause(error)})", attempts, FIXES.get(known["fix"], known["fix"]))
    if isinstance(error, FileNotFoundError):
        return NotFound(f"there is no {where}", "check the path")
    if isinstance(error, PermissionError):
        return _said(Fault, operation, where, f"access is denied ({_cause(error)})", attempts, FIXES["grant access"])
    return _said(Fault, operation, where, _cause(error), attempts)


def explain_data(error: OSError, path: object, fix: str = "") -> EmbarkError:
    """Explain why data cannot be read: the input is wrong if the file is missing or may not be read; anything else is a
    fault."""
    found = explain(error, "read", str(path))
    return found if isinstance(found, Fault) else DataError(f"{path}: {error.strerror or error}", fix)


@contextmanager
def writing(folder: Path, field: str) -> Iterator[None]:
    """Make the folder that `field` of the spec names, and explain why files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        is_short = error.errno is None and str(error).endswith("written")  # so NumPy says that the disk is full
        code = errno.ENOSPC if is_short else error.errno
        found = explain(OSError(code, os.strerror(code)) if code else error, "write", str(folder))
        is_full = code in (errno.ENOSPC, errno.EDQUOT)
        raise type(found)(found.what, fix=f"free some space, or write to a larger disk ({field}), and run the same "
                          "command again" if is_full else found.fix) from None


def is_unanswered(error: Exception) -> bool:
    """Tell whether obstore's last request got no answer, with retries left. obstore sends a POST again only after a bad
    answer."""
    text = str(error)
    counts = re.search(r"\bretries: (\d+),\s+max_retries: (\d+)", text)
    has_retries_left = counts is None or int(counts[1]) < int(counts[2])
    return "HttpError" in text and has_retries_left and not STATUS.search(text)


def is_upload_gone(error: Exception) -> bool:
    """Tell whether the store does not know the upload that was to be completed, as after an earlier try that completed
    it."""
    return "NoSuchUpload" in CODE.findall(str(error))


def _said(kind: type[EmbarkError], operation: str, where: str, cause: str, attempts: int, fix: str = "") -> EmbarkError:
    tried = f" in {attempts} attempts" if attempts > 1 else ""
    return kind(f"could not {operation} {where}{tried}: {cause}",
                fix=fix or "check the network and the store's health, then start again: the run resumes from its last "
                           "checkpoint")


def _cause(error: Exception) -> str:
    """Return the store's own code and message if it sent them, else the first line of what the library says."""
    for sign, words in _TABLES["network"].items():
        if sign in str(error).partition("Debug source:")[2]:
            return str(words)
    text = str(error).partition("Debug source:")[0].strip() or type(error).__name__
    code = CODE.search(text)
    if code:
        message = re.search(r"<Message>([^<\n]*)", text)
        text = f"{code[1]}: {message[1].strip()}" if message and message[1].strip() else code[1]
    else:
        text = _innermost(text)
    text = redact(" ".join(text.split()))
    return text if len(text) <= MAX_CAUSE else text[: MAX_CAUSE - 1] + "…"


def _innermost(text: str) -> str:
    """Drop what obstore wraps around the cause, which the message says already."""
    for mark in (" - Server returned ", " - HTTP error: ", " - "):
        if mark in text:
            return text.rpartition(mark)[2]
    return text


def _of_system(error: OSError, operation: str, where: str) -> EmbarkError:
    cause = os.strerror(error.errno or 0).lower()
    if error.errno == errno.ENOENT:
        return NotFound(f"there is no {error.filename or where}", "check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _said(Fault, operation, where, cause, 1, "free some space, or point store.root at a larger disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
                       errno.ENAMETOOLONG):
        return _said(UserError, operation, where, cause, 1, "choose a place that this user may write and read")
    return _said(Fault, operation, where, cause, 1, "check the disk or the mount, then start again")
