"""What went wrong with a store, in one sentence with its fix, and without the secrets a library's error may quote."""

import errno
import os
import re
import tomllib
from pathlib import Path

from embark.errors import DataError, EmbarkError, Fault, UserError
from embark.formatting import redact
from embark.store.retry_policy import RetriesExhausted

MAX_CAUSE = 240
CODE = re.compile(r"<Code>([\w.]+)</Code>")
STATUS = re.compile(r"\bstatus: (\d{3})\b")  # In obstore's own description of the last answer.


_TABLES = tomllib.loads(Path(__file__).with_name("failures.toml").read_text(encoding="utf-8"))
FIXES: dict[str, str] = _TABLES["fixes"]
DAMAGED = FIXES["damaged"]


class NotFound(UserError):
    """There is no such file in the store."""


def explain(error: Exception, operation: str, where: str) -> EmbarkError:
    """The error of the tree for what a library raised while it did `operation` to `where`."""
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
        return NotFound(f"there is no {where}", fix="check the path")
    if isinstance(error, PermissionError):
        return _said(Fault, operation, where, f"access is denied ({_cause(error)})", attempts, FIXES["grant access"])
    return _said(Fault, operation, where, _cause(error), attempts)


def explain_data(error: OSError, path: object, fix: str = "") -> EmbarkError:
    """Of data that cannot be read: the input is wrong where the file is not there or may not be read; else a fault."""
    found = explain(error, "read", str(path))
    return found if isinstance(found, Fault) else DataError(f"{path}: {error.strerror or error}", fix=fix)


def is_unanswered(error: Exception) -> bool:
    """Did obstore's last request get no answer, with retries left? It sends a POST again after a bad answer only."""
    text = str(error)
    counts = re.search(r"\bretries: (\d+),\s+max_retries: (\d+)", text)
    has_retries_left = counts is None or int(counts[1]) < int(counts[2])
    return "HttpError" in text and has_retries_left and not STATUS.search(text)


def is_upload_gone(error: Exception) -> bool:
    """Does the store not know the upload that was to be completed? It is so, too, where an earlier try completed it."""
    return "NoSuchUpload" in CODE.findall(str(error))


def _said(kind: type[EmbarkError], operation: str, where: str, cause: str, attempts: int, fix: str = "") -> EmbarkError:
    tried = f" in {attempts} attempts" if attempts > 1 else ""
    return kind(f"could not {operation} {where}{tried}: {cause}",
                fix=fix or "check the network and the store's health, then start again: the run resumes from its last "
                           "checkpoint")


def _cause(error: Exception) -> str:
    """The store's own code and message where it sent them, else the first line of what the library says."""
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
    """obstore wraps the cause in what it did, which the message says already."""
    for mark in (" - Server returned ", " - HTTP error: ", " - "):
        if mark in text:
            return text.rpartition(mark)[2]
    return text


def _of_system(error: OSError, operation: str, where: str) -> EmbarkError:
    cause = os.strerror(error.errno or 0).lower()
    if error.errno == errno.ENOENT:
        return NotFound(f"there is no {error.filename or where}", fix="check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _said(Fault, operation, where, cause, 1, "free some space, or point store.root at a larger disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
                       errno.ENAMETOOLONG):
        return _said(UserError, operation, where, cause, 1, "choose a place that this user may write and read")
    return _said(Fault, operation, where, cause, 1, "check the disk or the mount, then start again")
