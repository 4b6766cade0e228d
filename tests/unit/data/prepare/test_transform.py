"""Dense values are those of the plain formula; a missing one counts as 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embark.data.prepare.transform import transform_of, transformed

VALUES = [0.0, 1.0, -1.0, -2.0, -3.0, -1e6, 5.0, 12345678.0, 1e10, math.nan]


@pytest.mark.parametrize(("how", "formula"), [
    ("mlperf", lambda x: math.log(max(x, -2) + 3)),
    ("log", lambda x: math.copysign(math.log(1 + abs(x)), x)),
    ("none", lambda x: x),
])
def test_the_formula_holds(how, formula):
    got = transformed(np.array([VALUES], np.float32), how)
    assert got.dtype == np.float32
    wanted = [formula(0.0 if math.isnan(x) else x) for x in VALUES]
    assert got[0].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_auto_is_mlperf_for_criteo_and_log_for_others(make_spec, criteo):
    from dataclasses import replace

    prepare = make_spec().data.prepare
    assert transform_of(prepare, criteo.schema()) == "mlperf"
    assert transform_of(prepare, replace(criteo.schema(), format="csv")) == "log"
    assert transform_of(make_spec({"dense": "none"}).data.prepare, criteo.schema()) == "none"
