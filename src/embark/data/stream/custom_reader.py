"""A stream that custom code reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from embark.errors import DataError, UserError
from embark.spec import StreamSpec, file_of
from embark.spec.user_code import load_user_class, location_of, user_call, user_errors
from .records import Message, Offset, Offsets

_CALL = "poll(self, offset, timeout_s)"


class CustomReader:
    """Calls the user's class: `poll(offset, timeout_s)` returns the (offset, row) pairs that follow an offset, the same
    every time; `acknowledge(offset)`, where it has one, hears what is committed."""

    def __init__(self, stream: StreamSpec) -> None:
        self._stream = stream
        self._last: Offset = None

    def open(self, offsets: Offsets) -> Sequence[str]:
        self._last = offsets.get("")
        source = self._stream.source
        with user_errors():
            kind = load_user_class(source, self._stream.code)
            if not callable(getattr(kind, "poll", None)):
                raise UserError(f"{file_of(source)}: {kind.__name__} has no method {_CALL}",
                                "docs/guides/follow.md shows one")
            self._where = location_of(kind.poll)
            with user_call(f"{file_of(source)}: class {kind.__name__}", "__init__(self, stream)"):
                self._own: Any = kind(self._stream)
        return [""]

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        with user_errors(), user_call(self._where, _CALL):
            found = self._own.poll(self._last, timeout_s)
        messages = []
        for pair in found or ():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise DataError(f"{self._where}: poll returned {pair!r:.80}",
                                "return pairs of an offset and a row, a dictionary or JSON text")
            if not isinstance(pair[0], int | str | list):
                raise DataError(f"{self._where}: poll returned the offset {pair[0]!r:.80}",
                                "an offset is saved in checkpoints as JSON: an int, a text or a list of these")
            row = {name: _plain(value) for name, value in pair[1].items()} if isinstance(pair[1], Mapping) else pair[1]
            is_row = isinstance(row, dict | bytes | str)
            messages.append(Message(pair[0], row if is_row else repr(row), why="" if is_row else
                                    f"a Python {type(row).__name__}, not a dictionary or JSON text"))
        if messages:
            self._last = messages[-1].offset
        return messages

    def acknowledge(self, offsets: Offsets) -> None:
        if hasattr(self._own, "acknowledge"):
            with user_errors():
                self._own.acknowledge(offsets[""])

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        if hasattr(self._own, "close"):
            self._own.close()


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays to Python's, which checkpoints can hold."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
