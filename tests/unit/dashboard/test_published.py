"""The page's line about published versions."""

from exported_runs import EditedRun

from embark.dashboard.api import published_text
from embark.export.artifact import open_versions
from embark.export.gate_record import write_gate
from embark.publish.publisher import publish
from embark.spec import to_toml


def test_the_line_names_the_current_version_and_the_last_refusal(tmp_path):
    run = EditedRun(tmp_path, publish={"to": str(tmp_path / "at"), "gate": False})
    spec, uri = to_toml(run.spec), run.save()
    assert published_text(uri, "[model]\n") == ""
    assert published_text(f"{uri}-", spec) == ""  # nothing is published yet
    publish(uri)
    run.save()
    publish(uri)
    assert published_text(uri, spec) == "version 2 (step 2); 2 versions kept"
    write_gate(open_versions(str(tmp_path / "at")), 1, {"passed": False, "why": "all rows: the AUC is lower"})
    assert published_text(f"{uri}/", spec) == \
        "version 2 (step 2); 1 version kept; 1 refused, the last: all rows: the AUC is lower"
