"""Where the branches of a captured step run, and what tells them of each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BRANCHES = ("weights", "tables", "sort", "metrics", "reduction")


class Streams:
    """Of one engine: the step's own, the one that copies batches, and one for each branch."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.Stream(device)
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
