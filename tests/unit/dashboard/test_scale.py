"""The page's axes, in Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from limits import HANG_S

import embark.dashboard

pytestmark = pytest.mark.needs("node")
STATIC = Path(embark.dashboard.__file__).parent / "static"
LABELS = """
import { labelledTicks } from "./scale.mjs";
import { figure, inUnit } from "./format.mjs";
const rates = inUnit("samples/s");
const axes = [[0.0994, 0.1006, figure], [2035, 2060, rates], [54.7, 55.3, inUnit("°C")], [0, 1, figure]];
const labels = axes.map(([low, high, label]) => labelledTicks(low, high, 5, label).map(([, text]) => text));
console.log(JSON.stringify(labels));
"""


def test_no_label_of_an_axis_repeats_however_narrow_its_range(tmp_path):
    for name in ("scale", "format"):
        (tmp_path / f"{name}.mjs").write_text((STATIC / f"{name}.js").read_text())
    (tmp_path / "labels.mjs").write_text(LABELS)
    done = subprocess.run(["node", "labels.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True,
                          timeout=HANG_S)
    found = json.loads(done.stdout)
    assert [len(set(labels)) for labels in found] == [len(labels) for labels in found]
    assert all(found)
    assert found[-1] == ["0.0000", "0.2000", "0.4000", "0.6000", "0.8000", "1.0000"]
