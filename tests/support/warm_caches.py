"""Imported by processes that tests fork theirs from: what each run would read, measure and compile again."""

from embark.catalog import load_catalog
from embark.plan.calibration import cpu_calibration
from embark.report.document import page_template

load_catalog()
cpu_calibration()
page_template()
