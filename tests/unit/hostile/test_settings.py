"""Whatever stands behind `--set`, it is read or refused in words."""

from __future__ import annotations

import json
import random

from hostile_files import NUM, SEED, hostile, toml_value

from embark.errors import UserError
from embark.spec import load_spec, to_toml

FIELDS = [f"{section}.{name}" for section, fields in json.loads(load_spec("laptop").model_dump_json()).items()
          if isinstance(fields, dict) for name in fields]


def test_any_value_of_a_setting_is_read_or_refused():
    draw, num_refused = random.Random(SEED), 0
    for _ in range(NUM or 40):
        try:
            to_toml(load_spec("laptop", [f"{draw.choice(FIELDS)}={toml_value(hostile(draw))}"]))
        except UserError:
            num_refused += 1
    assert num_refused
