"""The image: a Dockerfile, what starts in it, and what of its folder it sees.

It builds on any base with Python 3.11 or newer and pip: on PyTorch's own, whose torch is kept, or on plain Debian with
`--build-arg VARIANT=cpu`. pip finds its packages as its own configuration says, and wheels in `dist/` first.
"""

from __future__ import annotations

import json
import shlex

from embark.render.file import File
from embark.render.job import Job
from embark.render.pod import SCRATCH, USER_ID
from embark.render.yaml_text import comment, header

BASE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
EFA_INSTALLER = "1.48.0"
"""With libfabric, rdma-core and aws-ofi-nccl in it."""
RAY_VERSION = "2.60.0"
EXTRAS = "cloud,columns,tensorboard"
VERBS_PACKAGES = ("ibverbs-providers", "ibverbs-utils", "libibverbs1", "librdmacm1")
_HOME = "/opt/embark"
_EFA_URL = "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz"
_EFA_LIBRARIES = "/opt/amazon/efa/lib /opt/amazon/ofi-nccl/lib /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"


def render_image(job: Job) -> list[File]:
    """The same for every target, but for Ray, which must be in it, and for the fabric's libraries."""
    text = dockerfile(fabric=image_fabric(job), has_ray=job.spec.place.target == "ray", image=job.image,
                      extras=image_extras(job))
    return [
        File("Dockerfile", text),
        File("entrypoint.sh", ENTRYPOINT, is_executable=True),
        File(".dockerignore", DOCKERIGNORE),
        File("dist/README.md", DIST_README),
    ]


def image_fabric(job: Job) -> str:
    """Whose libraries must be in the image: on Google's machines they come from the host."""
    return {"efa": "efa", "infiniband": "verbs"}.get(job.machine.fabric.name, "none")


def image_extras(job: Job) -> str:
    """What the run needs beside the trainer itself, by the names pip takes."""
    watch = job.spec.watch
    return ",".join([EXTRAS, *(["otlp"] if "otlp" in watch.sinks else []),
                     *(["prometheus"] if watch.prometheus_port else [])])


def dockerfile(*, fabric: str, has_ray: bool, image: str, extras: str = EXTRAS) -> str:
    from embark import __version__
    from embark.stack.versions import default_triple

    triple = default_triple()
    about = (f"The image of Embark {__version__} with torch {triple.torch}, torchrec {triple.torchrec} and fbgemm "
             f"{triple.fbgemm}, which go together. docker build -t {image} . Where packages come from is pip's own "
             "matter: --build-arg PIP_INDEX_URL, or its configuration.")
    packages = [f"embark-rec[{extras}]=={__version__}", *([f"ray[default,train]=={RAY_VERSION}"] if has_ray else [])]
    parts = [
        header(about).rstrip("\n"),
        f"ARG BASE={BASE}\nFROM ${{BASE}}",
        _why("cuda or cpu; efa, verbs or none. pip reads its own variables where they are given.")
        + "\n".join(["ARG VARIANT=cuda", f"ARG FABRIC={fabric}", f"ARG EFA_INSTALLER_VERSION={EFA_INSTALLER}",
                     "ARG PIP_INDEX_URL", "ARG PIP_EXTRA_INDEX_URL", "ARG PIP_FIND_LINKS"]),
        _why("The fabric's libraries, without which NCCL falls back to TCP, in silence. The host has the rest.")
        + "# hadolint ignore=DL3003,DL3008\n" + _fabric_step(),
        f"ENV PATH={_HOME}/bin:$PATH \\\n    PYTHONUNBUFFERED=1 \\\n    PIP_DISABLE_PIP_VERSION_CHECK=1",
        _why("An environment of its own that sees the base's torch. Its bytecode stays: not being root, a rank could "
             "write none, and would compile torch anew at each start.") + "# hadolint ignore=DL3013\n"
        + _run(f"python3 -m venv --system-site-packages {_HOME}", _triple_step()),
        _why("Wheels in dist/ come before the package index; they are seen here and not kept.")
        + "WORKDIR /tmp/dist\nRUN --mount=type=bind,source=dist,target=/tmp/dist \\\n    "
        + f"python -m pip install --no-cache-dir --find-links . {shlex.join(packages)}",
        f"COPY entrypoint.sh {_HOME}/bin/entrypoint.sh",
        _why("Not root. Caches and local runs go here.") + _user_step(),
        f"ENV HOME={SCRATCH}\nWORKDIR {SCRATCH}\nUSER {USER_ID}:{USER_ID}",
        _why("Alone it trains the quickstart; with words it runs them: a verb, a program, a script.")
        + f"ENTRYPOINT {json.dumps([f'{_HOME}/bin/entrypoint.sh'])}",
    ]
    return "\n\n".join(parts) + "\n"


def _fabric_step() -> str:
    def packages(names: str) -> str:
        return f"apt-get update && apt-get install -y --no-install-recommends {names}"

    return " \\\n".join([
        'RUN if [ "$FABRIC" = efa ]; then',
        f"      {packages('ca-certificates curl')}",
        f"      && cd /tmp && curl -fsSLo efa.tar.gz {_EFA_URL} && tar xzf efa.tar.gz",
        "      && cd aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify",
        f"      && printf '%s\\n' {_EFA_LIBRARIES} > /etc/ld.so.conf.d/efa.conf && ldconfig",
        "      && cd / && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/*;",
        '    elif [ "$FABRIC" = verbs ]; then',
        f"      {packages(' '.join(VERBS_PACKAGES))}",
        "      && rm -rf /var/lib/apt/lists/*;",
        "    fi",
    ])


def _triple_step() -> str:
    from embark.stack.versions import default_triple

    def steps(words: list[list[str]]) -> str:
        lines = [shlex.join(["python", "-m", "pip", each[0], "--no-cache-dir", *each[1:]]) for each in words]
        return " \\\n      && ".join(lines)

    triple = default_triple()
    return " \\\n".join([
        'if [ "$VARIANT" = cpu ]; then', f"      {steps(triple.pip_arguments('cpu'))};", "    else",
        f"      {steps(triple.pip_arguments('cuda'))};", "    fi",
    ])


def _user_step() -> str:
    user = f"--uid {USER_ID} --gid {USER_ID} --no-create-home --home-dir {SCRATCH} --shell /usr/sbin/nologin embark"
    return _run(
        f"chmod 0755 {_HOME}/bin/entrypoint.sh",
        f"{{ getent group {USER_ID} >/dev/null || groupadd --gid {USER_ID} embark; }}",
        f"{{ getent passwd {USER_ID} >/dev/null || useradd {user}; }}",
        f"install -d -o {USER_ID} -g {USER_ID} {SCRATCH}",
    )


def _run(*steps: str) -> str:
    return "RUN " + " \\\n    && ".join(steps)


def _why(text: str) -> str:
    return "\n".join(comment(text)) + "\n"


ENTRYPOINT = """\
#!/bin/sh
# What the container does with its words: none trains the quickstart; options and scripts go to python; a program is
# run as it stands; anything else is a verb of embark.
set -eu
case "${1:-}" in
  "") set -- embark train quickstart ;;
  -* | *.py) set -- python "$@" ;;
  *) if ! command -v "$1" >/dev/null 2>&1; then set -- embark "$@"; fi ;;
esac
exec "$@"
"""
DOCKERIGNORE = """\
# The image needs these two and no more: no data, no runs, no credentials.
*
!entrypoint.sh
!dist
"""
DIST_README = """\
Wheels that lie here go into the image before the package index is asked, such as the one of your own build:
`pip wheel --no-deps -w dist embark-rec`.
"""
