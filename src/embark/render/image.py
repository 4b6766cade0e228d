"""The image: a Dockerfile, what starts in it, and what of its folder it sees.

It builds on any base with Python 3.11 or newer and pip: on PyTorch's own, whose torch is kept, or on plain Debian with
`--build-arg VARIANT=cpu`. Embark comes from its wheel in `dist/`, everything else from where pip is configured to look.
"""

import shlex

from embark.spec import file_of
from .folder import File, Files
from .job import FOLLOW, Job
from .serving import ENDPOINTS, SERVE_TARGETS
from .shell_text import render_template
from .targets.tpu_vm import packages as tpu_packages
from .wheel import FOLDER as WHEEL_FOLDER
from .wheel import wheel_requirement

RAY_VERSION = "2.60.0"
CUDA_BASE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
CPU_BASE = "python:3.12-slim"
EXTRAS = "cloud,columns,tensorboard"
_HOW = ("embark image builds it. Embark comes from its wheel in dist/, other packages from where pip is configured to "
        "find them: --build-arg PIP_INDEX_URL, or its configuration.")


def render_image(job: Job) -> Files:
    """Write one image for every target of the folder, with Ray if one of them is Ray."""
    return [
        File("Dockerfile", dockerfile(job)),
        File("entrypoint.sh", render_template("entrypoint.sh"), is_executable=True),
        *_context_files(job)
    ]


def render_tpu_image(job: Job) -> Files:
    """Write an image with Python and JAX; the chips' driver is the host's."""
    from embark import __version__

    about = f"The image of Embark {__version__} with JAX for TPUs. {_HOW}"
    return [File("Dockerfile", render_template("tpu.Dockerfile.j2", about=about, files=job.place.image_files,
                                               packages=tpu_packages("."))),
            *_context_files(job)]


def _context_files(job: Job) -> Files:
    return [File(".dockerignore", render_template("dockerignore", files=image_files(job))),
            File(f"{WHEEL_FOLDER}/README.md", render_template("dist.md"))]


def dockerfile(job: Job) -> str:
    from embark import __version__
    from embark.stack.versions import default_triple

    triple = default_triple()
    about = (f"The image of Embark {__version__} with torch {triple.torch}, torchrec {triple.torchrec} and fbgemm "
             f"{triple.fbgemm}, which go together. {_HOW}")
    packages = [wheel_requirement(".", image_extras(job))]
    if "ray" in job.targets:
        packages.append(f"ray[default,train]=={RAY_VERSION}")
    # On Google's machines the fabric's libraries come from the host.
    is_serving = job.target in SERVE_TARGETS
    fabric = "none" if is_serving else {"efa": "efa", "infiniband": "verbs"}.get(job.machine.fabric.name, "none")
    return render_template(
        "Dockerfile.j2", about=about, fabric=fabric, variant="cpu" if is_serving else "cuda",
        base=CPU_BASE if is_serving else CUDA_BASE, packages=packages, files=image_files(job),
        is_serving=is_serving,
        cpu_steps=_pip_steps(triple.pip_arguments("cpu")), cuda_steps=_pip_steps(triple.pip_arguments("cuda")))


def image_files(job: Job) -> tuple[str, ...]:
    """Return files of the image: also the model's own code if nothing can be mounted."""
    model, place = job.spec.model, job.place
    own = [file_of(model.kind)] if place.target in ENDPOINTS and model.is_custom else []
    return (*place.image_files, *own)


def image_extras(job: Job) -> str:
    """Return the extras of the wheel that the run needs."""
    watch = job.spec.watch
    if job.target in SERVE_TARGETS:
        return "cloud,serve"
    stream = job.spec.stream.source if job.spec.stream.source in ("kafka", "nats") else ""
    return ",".join([EXTRAS, *(["serve"] if job.target == FOLLOW else []), *([stream] if stream else []),
                     *(name for name in ("otlp", "wandb", "mlflow") if name in watch.sinks),
                     *(["prometheus"] if watch.prometheus_port else [])])


def _pip_steps(arguments: list[list[str]]) -> str:
    return " \\\n      && ".join(shlex.join(["python", "-m", "pip", words[0], "--no-cache-dir", *words[1:]])
                                for words in arguments)
