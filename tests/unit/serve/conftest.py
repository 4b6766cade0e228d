from __future__ import annotations

import pytest
from exported_runs import draw_rows, prepared_spec, save_run, write_csv

from embark import export_run
from embark.export.artifact import open_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Of a model with columns of every kind."""
    folder = tmp_path_factory.mktemp("served")
    train, later = (write_csv(folder / f"{name}.csv", draw_rows(num, num)) for name, num in
                    (("train", 300), ("later", 20)))
    return open_artifact(export_run(save_run(prepared_spec(folder, train, later)).uri, str(folder / "models")).uri)
