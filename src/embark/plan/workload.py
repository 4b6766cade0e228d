"""How much there is to train: samples, steps, evaluations, bytes of a sample, arithmetic of a custom network."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from embark.errors import UserError
from embark.model.steps import num_steps_of, steps_per_epoch
from embark.model.work import TRACED, DenseWork, dense_work_of
from embark.spec import RunSpec, to_toml, with_bucket_tables, with_train_defaults
from embark.values import frozen


@frozen
class DataSize:
    """The size of the data, counted where the spec cannot know it."""

    num_train_samples: int
    num_eval_samples: int | None = None  # None: not counted; a hundredth of the others is assumed.
    data_bytes: float | None = None  # Bytes as stored; None if they are computed from the row format.
    source: str = "--samples"


@frozen
class Workload:
    """The work of a run, independent of the machine."""

    num_train_samples: int  # Samples of one epoch.
    num_eval_samples: int
    batch_size: int
    num_steps: int  # Steps of the complete run.
    num_evals: int  # Passes over the held-out samples.
    sample_bytes: float  # Bytes of a sample in prepared data.
    data_bytes: float  # Bytes of all samples of an epoch and those held out.
    is_stored: bool  # The samples are read from storage; else each machine draws them itself.
    source: str  # Where the number of samples comes from.
    model_kind: str  # As the spec names it, or as the data decides.

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
    """Return what a spec trains. `counted` wins over the spec; without it, stored data has the size that the spec
    says."""
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
                        "pass --samples N, or set data.num_train_samples")
    num_steps = num_steps_of(train, num_train)
    row_bytes = sample_bytes(spec)
    stored_bytes = counted.data_bytes if counted is not None else None
    return Workload(
        num_train, num_eval, train.batch_size, num_steps,
        num_evals=1 + ((num_steps - 1) // train.eval_every if train.eval_every else 0) if num_eval else 0,
        sample_bytes=row_bytes,
        data_bytes=(num_train + num_eval) * row_bytes if stored_bytes is None else stored_bytes,
        is_stored=data.kind != "synthetic", source=source, model_kind=spec.model.kind
    )


def sample_bytes(spec: RunSpec) -> float:
    """Return the bytes of a row in a full block of the prepared format; ragged features count at their longest."""
    from embark.data.prepared.manifest import BLOCK_ROWS
    from embark.features.layout import Feature, Layout

    features = tuple(Feature(t.name, t.rows, t.multi_hot) for t in spec.model.table_list())
    dense = tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return Layout(dense, features, spec.data.prepare.dense_bits).map(BLOCK_ROWS).size_bytes / BLOCK_ROWS


def resolve_data(spec: RunSpec, num_samples: int | None = None) -> tuple[RunSpec, DataSize | None]:
    """Return the spec with the tables of its data listed, and the data's size; `num_samples`, if given, is the
    user's."""
    given = None if num_samples is None else DataSize(num_samples)
    if given or spec.data.kind == "synthetic" or "num_train_samples" in spec.data.model_fields_set:
        spec = with_train_defaults(spec, num_samples or spec.data.num_train_samples)
    if spec.data.kind != "prepared":
        return _listed(with_bucket_tables(spec)), given
    from embark.data.prepared.cache import local_folder, read_manifest
    from embark.data.prepared.manifest import MANIFEST, resolve_from_manifest

    folder = local_folder(spec.data.path)
    if folder is not None and (folder / MANIFEST).is_file():
        manifest = read_manifest(spec.data.path)
        found = DataSize(manifest.num_rows("train"), manifest.num_rows(spec.data.eval_split), manifest.size_bytes,
                         f"{spec.data.path}/{MANIFEST}")
        return _listed(resolve_from_manifest(spec, manifest)), given or found
    if not spec.model.gives_tables:
        if folder is not None and spec.data.prepare.input:
            raise UserError(f"{spec.data.path}: no prepared data yet, which says the tables of the model",
                            "`embark data prepare SPEC` writes it; or give [model] its tables")
        raise UserError(f"{spec.data.path}: cannot read the tables from here",
                        "give [model] its tables, or plan where the data is")
    return _listed(spec), given


def _listed(spec: RunSpec) -> RunSpec:
    """List each table once, since hundreds of predictions read them."""
    model = spec.model.changed(tables=spec.model.table_list())
    return spec.changed(model=model)


MODULE = "embark.trainers.torch.networks.trace_network"
LIMIT_S = 120.0


def trace_dense(spec: RunSpec) -> None:
    """Count the dense layers of a custom network by running its code in a process that has torch."""
    if not spec.model.is_custom or spec.model in TRACED:
        return
    with TemporaryDirectory(prefix="embark-trace-") as folder:
        answer = Path(folder, "answer.json")
        try:
            done = subprocess.run([sys.executable, "-P", "-m", MODULE, str(answer)], input=to_toml(spec).encode(),
                                  capture_output=True, timeout=LIMIT_S, check=False)
            TRACED[spec.model] = TypeAdapter(DenseWork).validate_json(answer.read_bytes())
        except subprocess.TimeoutExpired:
            TRACED[spec.model] = DenseWork(note=f"its dense layers are not counted: no answer within {LIMIT_S:.0f} s")
        except (OSError, ValueError):
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"the process ended with {done.returncode}"
            TRACED[spec.model] = DenseWork(note=f"its dense layers are not counted: {why}")


def dense_notes(spec: RunSpec) -> Iterator[str]:
    """Yield what a plan has to say about a network that could not be counted."""
    work = dense_work_of(spec.model)
    if isinstance(work, DenseWork) and work.note:
        yield f"{spec.model.kind}: {work.note}"
