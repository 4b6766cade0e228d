"""How much there is to train: samples, steps, evaluations, and the bytes of a sample."""

from dataclasses import dataclass

from embark.errors import UserError
from embark.model.batch import num_steps_of, steps_per_epoch
from embark.spec import RunSpec
from embark.spec.train import with_train_defaults


@dataclass(frozen=True, slots=True)
class DataSize:
    """How much data there is, counted where the spec cannot know it."""

    num_train_samples: int
    num_eval_samples: int | None = None  # None: not counted; a hundredth of the others is assumed.
    data_bytes: float | None = None  # Of all of it as it is stored; None: as the format's rows come to.
    source: str = "--samples"


@dataclass(frozen=True, slots=True)
class Workload:
    """All that a run does, on whatever machine."""

    num_train_samples: int  # In one epoch.
    num_eval_samples: int
    batch_size: int
    num_steps: int  # Of the complete run.
    num_evals: int  # Passes over the held-out samples.
    sample_bytes: float  # In prepared data.
    data_bytes: float  # Of all samples of an epoch and those held out.
    is_stored: bool  # The samples are read from storage; else each machine draws them itself.
    source: str  # Where the number of samples comes from.

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.num_train_samples, self.batch_size)

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch

    @property
    def eval_steps(self) -> int:
        """Batches of all evaluations together."""
        return self.num_evals * -(-self.num_eval_samples // self.batch_size)


def workload_of(spec: RunSpec, counted: DataSize | None = None) -> Workload:
    """What a spec trains. `counted` wins over the spec; without it, stored data has the size that the spec says."""
    train, data = spec.train, spec.data
    if counted is not None:
        num_train, source = counted.num_train_samples, counted.source
        num_eval = num_train // 100 if counted.num_eval_samples is None else counted.num_eval_samples
        if counted.num_eval_samples is None and data.kind == "synthetic":
            num_eval = data.num_eval_samples
    elif data.kind == "synthetic":
        num_train, num_eval, source = data.num_train_samples, data.num_eval_samples, "data.num_train_samples"
    elif "num_train_samples" in data.model_fields_set:
        num_train, num_eval = data.num_train_samples, data.num_eval_samples
        source = f"data.num_train_samples; {data.path} cannot be read from here"
    elif train.num_steps:
        num_train, num_eval, source = train.num_steps * train.batch_size, 0, "train.num_steps, as one epoch"
    else:
        raise UserError(f"{data.path or data.kind}: cannot read the dataset's size from here",
                        fix="pass --samples N, or set data.num_train_samples")
    num_steps = num_steps_of(train, num_train)
    row_bytes = sample_bytes(spec)
    stored_bytes = counted.data_bytes if counted is not None else None
    return Workload(
        num_train, num_eval, train.batch_size, num_steps,
        num_evals=1 + ((num_steps - 1) // train.eval_every if train.eval_every else 0) if num_eval else 0,
        sample_bytes=row_bytes,
        data_bytes=(num_train + num_eval) * row_bytes if stored_bytes is None else stored_bytes,
        is_stored=data.kind != "synthetic", source=source,
    )


def sample_bytes(spec: RunSpec) -> float:
    """Of one row of a full block of the prepared format. What is ragged is taken at its longest."""
    from embark.data.prepared.layout import Feature, Layout
    from embark.data.prepared.manifest import BLOCK_ROWS

    features = tuple(Feature(t.name, t.rows, t.multi_hot) for t in spec.model.table_list())
    dense = tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return Layout(dense, features, spec.data.prepare.dense_bits).map(BLOCK_ROWS).size_bytes / BLOCK_ROWS


def resolve_data(spec: RunSpec, num_samples: int | None = None) -> tuple[RunSpec, DataSize | None]:
    """The spec with the tables of its data listed, and the data's size. `num_samples`, if given, is the user's."""
    given = None if num_samples is None else DataSize(num_samples)
    if given or spec.data.kind == "synthetic" or "num_train_samples" in spec.data.model_fields_set:
        spec = with_train_defaults(spec, num_samples or spec.data.num_train_samples)
    if spec.data.kind != "prepared":
        return _listed(spec), given
    from embark.data.prepared.cache import local_folder, read_manifest
    from embark.data.prepared.manifest import MANIFEST, resolve_from_manifest

    folder = local_folder(spec.data.path)
    if folder is not None and (folder / MANIFEST).is_file():
        manifest = read_manifest(spec.data.path)
        found = DataSize(manifest.num_rows("train"), manifest.num_rows(spec.data.eval_split), manifest.size_bytes,
                         f"{spec.data.path}/{MANIFEST}")
        return _listed(resolve_from_manifest(spec, manifest)), given or found
    if not spec.model.gives_tables:
        raise UserError(f"{spec.data.path}: cannot read the tables from here",
                        fix="give [model] its tables, or plan where the data is")
    return _listed(spec), given


def _listed(spec: RunSpec) -> RunSpec:
    """Each table once, since hundreds of predictions read them."""
    model = spec.model.model_copy(update={"tables": spec.model.table_list()})
    return spec.model_copy(update={"model": model})
