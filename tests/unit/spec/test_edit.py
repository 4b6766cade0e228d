"""Settings written into a spec's text: the spec that results is the one that --set gives, and nothing else moves."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embark.errors import SpecError
from embark.spec import PRESETS, resolve
from embark.spec.load import set_in_text
from embark.spec.toml import starter

COMMENTED = """# my run
name = "mine"

[place]
nodes = 2   # machines

# where it is saved
[store]
root = "s3://bucket/runs"
"""


def test_comments_and_order_stay():
    text, lines = set_in_text(COMMENTED, ["place.nodes=4", "place.spot=true"], where="run.toml")
    assert text == COMMENTED.replace("nodes = 2   # machines\n", "nodes = 4   # machines\nspot = true\n")
    assert lines == ("place.nodes = 4", "place.spot = true")


def test_a_value_that_is_there_already_changes_nothing():
    assert set_in_text(COMMENTED, ["place.nodes=2"], where="run.toml") == (COMMENTED, ())


def test_a_new_section_is_set_off_by_an_empty_line():
    text, _ = set_in_text(COMMENTED, ["watch.prometheus_port=9464", "data.prepare.test_fraction=0.1"], where="run.toml")
    assert text == COMMENTED + "\n[watch]\nprometheus_port = 9464\n\n[data.prepare]\ntest_fraction = 0.1\n"


def test_one_table_of_several_is_edited():
    text = '[[model.tables]]\nname = "a"\nrows = 10\n\n[[model.tables]]\nname = "b"\nrows = 10\n'
    edited, lines = set_in_text(text, ["model.tables.1.rows=99"], where="run.toml")
    assert edited == text[:-3] + "99\n"
    assert lines == ("model.tables.1.rows = 99",)


@pytest.mark.parametrize("setting", ["place.nodes=0", "place.nodez=2", "place.nodes", "model.tables.7.rows=2"])
def test_what_load_spec_refuses_is_refused(setting):
    with pytest.raises(SpecError):
        set_in_text(COMMENTED, [setting], where="run.toml")


SETTINGS = st.lists(unique_by=lambda one: one.partition("=")[0], elements=st.sampled_from([
    "name=other", "place.nodes=8", "place.spot=true", "place.image=a.example/b:1", "store.root=gs://b/runs",
    "model.embedding_dim=64", "train.batch_size=64", "watch.sinks=[\"otlp\"]", "data.prepare.test_fraction=0.1",
]))


@pytest.mark.parametrize("text", [
    *map(starter, PRESETS), COMMENTED, "", 'place.nodes = 2\nstore.root = "x"\n', "place = {nodes = 2}\n",
    "[store]\nkeep_checkpoints = 1", "[place]\r\nnodes = 2\r\n\r\n[store]\r\nkeep_every = 3\r\n",
], ids=lambda text: repr(text[:20]))
@given(sets=SETTINGS)
def test_the_text_reads_back_as_the_settings_say(text, sets):
    edited, _ = set_in_text(text, sets, where="run.toml")
    assert resolve(tomllib.loads(edited)) == resolve(tomllib.loads(text), sets)
