"""The progress of the run, from its own events: met, training, saved, resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embark.events.events import parse_event
from embark.store.run_dir import EVENTS


@dataclass(frozen=True, slots=True)
class Resume:
    """One time that the run resumed."""

    step: int  # The checkpoint's.
    lost_steps: int  # Trained before, and trained again.


@dataclass(slots=True)
class Progress:
    """The run so far, from its events."""

    world_sizes: list[int] = field(default_factory=list)  # One for each time the ranks met.
    num_steps: int = 0
    step: int = 0
    saved: list[int] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict, repr=False)
    """By step; of one that was trained twice, the later."""
    evaluated: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float | None:
        return self.losses.get(self.num_steps) if self.num_steps else None

    @property
    def phase(self) -> str:
        """For a person."""
        if not self.world_sizes:
            return "waiting for the ranks to meet"
        if self.is_done:
            return f"trained {self.step} steps"
        saved = f", saved step {self.saved[-1]}" if self.saved else ""
        return f"{self.world_sizes[-1]} ranks have met; step {self.step} of {self.num_steps}{saved}"

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "start":
            self.world_sizes.append(int(event["world_size"]))
            self.num_steps = int(event["num_steps"])
            if self.step and not event.get("first_step"):  # nothing was saved: all over again
                self.resumes.append(Resume(0, self.step))
                self.step = 0
        elif kind == "resume":
            self.resumes.append(Resume(int(event["step"]), max(0, self.step - int(event["step"]))))
            self.step = int(event["step"])
        elif kind == "step":
            self.step = int(event["step"])
            if isinstance(event.get("loss"), (int, float)):
                self.losses[self.step] = float(event["loss"])
        elif kind == "save":
            self.saved.append(int(event["step"]))
        elif kind == "eval":
            self.evaluated = {name: event[name] for name in ("log_loss", "auc") if name in event}
        elif kind == "end":
            self.is_done = event.get("outcome") == "done"
        elif kind == "error":
            self.errors.append(str(event.get("text", "")))


class EventReader:
    """Reads what is new in `events.jsonl`, as it grows."""

    def __init__(self, folder: Path | None) -> None:
        self.progress = Progress()
        self.has_no_run = folder is None  # There is no run whose events could be read.
        self._folder = folder
        self._offset = 0

    def read(self) -> Progress:
        path = self._folder / EVENTS if self._folder is not None else None
        if path is None or not path.exists():
            return self.progress
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for event in filter(None, map(parse_event, complete.splitlines())):
            self.progress.take(event.kind, event.values)
        return self.progress
