"""Embark's own errors, raised by the code that raises them: a message that is reworded still gets its diagnosis."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prepared_rows import make_prepared

from embark.catalog import load_catalog
from embark.catalog.machine import find_machine
from embark.data import open_source, resolve_from_data
from embark.data.columns import ColumnsSource
from embark.data.copy import copy
from embark.data.prepared import Manifest
from embark.data.synthetic import SyntheticSource
from embark.diagnose.report import diagnose
from embark.diagnose.source import sources_of
from embark.errors import EmbarkError
from embark.model.engine_selection import select_engine
from embark.model.steps import samples_per_rank, steps_per_epoch
from embark.plan.predict import predict
from embark.plan.prediction import Setup
from embark.run.evaluation import refuse_trouble
from embark.run.preemption_notices import grace_seconds
from embark.spec import DataSpec, ModelSpec, Table, load_spec, resolve
from embark.store.checkpoint_arrays import of_another_model
from embark.store.errors import explain

TIMED_OUT = OSError("Generic S3 error\n\nDebug source:\nReqwest { kind: TimedOut }")


def raise_(error: EmbarkError) -> None:
    raise error


def damaged(folder: Path) -> Path:
    made = make_prepared(folder / "made")
    next(made.path.glob("train/*")).unlink()
    return made.path


def open_damaged(folder: Path) -> None:
    path = damaged(folder)
    open_source(resolve_from_data(resolve({"data": {"kind": "prepared", "path": str(path)}})))


def columns(folder: Path, *, on_bad_id: str = "refuse") -> ColumnsSource:
    path = folder / "d.csv"
    path.write_text("label,user\n" + "".join(f"0,{user}\n" for user in range(9)))
    return ColumnsSource(ModelSpec(num_dense=0, tables=(Table(name="user", rows=5),)),
                         DataSpec(kind="columns", path=str(path), on_bad_id=on_bad_id))


def diverge(_folder: Path) -> None:
    spec = resolve({})
    refuse_trouble(float("nan"), None, SyntheticSource(spec.model, spec.data), spec, 1, 10)


RAISES: dict[str, tuple[Callable[[Path], object], str]] = {
    "prepared data without a part": (open_damaged, "data-incomplete"),
    "a copy of it": (lambda folder: copy(str(damaged(folder)), str(folder / "there")), "data-incomplete"),
    "data of another version": (lambda _: Manifest.from_text(
        json.dumps({"format": "embark-prepared", "version": 0}), "data/manifest.json"), "data-incomplete"),
    "too few rows": (lambda folder: steps_per_epoch(columns(folder, on_bad_id="clip").num_train_samples, 4096),
                     "data-incomplete"),
    "an engine that cannot be used": (lambda _: select_engine(
        resolve({}, ["train.engine=cuda_graph"]), "cuda", "fused Adam counts its steps on the host"), "spec-wrong"),
    "a batch for ranks": (lambda _: samples_per_rank(1000, 16), "world-size-wrong"),
    "a batch for chips": (lambda _: samples_per_rank(1000, 16, "chips"), "world-size-wrong"),
    "a batch for devices": (lambda _: samples_per_rank(1000, 16, "devices"), "world-size-wrong"),
    "no such preset": (lambda _: load_spec("nowhere"), "spec-wrong"),
    "an unknown field": (lambda _: resolve({"train": {"batch_sze": 1}}), "spec-wrong"),
    "no such machine": (lambda _: find_machine(load_catalog(), "p99.huge"), "spec-wrong"),
    "ids outside the table": (columns, "bad-value-in-data"),
    "a loss that became NaN": (diverge, "loss-not-a-number"),
    "another model": (lambda _: raise_(of_another_model("no table user")), "checkpoint-of-another-model"),
    "a full disk": (lambda _: raise_(explain(OSError(errno.ENOSPC, ""), "write", "/data/x")), "disk-full"),
    "a full quota": (lambda _: raise_(explain(OSError(errno.EDQUOT, ""), "write", "/data/x")), "disk-full"),
    "no permission": (
        lambda _: raise_(explain(OSError(errno.EACCES, ""), "look at", "/data/x")), "permission-denied-locally"),
    "a store that does not answer": (
        lambda _: raise_(explain(TIMED_OUT, "look at", "s3://runs/x")), "store-unreachable"),
}


def names_of(folder: Path, text: str) -> list[str]:
    """Of a log, and of a run's own events: both say the same."""
    log, events = folder / "run.log", folder / "events.jsonl"
    log.write_text(f"error: {text}\n")
    events.write_text(json.dumps({"event": "error", "time_s": 1.0, "rank": 0, "text": text}) + "\n")
    of_log, of_events = ([one.name for one in diagnose(sources_of([str(path)]).sources).diagnoses]
                         for path in (log, events))
    assert of_log == of_events
    return of_log


@pytest.mark.parametrize(("raises", "name"), RAISES.values(), ids=RAISES.keys())
def test_an_error_of_embark_s_gets_its_diagnosis_and_no_other(tmp_path: Path, raises, name: str):
    with pytest.raises(EmbarkError) as caught:
        raises(tmp_path)
    assert names_of(tmp_path, str(caught.value)) == [name], caught.value


def test_a_batch_smaller_than_the_ranks_is_diagnosed_by_the_plan_s_words(tmp_path: Path):
    spec = resolve({"train": {"batch_size": 8}})
    prediction = predict(Setup(spec, find_machine(load_catalog(), "p5.48xlarge"), 2))
    assert names_of(tmp_path, prediction.why) == ["world-size-wrong"]


def test_what_is_no_fault_of_the_run_gets_no_diagnosis(tmp_path: Path):
    """Ids that are clipped because the spec says so; a variable of Embark's own that torchrun does not set."""
    (note,) = columns(tmp_path, on_bad_id="clip").notes
    with pytest.raises(EmbarkError) as caught:
        grace_seconds(None, {"EMBARK_GRACE_S": "soon"})
    assert names_of(tmp_path, f"{note}\n{caught.value}") == []
