"""What a run is: its model, its data and its order. Checkpoints of another run, or of this one before a change, are not
resumed unless the change is accepted."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from embark.data import SampleSource
from embark.errors import DataError, UserError
from embark.events.events import Change, shown_value
from embark.formatting import format_count, pluralize
from embark.model.steps import decay_length
from embark.spec import RunSpec, load_spec
from embark.spec.run import DATA, KEY, KIND_OF_FIELD, LEARNING_FIELDS, UNRECORDED
from embark.store import Checkpoint, RunDir
from embark.values import JsonDict, JsonMap
from .trainer import Ranks

Identity = JsonMap
"""Fields and their values in JSON's types; `data` is the checksum of the samples."""


def identity_of(spec: RunSpec, source: SampleSource, num_steps: int, world: Ranks | None = None) -> Identity:
    """Return the identity, which is the same on all ranks; ranks that read different data are refused."""
    fingerprints = [source.fingerprint()]
    if world:
        fingerprints = world.gathered(fingerprints[0])
    other = next((rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]), None)
    if other is not None:
        raise DataError(f"{spec.data.path}: rank {other} reads other data than rank 0",
                        "copy the same data to every machine, or set data.path to a folder or URI that all share")
    return {**_learning_fields(spec, num_steps), **({DATA: fingerprints[0]} if fingerprints[0] else {})}


def _learning_fields(spec: RunSpec, num_steps: int) -> JsonDict:
    values = spec.model_dump(mode="json")

    def value_of(field: str) -> Any:
        section, _, name = field.partition(".")
        # Fields that are not used may not be stored.
        default = type(getattr(spec, section)).model_fields[name].default
        if isinstance(default, BaseModel):
            default = default.model_dump(mode="json")
        return values.get(section, {}).get(name, list(default) if isinstance(default, tuple) else default)

    found = {field: value_of(field) for field in sorted(LEARNING_FIELDS)
             if KIND_OF_FIELD.get(field, spec.data.kind) == spec.data.kind}
    for field in ("model.code", "data.code"):
        found[field] = sha256(found[field].encode()).hexdigest() if found[field] else ""
    # As train.sharding, a table's counts for nothing; but data-parallel tables have other names in a checkpoint.
    found["model.tables"] = [{name: value for name, value in table.model_dump(mode="json").items()
                              if name != "sharding" or value == "data_parallel"} for table in spec.model.table_list()]
    if spec.train.decay == "none":
        del found["train.decay_steps"]
    else:  # one that ends with the run has other rates in a longer run
        found["train.decay_steps"] = decay_length(spec.train, num_steps)
    return {UNRECORDED: 1, **found}


def refuse_changes(
    run_dir: RunDir, identity: Identity, recorded: Sequence[Change], accepted: Sequence[str], finished_step: int
) -> None:
    """Refuse changes that are not accepted. Every checkpoint counts, since the run may resume from it, should those
    after it be damaged; if a finished run kept none, the spec beside it says what was trained."""
    changes: dict[str, Change] = {}
    records = run_dir.checkpoints.committed()
    if finished_step and not records and run_dir.spec.is_file():
        trained = _learning_fields(load_spec(str(run_dir.spec)), finished_step)
        records = [Checkpoint(finished_step, {}, {KEY: trained})]
    for checkpoint in records:
        changes |= {change.field: change for change in changes_since(checkpoint, identity, recorded)}
    refused = [change for field, change in changes.items() if field not in accepted]
    if refused:
        lines = [f"{run_dir.uri} was trained with other settings or data ({pluralize(len(refused), 'change')}):",
                 *map(_describe, refused)]
        accept = " ".join(f"--accept-change {change.field}" for change in refused)
        raise UserError("\n  ".join(lines), "--fresh or --set name=… starts a new run; or continue this one, with "
                                                f"a record of the change: {accept}")


def changes_since(checkpoint: Checkpoint, identity: Identity, recorded: Sequence[Change]) -> list[Change]:
    """Return the fields in which a run that resumes from `checkpoint` differs from it, after the changes on record."""
    saved = checkpoint.values.get(KEY)
    saved = saved if isinstance(saved, Mapping) else {UNRECORDED: 0}
    found = []
    for field, new in identity.items():
        if field not in saved:
            continue
        old = saved[field]
        for change in recorded:
            if change.field == field and change.step >= checkpoint.step and change.old == old:
                old = change.new
        if old != new:
            found.append(Change(field, old, new, checkpoint.step))
    return found


def _describe(change: Change) -> str:
    where = f"at step {format_count(change.step)}"
    if change.field == UNRECORDED:
        return f"{change.field}: not recorded {where}"
    old, new = change.old, change.new
    if change.field == "model.tables":
        old, new = _flat(old), _flat(new)
        fields = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        old, new = (", ".join(f"{name} = {one[name]}" for name in fields if name in one) if fields else list(one)
                    for one in (old, new))
    return f"{change.field}: {shown_value(old)} {where}, {shown_value(new)} now"


def _flat(tables: Sequence[JsonMap]) -> JsonDict:
    return {f"{table['name']}.{name}": value for table in tables for name, value in table.items() if name != "name"}
