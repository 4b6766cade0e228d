"""A new run with the weights of another: `train.warm_start`.

A table row means the same in both runs only if both have the same id map, or the new data extends that of the old. Rows
that the old tables do not have keep their initial values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embark.data.prepared.cache import read_manifest
from embark.data.prepared.manifest import EARLIER
from embark.errors import UserError
from embark.spec import POOLED_KINDS, RunSpec
from embark.spec.run import DATA, KEY
from embark.spec.train import SIZES, SUITED
from embark.store import Checkpoint, RunDir, find_run, run_uri
from embark.store.checkpoint_arrays import CheckpointArrays, table_weight
from embark.store.checkpoint_inspect import list_checkpoints, split_run
from embark.values import JsonMap, frozen

MAX_SHOWN = 8
Size = tuple[int, ...]


@frozen
class WarmStarted:
    """A description of the weights that a run began with."""

    run: str
    from_step: int
    path: str
    num_rows: int  # Rows of all tables.
    num_fresh_rows: int  # Rows with initial values.


@frozen
class WarmStart:
    """The run that `train.warm_start` names."""

    spec: RunSpec

    def checkpoints(self) -> tuple[str, list[Checkpoint]]:
        """Return the run's uri and its checkpoints to take, the best first."""
        word, which = split_run(self.spec.train.warm_start)
        root = self.spec.store.root
        run = find_run(run_uri(root, word) if "://" in root and "/" not in word else word, root)
        committed = run.checkpoints.committed()[::-1]
        if which == "best":
            return run.uri, [list_checkpoints(run).best()]
        found = [one for one in committed if not which or one.step == int(which)]
        if not found:
            what = f"no checkpoint of step {int(which)}" if which else "no checkpoint"
            steps = ", ".join(str(one.step) for one in committed)
            raise UserError(f"train.warm_start: {run.uri} has {what}",
                            f"its checkpoints are of steps {steps}" if steps else "train it until it has saved one")
        return run.uri, found

    def check_ids(self, run: RunDir, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint whose ids do not mean these rows."""
        spec, old = self.spec, checkpoint.values.get(KEY)
        where = f"train.warm_start: {run.checkpoints.where(checkpoint.step)}"
        if not isinstance(old, Mapping):
            raise UserError(f"{where} does not say what it was trained with",
                            "name a run of this version of Embark")
        differences = list(_differences(spec, old))
        if differences:
            raise UserError("\n  ".join([f"{where} was trained on other columns", *differences]),
                            "give this run the same columns in the same order, or leave train.warm_start out")
        if spec.data.kind != "prepared":
            return
        manifest = read_manifest(spec.data.path)
        if old.get(DATA) not in (manifest.fingerprint(), manifest.settings.get(EARLIER, {}).get("data")):
            raise UserError(f"{where} was trained on data whose ids {spec.data.path} does not continue: the same id "
                            "would mean another row",
                            "prepare this data with data.prepare.id_map_from = the data.path of that run, which "
                                f"is in {run.uri}/spec.toml; or leave train.warm_start out")

    def started(self, run: RunDir, checkpoint: Checkpoint, arrays: CheckpointArrays) -> WarmStarted:
        """Describe what was loaded."""
        rows = {table_weight(table.name, is_sequence=table.is_sequence): table.rows
                for table in self.spec.model.stored_tables()}
        num_fresh = sum(num - arrays.entries[name].size[0] for name, num in rows.items())
        return WarmStarted(run.uri, checkpoint.step, run.checkpoints.where(checkpoint.step), sum(rows.values()),
                           num_fresh)


def with_sizes_of_source(spec: RunSpec) -> RunSpec:
    """Return the spec with the kind and the widths of the run that it begins with, where it leaves them out: other data
    would suit others. A run that resumes may have outlived that run."""
    if not spec.train.warm_start:
        return spec
    try:
        old = WarmStart(spec).checkpoints()[1][0].values.get(KEY)
    except UserError:
        return spec
    old = old if isinstance(old, Mapping) else {}
    names = SUITED if old.get("model.kind") in POOLED_KINDS else SIZES
    changes = {name: old.get(f"model.{name}") for name in names}
    sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
             if value and name not in spec.model.model_fields_set}
    return spec.changed(model=spec.model.model_copy(update=sizes)) if sizes else spec


def _differences(spec: RunSpec, old: JsonMap) -> Iterator[str]:
    kind = old.get("data.kind")
    if kind != spec.data.kind:
        yield f'data.kind: "{kind}" there, "{spec.data.kind}" here'
    there = old.get("model.tables")
    tables = [table.get("name") for table in there] if isinstance(there, Sequence) else []
    here = [table.name for table in spec.model.table_list()]
    if tables != here:
        yield f"tables: {_listed(tables)} there, {_listed(here)} here"
    dense = old.get("data.dense_columns")
    if spec.data.kind == "columns" and dense is not None and list(dense) != list(spec.data.dense_columns):
        yield f"data.dense_columns: {_listed(dense)} there, {_listed(spec.data.dense_columns)} here"


def refuse_other_weights(arrays: CheckpointArrays, sizes: Mapping[str, Size], tables: set[str]) -> None:
    """Refuse weights that the model has under other names or in other sizes; a table may have more rows than it had."""
    saved = {name: entry.size for name, entry in arrays.entries.items() if name.startswith("model.")}
    wrong = []
    for name in sorted({*saved, *sizes}):
        there, here = saved.get(name), sizes.get(name)
        is_larger_table = name in tables and there and here and there[0] <= here[0] and there[1:] == here[1:]
        if there != here and not is_larger_table:
            wrong.append(f"{name}: {list(there) if there else 'none'} there, {list(here) if here else 'none'} here")
    if wrong:
        more = [f"and {len(wrong) - MAX_SHOWN} more"] if len(wrong) > MAX_SHOWN else []
        raise UserError("\n  ".join(["train.warm_start: the run's model is another", *wrong[:MAX_SHOWN], *more]),
                        "give [model] the widths and layers of that run, which are in its spec.toml, and no table "
                            "fewer rows; or leave train.warm_start out")


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:MAX_SHOWN])) + (" …" if len(names) > MAX_SHOWN else "") or "none"
