"""What the soak compares: losses, evaluations, events and checkpoints with those of the undisturbed run."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from integration.faults.conftest import Run

from embark.store import RunDir, run_uri
from embark.store.checkpoint_arrays import CheckpointArrays


class Difference(AssertionError):
    """The disturbed run is not the undisturbed one."""


@dataclass
class Result:
    number: int
    case: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    num_steps_compared: int = 0
    num_steps_again: int = 0
    num_tensors: int = 0
    difference: str = ""
    log: list[str] = field(default_factory=list)


def compare(plain: Run, run: Run, result: Result, *, is_record_complete: bool) -> None:
    """Losses, evaluations, the order of events, and every byte of the checkpoints that are left."""
    expected, found = plain.losses(), run.losses()
    if is_record_complete and sorted(found) != sorted(expected):
        raise Difference(f"steps {sorted(set(expected) ^ set(found))} are in one of the records only")
    for step, losses in found.items():
        result.num_steps_compared += len(losses)
        result.num_steps_again += len(losses) - 1
        if set(losses) != set(expected[step]):
            raise Difference(f"step {step}: loss {losses} instead of {expected[step]}")
    names = ("log_loss", "auc", "normalized_entropy")
    evals = [{e["step"]: [e[name] for name in names] for e in one.events("eval")} for one in (plain, run)]
    if any(evals[0][step] != values for step, values in evals[1].items()):
        raise Difference(f"evaluations {evals[1]} instead of {evals[0]}")
    check_events(run)
    left, found_left = final_arrays(plain), final_arrays(run)
    if max(left) != max(found_left):
        raise Difference(f"the last checkpoint is {max(found_left)} instead of {max(left)}")
    for name in left.keys() & found_left.keys():  # one that was stopped keeps others, too
        result.num_tensors += len(left[name])
        if left[name] != found_left[name]:
            other = [k for k in left[name].keys() | found_left[name] if left[name].get(k) != found_left[name].get(k)]
            raise Difference(f"{name} differs in {sorted(other)[:5]}")


def check_events(run: Run) -> None:
    """Each start begins at the newest checkpoint there was, and takes the steps in order."""
    saved, step = 0, 0
    for event in run.events("start", "step", "save", "note"):
        if event["event"] == "start":
            step = event["first_step"]
            if step < saved:
                raise Difference(f"resumed at step {step}, and step {saved} had been saved")
        elif event["event"] == "step":
            if event["step"] != step + 1:
                raise Difference(f"step {event['step']} after step {step}")
            step = event["step"]
        elif event["event"] == "save":
            saved = max(saved, event["step"])
        elif "is damaged" in event["text"]:
            raise Difference(event["text"])


def final_arrays(run: Run) -> dict[str, dict[str, str]]:
    """A digest of every tensor of every checkpoint that is left."""
    checkpoints = RunDir(run_uri(run.root or str(run.directory), run.name)).checkpoints
    if left := checkpoints.unfinished():
        raise Difference(f"unfinished checkpoints are left: {left}")
    opened = {one.name: CheckpointArrays(checkpoints.store, one.name) for one in checkpoints.committed()}
    return {folder: {name: hashlib.sha256(arrays.tensor(name, entry.size).tobytes()).hexdigest()
                     for name, entry in arrays.entries.items()} for folder, arrays in opened.items()}
