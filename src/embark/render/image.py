"""The image: a Dockerfile, what starts in it, and what of its folder it sees.

It builds on any base with Python 3.11 or newer and pip: on PyTorch's own, whose torch is kept, or on plain Debian with
`--build-arg VARIANT=cpu`. pip finds its packages as its own configuration says, and wheels in `dist/` first.
"""

import shlex

from embark.render.folder import File
from embark.render.job import Job
from embark.render.pod import SCRATCH, USER_ID
from embark.render.shell_text import render_template
from embark.render.targets.tpu_vm import packages as tpu_packages

RAY_VERSION = "2.60.0"
EXTRAS = "cloud,columns,tensorboard"
_INDEX = "Packages come from where pip is configured to find them: --build-arg PIP_INDEX_URL, or its configuration."


def render_image(job: Job) -> list[File]:
    """The same for every target, but for Ray, which must be in it, and for the fabric's libraries."""
    return [
        File("Dockerfile", dockerfile(job)),
        File("entrypoint.sh", render_template("entrypoint.sh"), is_executable=True),
        File(".dockerignore", render_template("dockerignore")),
        File("dist/README.md", render_template("dist.md")),
    ]


def render_tpu_image(job: Job) -> list[File]:
    """Python and JAX; the chips' driver is the host's."""
    from embark import __version__

    about = f"The image of Embark {__version__} with JAX for TPUs. docker build -t {job.image} . {_INDEX}"
    return [File("Dockerfile", render_template("tpu.Dockerfile.j2", about=about, scratch=SCRATCH,
                                               packages=tpu_packages()))]


def dockerfile(job: Job) -> str:
    from embark import __version__
    from embark.stack.versions import default_triple

    triple = default_triple()
    about = (f"The image of Embark {__version__} with torch {triple.torch}, torchrec {triple.torchrec} and fbgemm "
             f"{triple.fbgemm}, which go together. docker build -t {job.image} . {_INDEX}")
    packages = [f"embark-rec[{image_extras(job)}]=={__version__}"]
    if job.spec.place.target == "ray":
        packages.append(f"ray[default,train]=={RAY_VERSION}")
    # On Google's machines the fabric's libraries come from the host.
    fabric = {"efa": "efa", "infiniband": "verbs"}.get(job.machine.fabric.name, "none")
    return render_template(
        "Dockerfile.j2", about=about, fabric=fabric, packages=packages, user=USER_ID, scratch=SCRATCH,
        cpu_steps=_pip_steps(triple.pip_arguments("cpu")), cuda_steps=_pip_steps(triple.pip_arguments("cuda")))


def image_extras(job: Job) -> str:
    """What the run needs beside the trainer itself, by the names pip takes."""
    watch = job.spec.watch
    return ",".join([EXTRAS, *(["otlp"] if "otlp" in watch.sinks else []),
                     *(["prometheus"] if watch.prometheus_port else [])])


def _pip_steps(arguments: list[list[str]]) -> str:
    return " \\\n      && ".join(shlex.join(["python", "-m", "pip", words[0], "--no-cache-dir", *words[1:]])
                                for words in arguments)
