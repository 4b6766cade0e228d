"""What a test does to a rank before it begins: called in the forked process, with the rank first."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any


def die_in(rank: int, victim: int, method: str, word: str) -> None:
    """SIGKILL itself as `module:Class.method` is first called with `word` in its first argument; or, where `method` is
    "removal", as an old checkpoint has lost its mark and nothing else yet."""
    if rank != victim:
        return
    committed: list[str] = []

    def before(words: tuple[Any, ...]) -> None:
        if word in str(words[:1]):
            os.kill(os.getpid(), signal.SIGKILL)

    def written(words: tuple[Any, ...]) -> None:
        if words[0].endswith("commit.json"):
            committed.append(words[0])

    def removed(words: tuple[Any, ...]) -> None:
        if committed and words[0] < committed[-1].partition("/")[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    if method == "removal":
        _before("embark.store.object_store:LocalStore.create", written)
        _before("embark.store.object_store:LocalStore.delete_prefix", removed)
    else:
        _before(method, before)


def die_writing(rank: int, victim: int, word: str) -> None:
    """SIGKILL itself with half of the first piece of a file with `word` in its name on the disk."""
    if rank != victim:
        return
    from embark.store.object_store import LocalStore

    write = LocalStore.write

    def half_of(data: Any) -> Iterator[Any]:
        for piece in data:
            yield piece[: len(piece) // 2]
            os.kill(os.getpid(), signal.SIGKILL)

    def write_half(self: LocalStore, path: str, data: Any, size_bytes: int | None = None) -> None:
        write(self, path, half_of(data) if word in path else data, size_bytes)

    LocalStore.write = write_half  # type: ignore[method-assign]


def die_at_step(rank: int, victim: int, step: int, word: str) -> None:
    """SIGKILL itself as the engine is to train `step`, once a file with `word` in its name has been created."""
    if rank != victim:
        return
    from embark.store.object_store import LocalStore
    from embark.trainers.torch.engines.pipeline import PipelineEngine

    written = threading.Event()
    create, train = LocalStore.create, PipelineEngine.step

    def create_and_tell(self: LocalStore, path: str, data: bytes) -> bool:
        is_new = create(self, path, data)
        if word in path:
            written.set()
        return is_new

    def train_or_die(self: PipelineEngine, batches: Iterator[Any], number: int) -> None:
        if number == step:
            written.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        train(self, batches, number)

    LocalStore.create = create_and_tell  # type: ignore[method-assign]
    PipelineEngine.step = train_or_die  # type: ignore[method-assign]


def slow(rank: int, method: str, word: str, seconds: float, mark: str, only: int = -1) -> None:
    """Wait at each call of `module:Class.method` with `word` in its first argument; `mark` is a file that says so."""
    if only not in (-1, rank):
        return

    def before(words: tuple[Any, ...]) -> None:
        if word in str(words[:1]):
            open(mark, "w").close()
            time.sleep(seconds)

    _before(method, before)


def resave(rank: int, step: int) -> None:
    """Write what a resume has loaded, untrained, as the checkpoint of `step`."""
    from embark.trainers.torch.checkpoint import TorchCheckpointer

    load = TorchCheckpointer.load_newest

    def load_and_save(self: TorchCheckpointer, warn: Any) -> Any:
        loaded = load(self, warn)
        self.begin(step, {})
        (saved,) = self.wait()
        assert saved.error is None, saved.error
        return loaded

    TorchCheckpointer.load_newest = load_and_save  # type: ignore[method-assign]


def hasty(rank: int, **fields: float) -> None:
    """Stores are waited for less than they are by default."""
    from embark.store import object_store

    policy = object_store.RetryPolicy
    object_store.RetryPolicy = lambda: policy(**fields)  # type: ignore[assignment,misc]


def _before(method: str, call: Any) -> None:
    module, _, names = method.partition(":")
    owner_name, _, name = names.rpartition(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, name)

    def replaced(self: Any, *words: Any, **more: Any) -> Any:
        call(words)
        return original(self, *words, **more)

    setattr(owner, name, replaced)


def elsewhere(rank: int) -> None:
    """On another machine, which knows nothing of the processes of this one."""
    from embark.store import lease

    lease._boot_and_namespace = lambda: "another-boot pid:[1]"


def in_hosts_of_two(rank: int) -> None:
    """Ranks 0 and 1 are one host, 2 and 3 another, as torchrun on two machines would say."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
