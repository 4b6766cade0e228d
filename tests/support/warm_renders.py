"""Imported by processes that tests fork theirs from: what each `embark render` and `embark launch` would compile and
pack again."""

import embark.cli.launch
import embark.cli.render  # noqa: F401
from embark.lint.rendered import render_spec
from embark.spec import load_spec

for target in ("job", "ray"):
    render_spec(load_spec("criteo-1tb", [f"place.target={target}", "place.cloud=aws", "store.root=s3://bucket/runs"]))
