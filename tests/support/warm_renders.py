"""Imported by processes that tests fork theirs from: what each `embark render` and `embark launch` would compile and
pack again. Where a cluster's time is not the clock's, nothing is waited for between two looks at it."""

import embark.cli.launch
import embark.cli.render  # noqa: F401
from embark.launch.backends.kubernetes.backend import Kubernetes
from embark.lint.rendered import render_spec
from embark.spec import load_spec

Kubernetes.poll_s = 0.0

for target in ("job", "ray"):
    render_spec(load_spec("criteo-1tb", [f"place.target={target}", "place.cloud=aws", "store.root=s3://bucket/runs"]))
