"""Where the branches of a captured step run, and what tells them of each other."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

WEIGHTS = ("weights", "more_weights")  # In turns, where a kernel's start takes as long as its work.
BRANCHES = (*WEIGHTS, "tables", "long_runs", "sort", "metrics", "reduction")
Beside = Callable[[], AbstractContextManager[Any]]
"""Opens a branch of work that the rest does not wait for."""


class Streams:
    """Of one engine: the step's own, the one that copies batches, and one for each branch."""

    def __init__(self, device: torch.device, *, is_main_first: bool) -> None:
        """`is_main_first`: where the device has room for one branch's next kernel, it is the step's own."""
        self.main = torch.cuda.Stream(device, priority=-1 if is_main_first else 0)
        self.copy = torch.cuda.Stream(device)
        self.named = {name: torch.cuda.Stream(device) for name in BRANCHES}
        self.opened: set[str] = set()  # In this step: a capture may not wait for others.
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.done = [torch.cuda.Event() for _ in range(2)]

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """What is done inside waits for what came before, and nothing after waits for it."""
        stream = self.named[name]
        self.opened.add(name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
