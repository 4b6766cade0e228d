"""Every file format that Embark reads: who writes it, who reads it, and what its damage does.

docs/internals/formats.md shows this table, and tests/house/test_formats.py holds every module of Embark to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileFormat:
    """A format. Commands are named without `embark`."""

    name: str
    files: str
    writers: str
    readers: str
    modules: tuple[str, ...]  # They parse it; below src/embark.
    damage: str
    fuzzed_by: str = "test_damaged_files.py"


FORMATS = (
    FileFormat("spec", "SPEC, RUN/spec.toml, RUN/checkpoints/step-N/spec.toml", "a person; train, follow, launch",
               "all that name a spec or a run",
               ("spec/load.py", "store/checkpoint_diff.py", "store/checkpoint_inspect.py", "report/context.py"),
               "refused with the line; lists and reports leave out what only it says"),
    FileFormat("raw rows", "CSV, TSV, JSON Lines, Parquet, gzip; Delta and Iceberg tables", "other programs",
               "data prepare, train, score, evaluate",
               ("data/prepare/readers.py", "data/prepare/parquet_view.py", "data/prepare/lake_tables.py",
                "data/prepare/text_stream.py", "features/values.py"),
               "rows that cannot be read are counted and left out; a file that is none is refused", "test_raw_rows.py"),
    FileFormat("manifest", "DATA/manifest.json, RUN/data/N/manifest.json", "data prepare, data make; train, follow",
               "train, data check, data copy, evaluate, export, plan", ("data/prepared/manifest.py",),
               "the data is refused"),
    FileFormat("prepared part", "DATA/SPLIT/PART.bin", "data prepare, data make", "train, evaluate, data check",
               ("data/prepared/parts.py", "data/check.py"), "the data is refused, with the name of the part"),
    FileFormat("id map", "DATA/ids/TABLE.keys.npy, TABLE.ids.npy, of logs TABLE.counts.npy, RUN/data/N/ids/",
               "data prepare; train, follow",
               "export, evaluate, publish, follow",
               ("data/prepared/cache.py", "data/prepare/earlier_ids.py"),
               "what needs the table's values is refused; training needs no map"),
    FileFormat("preparation", "DATA/.preparing/", "data prepare", "data prepare",
               ("data/prepare/journal.py", "data/prepare/id_numbering.py", "data/prepare/splits.py",
                "data/prepare/sequences.py", "data/prepare/statistics_count.py", "features/numbers.py"),
               "a task whose record is damaged is done again; other settings are refused, and --fresh starts over"),
    FileFormat("copy state", "TARGET/.embark-copy.json", "data copy", "data copy", ("store/transfer.py",),
               "files of the right size are compared by checksum instead of being taken for copies"),
    FileFormat("checkpoint mark", "RUN/checkpoints/step-N/commit.json", "train, follow",
               "train, follow, checkpoints, evaluate, export, publish", ("store/checkpoint_store.py",),
               "the checkpoint is not used: the run resumes from the one before"),
    FileFormat("checkpoint index", "RUN/checkpoints/step-N/index.json", "train, follow",
               "train, follow, checkpoints, evaluate, export, publish", ("store/checkpoint_arrays.py",),
               "by its checksum the checkpoint is not used: the run resumes from the one before"),
    FileFormat("checkpoint arrays", "RUN/checkpoints/step-N/rank-*.bin", "train, follow",
               "train, follow, checkpoints, evaluate, export, publish", ("store/checkpoint_arrays.py",),
               "by its checksum the checkpoint is not used: the run resumes from the one before"),
    FileFormat("stream state", "RUN/checkpoints/step-N/stream.json", "follow", "follow",
               ("data/stream/event_order.py",),
               "by its checksum the checkpoint is not used: the run resumes from the one before"),
    FileFormat("stream files", "files below stream.path", "other programs", "follow",
               ("data/stream/files_reader.py",), "records that cannot be read are counted and left out"),
    FileFormat("stream options", "the file that EMBARK_STREAM_OPTIONS names", "a person", "follow",
               ("data/stream/open_reader.py",), "refused"),
    FileFormat("lease", "RUN/lease/N.json", "train, follow, tune", "train, follow, tune, watch, runs",
               ("store/lease.py",), "its holder counts as unknown: waited for, then taken over"),
    FileFormat("events", "RUN/events.jsonl", "train, follow, serve",
               "watch, report, compare, cost, diagnose, runs list, status, train", ("events/events.py",),
               "a line that is no event is left out"),
    FileFormat("registry record", "$XDG_DATA_HOME/embark/runs/NAME.*.json", "launch",
               "status, logs, cancel, cost, watch, launch", ("launch/run_registry.py",),
               "status names the file; other runs are listed"),
    FileFormat("supervisor files", "job.json, started.json, state.json, ended.json of a launched run", "launch",
               "status, logs, cancel, launch", ("launch/supervisor.py",),
               "status names the file; other runs are listed"),
    FileFormat("submission", "submitted.json of a run on cloud machines", "launch", "status, launch --supervise",
               ("launch/backends/machines.py",), "refused"),
    FileFormat("version mark", "MODEL/version-N/commit.json", "export, publish",
               "score, serve, rollback, publish, export", ("store/checkpoint_store.py",), "the version is refused"),
    FileFormat("artifact", "MODEL/version-N/artifact.json, RUN/FORMAT/artifact.json", "export, publish",
               "score, serve, rollback, publish, export", ("export/artifact.py",), "the version is refused"),
    FileFormat("tensors", "MODEL/version-N/weights.safetensors, id_maps.safetensors, items.safetensors",
               "export, publish", "score, serve, publish", ("export/safetensors_file.py",), "the version is refused"),
    FileFormat("delta", "MODEL/version-N/delta.safetensors", "export --delta, publish", "score, serve, publish",
               ("export/safetensors_file.py",), "the version and deltas of it are refused"),
    FileFormat("reference", "MODEL/version-N/reference.json", "export, publish", "serve", ("export/artifact.py",),
               "the version is served without drift"),
    FileFormat("gate record", "MODEL/version-N/gate.json", "publish", "publish, rollback --list",
               ("export/artifact.py",), "the version counts as not judged"),
    FileFormat("current version", "MODEL/current.json", "export, publish, rollback",
               "score, serve, rollback, publish, export", ("export/artifact.py",),
               "refused; rollback MODEL VERSION writes it again"),
    FileFormat("version numbers", "MODEL/numbers.json", "export, publish", "export, publish",
               ("export/write_version.py",), "numbers follow the newest version that is there"),
    FileFormat("tuning study", "RUNS/NAME-tune/optuna.journal, tune.json", "tune", "tune, watch",
               ("dashboard/runs.py", "tuning/tune.py"), "tune refuses the journal; watch leaves tune.json out"),
    FileFormat("calibration", "$XDG_DATA_HOME/embark/calibration.toml", "bench --calibrate", "plan, train, rehearse",
               ("plan/calibration.py",), "refused; remove it"),
    FileFormat("price file", "FILE of catalog refresh, $XDG_DATA_HOME/embark/prices.csv", "a person; catalog refresh",
               "catalog, plan, cost, render, launch", ("catalog/load.py",), "refused with its lines"),
    FileFormat("render record", "DEPLOY/.embark-render.json", "render", "render", ("render/folder.py",),
               "every file that differs counts as edited by hand"),
    FileFormat("manifests", "Kubernetes YAML and JSON, scripts, Dockerfiles", "render; a person",
               "lint, rehearse, diagnose",
               ("kubernetes/yaml_nodes.py", "lint/read.py", "lint/rules/aws_azure.py", "lint/rules/gcp.py"),
               "lint reports the file as unreadable and checks the others"),
    FileFormat("logs", "logs of runs, text or gzip", "train, launch; other programs", "logs, diagnose, watch",
               ("diagnose/source.py",), "read as text, whatever bytes it has"),
)

NO_FILES = {
    "cli/app.py": "metadata of the installed package",
    "data/custom_contract.py": "the spec that a parent process pipes to it",
    "data/interactions.py": "settings of its own, as JSON would give them back",
    "data/prepare/prepare.py": "settings of its own, as JSON would give them back",
    "diagnose/scan.py": "rules that come with Embark",
    "doctor/account.py": "answers of the clouds' programs",
    "doctor/cluster.py": "manifests that it has rendered",
    "doctor/network.py": "the answer of a process that it starts, in a temporary folder",
    "events/monitoring.py": "a template that comes with Embark",
    "events/quality.py": "rules that come with Embark",
    "launch/backends/clouds.py": "answers of the clouds' programs",
    "launch/backends/kubernetes/backend.py": "a manifest that it has rendered",
    "launch/backends/kubernetes/kubectl.py": "answers of kubectl",
    "launch/backends/ray.py": "headers in an environment variable",
    "launch/http.py": "responses of HTTP services",
    "launch/image.py": "answers of podman or docker",
    "launch/supervisor_client.py": "answers of the supervisor",
    "plan/serving.py": "measurements that come with Embark",
    "plan/workload.py": "the answer of a process that it starts, in a temporary folder",
    "rehearse/stream.py": "responses of a server that it starts",
    "render/targets/vertex.py": "a manifest that it has rendered",
    "render/wheel.py": "pyproject.toml of Embark's clone",
    "run/preemption_notices.py": "notices of the clouds' metadata services",
    "serve/infer_protocol.py": "requests",
    "stack/versions.py": "answers of an interpreter that it starts",
    "store/cloud_store.py": "tokens of a metadata service",
    "trainers/jax/world.py": "messages between the processes of a run",
    "trainers/torch/networks/trace_network.py": "the spec that a parent process pipes to it",
    "trainers/torch/probe.py": "the answer of processes that it starts, in a temporary folder",
    "tuning/search_space.py": "settings of its own trials",
    "values.py": "tables that come with Embark",
}
"""Modules that parse what is no file of a user, and what it is."""
