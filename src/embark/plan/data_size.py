"""How much data a spec's run goes through, where that can be read here without opening it."""

from __future__ import annotations

from embark.errors import UserError
from embark.plan.workload import DataSize
from embark.spec import RunSpec


def resolve_data(spec: RunSpec, num_samples: int | None = None) -> tuple[RunSpec, DataSize | None]:
    """The spec with what its data says of the tables, each written out once: hundreds of predictions ask for them; and
    the data's size. `num_samples` is what a person says of it."""
    said = None if num_samples is None else DataSize(num_samples)
    if spec.data.kind != "prepared":
        return _written_out(spec), said
    from embark.data.prepared.manifest import MANIFEST
    from embark.data.prepared.opening import local_folder, read_manifest
    from embark.data.resolve import resolve_from_manifest

    folder = local_folder(spec.data.path)
    if folder is not None and (folder / MANIFEST).is_file():
        manifest = read_manifest(spec.data.path)
        found = DataSize(manifest.num_rows("train"), manifest.num_rows(spec.data.eval_split), manifest.size_bytes,
                         f"{spec.data.path}/{MANIFEST}")
        return _written_out(resolve_from_manifest(spec, manifest)), said or found
    if not spec.model.gives_tables:
        raise UserError(f"{spec.data.path}: is not here to say which tables there are",
                        fix="give [model] its tables, or plan where the data is")
    return _written_out(spec), said


def _written_out(spec: RunSpec) -> RunSpec:
    model = spec.model.model_copy(update={"tables": spec.model.table_list()})
    return spec.model_copy(update={"model": model})
