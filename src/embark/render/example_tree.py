"""The whole of examples/cloud_deployment, rendered: one run for each cloud, and the quickstart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.resources import files as package_files

from embark.catalog import load_catalog
from embark.render.file import File
from embark.render.guides.guides import render_guides
from embark.render.image import render_image
from embark.render.infrastructure import render_around
from embark.render.job import Job, default_image, make_job
from embark.render.launch_script import PLACEHOLDER_REGISTRY
from embark.render.targets.jobset import render_jobset
from embark.render.targets.kubeflow import render_pytorchjob, render_trainjob
from embark.render.targets.kubernetes import render_job
from embark.render.targets.kueue import render_kueue
from embark.render.targets.ray import render_ray
from embark.render.targets.torchx import render_torchx
from embark.render.yaml_text import header
from embark.spec import PRESETS, RunSpec
from embark.spec.place import Target

SCRIPT = "train_torchrec_quickstart.py"
PLACES = {
    "aws": {"machine": "p4d.24xlarge", "region": "us-west-2", "zone": "us-west-2b", "volume": "fsx-lustre-1000"},
    "azure": {"machine": "Standard_ND96asr_v4", "region": "eastus", "zone": "1", "volume": "azure-netapp-ultra",
              "storage_account": "embarkexample"},
    "gcp": {"machine": "a2-highgpu-8g", "region": "us-central1", "zone": "us-central1-a", "volume": "filestore-zonal"},
}
ROOTS = {"aws": "s3://embark-example/runs", "azure": "az://embark-example/runs", "gcp": "gs://embark-example/runs"}
METRICS_PORT = 9464
"""The one that OpenTelemetry's exporters for Prometheus have."""
OTHER_TARGETS: tuple[tuple[Target, Callable[[Job], list[File]]], ...] = (
    ("job", render_job), ("jobset", render_jobset), ("trainjob", render_trainjob), ("pytorchjob", render_pytorchjob),
    ("ray", render_ray), ("torchx", render_torchx),
)


def example_tree() -> list[File]:
    """Every file, by its path below `examples/cloud_deployment`."""
    jobs = {cloud: cloud_job(cloud) for cloud in PLACES}
    found = [*render_guides(jobs, quickstart_job()), *_quickstart()]
    for cloud, job in jobs.items():
        found += _below(cloud, cloud_files(job))
    return sorted(found, key=lambda file: file.path)


def cloud_job(cloud: str) -> Job:
    """DLRM with Criteo's terabyte tables on two machines with eight GPUs each."""
    preset = PRESETS["criteo-1tb"]()
    place = {"nodes": 2, "queue": "embark", "image": f"{PLACEHOLDER_REGISTRY}{default_image()}", **PLACES[cloud]}
    data = {"kind": "prepared", "path": "/mnt/data/criteo-1tb"}
    return _job(preset, name="dlrm", place=place, data=data, store={"root": ROOTS[cloud]},
                watch={"prometheus_port": METRICS_PORT})


def quickstart_job() -> Job:
    place = {"nodes": 2, "image": f"{PLACEHOLDER_REGISTRY}{default_image()}", "machine": "p4d.24xlarge",
             "region": "us-west-2"}
    return _job(PRESETS["quickstart"](), name="torchrec-quickstart", place=place, store={"root": ROOTS["aws"]})


def cloud_files(job: Job) -> list[File]:
    """A cloud's folder: the run, what stands around it, and the job for each way to start it."""
    found = [File("run.toml", short_toml(job.spec)), *render_around(job), *render_kueue(job), *render_image(job)]
    for target, render in OTHER_TARGETS:
        found += render(replace(job, spec=_with(job.spec, place={"target": target})))
    return found


def short_toml(spec: RunSpec) -> str:
    """A spec with only what differs from the defaults: what a person would write."""
    import tomli_w

    about = "The run. embark render run.toml --out . writes every other file of this folder from it."
    values = spec.model_dump(mode="json", exclude_defaults=True)
    return header(about) + "\n" + tomli_w.dumps(values)


def requirements() -> str:
    """The matched versions, for pip."""
    from embark import __version__
    from embark.stack.versions import default_triple

    triple = default_triple()
    words = [word for words in triple.pip_arguments("cuda") for word in words if word != "install"]
    about = "torch, torchrec and fbgemm go together in these versions and in no others."
    return header(about) + "\n".join([*words, f"embark-rec=={__version__}"]) + "\n"


def quickstart_script() -> str:
    return package_files("embark.render").joinpath("texts", "train_torchrec_quickstart.txt").read_text(encoding="utf-8")


def _quickstart() -> list[File]:
    job = quickstart_job()
    image = []
    for file in render_image(job):
        if file.path == "Dockerfile":
            # The script lies where the container starts, so that its name alone runs it.
            image.append(replace(file, text=file.text + f'\n# The quickstart itself.\nCOPY ["{SCRIPT}", "./"]\n'))
        elif file.path == ".dockerignore":
            image.append(replace(file, text=file.text + f"!{SCRIPT}\n"))
        else:
            image.append(file)
    return _below("quickstart", [
        File(SCRIPT, quickstart_script()), File("requirements.txt", requirements()), *image, *render_job(job)])


def _job(preset: RunSpec, *, name: str, **sections: Mapping[str, object]) -> Job:
    return make_job(_with(preset.model_copy(update={"name": name}), **sections), load_catalog())


def _with(spec: RunSpec, **sections: Mapping[str, object]) -> RunSpec:
    """A copy with some fields of some sections set, checked like one that a user wrote."""
    values = spec.model_dump()
    for section, fields in sections.items():
        values[section] = {**values[section], **fields}
    return RunSpec.model_validate(values)


def _below(folder: str, found: Iterable[File]) -> list[File]:
    return [replace(file, path=f"{folder}/{file.path}") for file in found]


if __name__ == "__main__":
    import sys
    from pathlib import Path

    from embark.render.folder import compare, write

    target = Path(sys.argv[1])
    write(target, compare(target, example_tree()), force=True, must_record=False)
