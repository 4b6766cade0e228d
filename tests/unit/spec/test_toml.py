"""What `embark init` writes is a spec, and says what each line means."""

import importlib.util
from pathlib import Path

import pytest

from embark.spec import PRESETS, load_spec
from embark.spec.toml import line_of, starter

ROOT = Path(__file__).parents[3]


def reference() -> str:
    spec = importlib.util.spec_from_file_location("make_spec", ROOT / "tools" / "make_spec.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reference()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_starter_reads_back_as_its_preset(tmp_path, preset):
    path = tmp_path / "run.toml"
    path.write_text(starter(preset))
    assert load_spec(str(path)) == load_spec(preset)


def test_a_starter_explains_each_line():
    text = starter("quickstart").splitlines()
    above = text[text.index("batch_size = 2048") - 1]
    assert above == "# Global batch size: samples per step over all ranks. If left out, less on little data: 400 " \
        "steps an epoch."


def test_the_reference_page_is_the_code_s_own_words():
    assert (ROOT / "docs" / "reference" / "spec.md").read_text() == reference(), "run: make docs"


def test_every_field_is_explained():
    empty = [line for line in reference().splitlines() if line.endswith("| None |") or "| None |" in line]
    assert empty == []


@pytest.mark.parametrize(
    ("field", "line"),
    [("a", 1), ("s.b", 3), ("s.c.d", 4), ("t.0.x", 6), ("t.1.x", 8), ("t.1.nope", 7), ("nope", 1), ("s.nope", 2)],
)
def test_a_field_is_found_on_its_line(field, line):
    text = 'a = 1\n[s] # section\nb = 2\nc.d = 3\n[[t]]\nx = 1\n[[t]]\n"x" = 2\n'
    assert line_of(text, field) == line
