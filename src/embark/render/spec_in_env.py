"""The spec for a container that no file can be mounted into: in a variable, written out before the ranks start."""

from __future__ import annotations

import base64

from embark.render.job import Job

VARIABLE = "EMBARK_SPEC_BASE64"
WRITTEN_PATH = "/tmp/embark-spec.toml"
WRITE_IT = f'printf %s "${VARIABLE}" | base64 -d > {WRITTEN_PATH}'
"""For a shell. Base64 has no character that a shell, YAML or a scheduler's own macros would read."""


def encoded_spec(job: Job) -> str:
    return base64.b64encode(job.spec_toml.encode()).decode()
