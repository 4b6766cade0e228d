"""Imported by processes that tests fork theirs from: what each run would read, measure and compile again."""

from embark.catalog import load_catalog
from embark.plan.calibration import cpu_calibration
from embark.report.document import templates

load_catalog()
cpu_calibration()
for name in templates().list_templates(extensions=["j2"]):
    templates().get_template(name)
