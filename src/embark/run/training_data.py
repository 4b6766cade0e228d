"""The samples of a run as its loop sees them: a data set with an end, or a stream without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from embark.data import SampleSource
from embark.data.stream.records import StreamStopped as DataStopped
from embark.data.stream.usable import DeadLetters
from embark.spec import RunSpec
from embark.store import Checkpoint, RunDir
from embark.store.run_dir import DEAD_LETTERS
from embark.values import JsonDict

if TYPE_CHECKING:
    from embark.data.stream.source import StreamSource

__all__ = ["DataStopped", "TrainingData", "training_data"]


class TrainingData:
    """A data set, which has nothing to remember: a step says which samples it takes."""

    is_endless = False

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def start_values(self) -> JsonDict:
        """Describe the samples for the start event."""
        return {"num_train_samples": self.source.num_train_samples}

    def resume(self, run_dir: RunDir, checkpoint: Checkpoint | None) -> None:
        """Continue behind the samples of a checkpoint, or begin."""

    def reading(
        self, is_stopping: Callable[[], bool], warn: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Surround training; a batch that is waited for raises `DataStopped` once `is_stopping`."""
        return nullcontext()

    def trained(self, step: int) -> None:
        """Forget the data that only steps before `step` need."""

    def status(self, step: int) -> JsonDict:
        """Describe the progress for the step event."""
        return {}

    def checkpoint_files(self, step: int) -> Mapping[str, bytes]:
        """Return the small files that a checkpoint of `step` needs."""
        return {}

    def committed(self, step: int) -> None:
        """Learn that the checkpoint of `step` is committed."""

    def close(self) -> None:
        """Leave the source of the samples."""


class StreamData(TrainingData):
    """A stream, whose position is part of every checkpoint."""

    source: StreamSource

    def __init__(self, spec: RunSpec, source: StreamSource) -> None:
        super().__init__(source)
        self._description = spec.stream.description
        self.is_endless = not spec.train.num_steps

    def start_values(self) -> JsonDict:
        return {"stream": self._description, "num_train_samples": 0}

    def resume(self, run_dir: RunDir, checkpoint: Checkpoint | None) -> None:
        if checkpoint:
            self.source.restore(run_dir.checkpoints, checkpoint)
        self.source.run_uri = run_dir.uri if run_dir.is_remote else str(run_dir.path.resolve())
        self.source.letters = DeadLetters(run_dir.path / DEAD_LETTERS)

    def reading(
        self, is_stopping: Callable[[], bool], warn: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        return self.source.reading(is_stopping, warn)

    def trained(self, step: int) -> None:
        self.source.trained(step)

    def status(self, step: int) -> JsonDict:
        return {"stream": self.source.status(step)}

    def checkpoint_files(self, step: int) -> Mapping[str, bytes]:
        return self.source.checkpoint_files(step)

    def committed(self, step: int) -> None:
        self.source.committed(step)

    def close(self) -> None:
        self.source.close()


def training_data(spec: RunSpec, source: SampleSource) -> TrainingData:
    """Wrap the source of a run for its loop."""
    return StreamData(spec, cast("StreamSource", source)) if spec.stream.is_on else TrainingData(source)
