"""A spec's file is edited whole or not at all."""

import pytest

from embark.errors import SpecError, UserError
from embark.spec import load_spec
from embark.store import set_in_file

TEXT = "# my run\n[place]\nnodes = 2\n"


def test_settings_are_in_the_file_that_the_next_command_reads(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    assert set_in_file(path, ["place.nodes=4", "name=mine"]) == ("place.nodes = 4", 'name = "mine"')
    spec = load_spec(str(path))
    assert (spec.place.nodes, spec.name) == (4, "mine")
    assert path.read_text().startswith("# my run\n")


def test_a_refused_setting_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    with pytest.raises(SpecError, match=r"place\.nodes = 0"):
        set_in_file(path, ["name=mine", "place.nodes=0"])
    assert path.read_text() == TEXT


@pytest.mark.parametrize("name", ["nowhere.toml", "quickstart"])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        set_in_file(tmp_path / name, ["place.nodes=4"])
    assert not list(tmp_path.iterdir())
