"""The image for TPUs: Python and JAX; the chips' driver is the host's."""

from __future__ import annotations

from embark.render.file import File
from embark.render.job import Job
from embark.render.pod import SCRATCH
from embark.render.targets.tpu_vm import packages
from embark.render.yaml_text import header

BASE = "python:3.12-slim-bookworm"


def render_tpu_image(job: Job) -> list[File]:
    from embark import __version__

    about = (f"The image of Embark {__version__} with JAX for TPUs. docker build -t {job.image} . Where packages come "
             "from is pip's own matter: --build-arg PIP_INDEX_URL, or its configuration.")
    names = " ".join(f"'{name}'" for name in packages())
    return [File("Dockerfile", f"""\
{header(about).rstrip()}
ARG BASE={BASE}
FROM ${{BASE}}

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

ENV PYTHONUNBUFFERED=1 \\
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m pip install --no-cache-dir {names}

ENV HOME={SCRATCH}
WORKDIR {SCRATCH}
# embark-lint: ignore EMB305: the chips' devices are root's
ENTRYPOINT ["python", "-m", "embark"]
""")]
