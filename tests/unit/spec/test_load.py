"""A spec is read whole, or every mistake in it is named with its place and its cure."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.errors import ExitCode, Mistake, SpecError, UserError
from embark.spec import PRESETS, DataSpec, ModelSpec, RunSpec, Table, TrainSpec, load_spec, resolve, to_toml
from embark.spec.data import PrepareSpec


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def mistakes_of(text: str, tmp_path: Path, *sets: str) -> dict[str, Mistake]:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, text), sets)
    assert caught.value.exit_code == ExitCode.BAD_INPUT == 64
    return {m.field: m for m in caught.value.mistakes}


def test_a_misspelt_key_is_refused_with_the_nearest_right_one(tmp_path):
    found = mistakes_of("[model]\nembeding_dim = 8\n", tmp_path)
    mistake = found["model.embeding_dim"]
    assert mistake.fix == "did you mean 'embedding_dim'?"
    assert mistake.where.endswith("run.toml:2")
    assert mistake.value == "8"


def test_a_misspelt_section_is_refused_with_the_nearest_right_one(tmp_path):
    assert mistakes_of("[trian]\nbatch_size = 8\n", tmp_path)["trian"].fix == "did you mean 'train'?"


def test_a_misspelt_table_field_is_placed_on_its_own_line(tmp_path):
    text = '[[model.tables]]\nname = "a"\nrows = 3\n[[model.tables]]\nname = "b"\nrows = 3\npoling = "sum"\n'
    mistake = mistakes_of(text, tmp_path)["model.tables.1.poling"]
    assert mistake.where.endswith(":7")
    assert "pooling" in mistake.fix


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('batch_size = "2048"', "train.batch_size"),
        ("batch_size = 2048.5", "train.batch_size"),
        ("batch_size = 0", "train.batch_size"),
        ("learning_rate = true", "train.learning_rate"),
        ("learning_rate = -1.0", "train.learning_rate"),
        ("learning_rate = nan", "train.learning_rate"),
        ('optimizer = "adamw"', "train.optimizer"),
        ("batch_size = [1]", "train.batch_size"),
    ],
)
def test_a_wrong_type_or_value_is_refused(tmp_path, line, field):
    found = mistakes_of(f"[train]\n{line}\n", tmp_path)
    assert list(found) == [field]
    assert found[field].where.endswith(":2")


def test_all_mistakes_are_reported_at_once(tmp_path):
    text = '[model]\nkind = "dlm"\nrows_per_table = "x"\n[train]\nbatch_size = "1"\n[data]\nsed = 3\n'
    assert set(mistakes_of(text, tmp_path, "place.device=gpu")) == {
        "model.kind", "model.rows_per_table", "train.batch_size", "data.sed", "place.device",
    }


def test_a_mistake_in_a_setting_names_the_setting(tmp_path):
    mistake = mistakes_of("", tmp_path, "train.num_epoch=3")["train.num_epoch"]
    assert mistake.where == "--set train.num_epoch"
    assert "num_epochs" in mistake.fix


@pytest.mark.parametrize("argument", ["train.batch_size", "=3", ""])
def test_a_setting_that_is_no_pair_is_refused(tmp_path, argument):
    with pytest.raises(SpecError, match="is not key=value"):
        load_spec("laptop", [argument])


def test_a_setting_below_a_plain_value_is_refused():
    with pytest.raises(SpecError, match="is not a section"):
        load_spec("laptop", ["name.x=3"])


def test_settings_take_every_kind_of_value():
    spec = load_spec("quickstart", [
        "train.batch_size=4096", "model.bottom_mlp=[32, 16]", "model.kind=dcnv2", "train.learning_rate=1e-3",
        'name="with-quotes"', "watch.tensorboard=false",
    ])
    assert spec.train.batch_size == 4096
    assert spec.model.bottom_mlp == (32, 16)
    assert spec.model.kind == "dcnv2"
    assert spec.train.learning_rate == 1e-3
    assert spec.name == "with-quotes"
    assert not spec.watch.tensorboard


def test_a_field_of_text_takes_a_number_as_text():
    place = load_spec("quickstart", ("place.zone=1", "place.account=123456789012", "place.nodes=2")).place
    assert (place.zone, place.account, place.nodes) == ("1", "123456789012", 2)


def test_a_setting_reaches_into_a_table():
    raw = {"model": {"tables": [{"name": "a", "rows": 3}, {"name": "b", "rows": 3}]}}
    assert resolve(raw, ["model.tables.1.rows=9"]).model.tables[1].rows == 9


def test_the_embedding_width_moves_every_table_with_it():
    spec = load_spec("quickstart", ["model.embedding_dim=256"])
    assert {t.dim for t in spec.model.table_list()} == {256}


def test_a_table_of_another_width_is_refused_for_dlrm_and_taken_for_dcnv2():
    raw = {"model": {"embedding_dim": 16, "tables": [{"name": "a", "rows": 3, "dim": 32}]}}
    with pytest.raises(SpecError, match=r"model\.tables\.0\.dim = 32"):
        resolve(raw)
    assert resolve(raw, ["model.kind=dcnv2"]).model.table_list()[0].dim == 32


def test_a_width_that_fbgemm_cannot_take_is_refused_with_the_next_one_up():
    with pytest.raises(SpecError, match="use 32"):
        load_spec("laptop", ["model.embedding_dim=30"])


def test_a_table_whose_ids_overflow_32_bits_is_refused():
    with pytest.raises(SpecError, match="less than or equal to 2147483647"):
        load_spec("laptop", [f"model.rows_per_table={2**31}"])


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(SpecError, match="two tables have this name"):
        resolve({"model": {"tables": [{"name": "a", "rows": 3}, {"name": "a", "rows": 4}]}})


def test_a_list_of_rows_must_have_a_number_for_each_table():
    with pytest.raises(SpecError, match=r"set model\.num_tables = 2"):
        resolve({"model": {"rows_per_table": [3, 4]}})


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["data.kind=columns"], "no file is named"),
        (["data.path=x.csv"], 'is not read while data.kind is "synthetic"'),
        (["data.kind=columns", "data.path=x.csv"], "names 0 columns, but model.num_dense is 13"),
        (["train.optimizer=adam", "place.device=cpu"], "no fused Adam on the CPU"),
        (["train.decay_steps=5"], 'no effect while train.decay is "none"'),
        (["train.decay_start_step=5"], 'no effect while train.decay is "none"'),
        (["train.batch_size=1000000000"], "is more than the"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(sets, what):
    with pytest.raises(SpecError, match=what):
        load_spec("laptop", sets)


def test_a_missing_file_is_refused():
    with pytest.raises(UserError, match=r"nowhere\.toml: no such file"):
        load_spec("nowhere.toml")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        load_spec(str(tmp_path))


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(UserError) as caught:
        load_spec("quikstart")
    assert "quickstart" in caught.value.fix


@pytest.mark.parametrize("word", ["t.tml", "t.tom", "tt.toml"])
def test_a_misspelt_file_is_refused_with_the_one_beside_it(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.toml").write_text("")
    for asked, meant in ((word, "t.toml"), (str(tmp_path / word), str(tmp_path / "t.toml"))):
        with pytest.raises(UserError) as caught:
            load_spec(asked)
        assert caught.value.fix == f"did you mean {meant!r}?"


def test_text_that_is_no_toml_is_refused(tmp_path):
    with pytest.raises(UserError, match="not TOML"):
        load_spec(write(tmp_path, "[model\n"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        load_spec(str(path))


def test_a_file_names_the_run_unless_it_does_so_itself(tmp_path):
    assert load_spec(write(tmp_path, "")).name == "run"
    assert load_spec(write(tmp_path, 'name = "mine"')).name == "mine"


@pytest.mark.parametrize("preset", list(PRESETS))
def test_one_setting_moves_the_rate_of_all_that_a_preset_trains(preset):
    """`--set train.learning_rate=0` must leave no layer learning behind the user's back."""
    assert load_spec(preset, ["train.learning_rate=0"]).train.dense_learning_rate is None


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_is_right_and_survives_toml(tmp_path, preset):
    spec = load_spec(preset)
    assert load_spec(write(tmp_path, to_toml(spec))) == spec
    short = load_spec(write(tmp_path, to_toml(spec, only_set=True)))
    assert short == spec
    assert short.model.model_fields_set == spec.model.model_fields_set


@settings(max_examples=50)
@given(
    kind=st.sampled_from(["dlrm", "dcnv2"]),
    dim=st.integers(1, 64).map(lambda n: 4 * n),
    rows=st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    rate=st.floats(0, 10),
)
def test_what_is_written_reads_back_the_same(tmp_path_factory, kind, dim, rows, rate):
    tables = tuple(Table(name=f"t{i}", rows=r, pooling="mean") for i, r in enumerate(rows))
    spec = RunSpec(model=ModelSpec(kind=kind, embedding_dim=dim, tables=tables), train=TrainSpec(learning_rate=rate))
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    for only_set in (False, True):
        path.write_text(to_toml(spec, only_set=only_set))
        assert load_spec(str(path)) == spec


@settings(max_examples=50)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=5, unique=True))
def test_lists_of_any_text_read_back_the_same(tmp_path_factory, texts):
    spec = RunSpec(name="a", data=DataSpec(prepare=PrepareSpec(ignored_columns=tuple(texts))))
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    path.write_text(to_toml(spec, only_set=True), encoding="utf-8")
    assert load_spec(str(path)) == spec


def test_a_number_of_machines_may_be_a_range():
    spec = resolve({"place": {"nodes": {"min": 2, "max": 4}}, "train": {"batch_size": 2400}})
    assert (spec.place.min_nodes, spec.place.max_nodes, list(spec.place.node_counts)) == (2, 4, [2, 3, 4])
    assert spec.place.is_elastic
    assert resolve(tomllib.loads(to_toml(spec, only_set=True))) == spec
    assert resolve(tomllib.loads(to_toml(spec, only_set=True)), ["place.nodes.max=3"]).place.max_nodes == 3
    fixed = resolve({}, ["place.nodes=3"]).place
    assert (fixed.min_nodes, fixed.max_nodes, list(fixed.node_counts), fixed.is_elastic) == (3, 3, [3], False)


@pytest.mark.parametrize(("nodes", "field", "what"), [
    ({"min": 3, "max": 2}, "place.nodes", "min is more than max"),
    ({"min": 2}, "place.nodes.max", "is required"),
    ({"min": 2, "max": "four"}, "place.nodes.max", "valid integer"),
    ({"min": 0, "max": 2}, "place.nodes.min", "greater than 0"),
    ({"min": 2, "mx": 3, "max": 3}, "place.nodes.mx", "no such field"),
    ("two", "place.nodes", "valid integer"),
])
def test_a_range_that_is_none_is_one_mistake(nodes, field, what):
    with pytest.raises(SpecError) as caught:
        resolve({"place": {"nodes": nodes}, "train": {"batch_size": 48}})
    assert [(m.field, what in m.what) for m in caught.value.mistakes] == [(field, True)]


@pytest.mark.parametrize(("field", "what"), [
    ("features.numbers", "input should be 'auto', 'standardize', 'quantiles', "),
    ("features.missing_flags", "input should be 'auto', True or False"),
    ("train.sharding", "input should be 'auto', 'table_wise', "),
])
def test_a_word_that_is_none_of_a_field_s_is_told_all_of_them(field, what):
    with pytest.raises(SpecError) as caught:
        resolve({}, [f"{field}=foo"])
    (mistake,) = caught.value.mistakes
    assert (mistake.field, mistake.what.startswith(what)) == (field, True)


def test_words_where_a_list_belongs_are_shown_as_the_list():
    with pytest.raises(SpecError) as caught:
        resolve({}, ["data.prepare.column_names=user, item"])
    (mistake,) = caught.value.mistakes
    assert mistake.what.startswith("should be a list")
    assert mistake.fix == ('["user", "item"]; on a command line '
                           """--set 'data.prepare.column_names=["user", "item"]'""")


@pytest.mark.parametrize("target", ["jobset", "trainjob", "ray", "torchx", "vertex", "tpu-vm"])
def test_targets_with_fixed_machines_refuse_a_range_of_nodes(target):
    with pytest.raises(SpecError) as caught:
        resolve({"place": {"nodes": {"min": 2, "max": 3}, "target": target}, "train": {"batch_size": 48}})
    (mistake,) = caught.value.mistakes
    assert f'place.target = "{target}" needs a fixed number' in mistake.what
    assert "set it to 3, or place.target to one of job, pytorchjob, vm" in mistake.fix


def test_a_batch_must_divide_over_every_number_of_machines():
    with pytest.raises(SpecError) as caught:
        resolve({"place": {"nodes": {"min": 2, "max": 4}}, "train": {"batch_size": 4096}})
    (mistake,) = caught.value.mistakes
    assert mistake.what == "does not divide over 3 machines, and the run may have 2 to 4"
    assert mistake.fix == "use 4092 or 4104"


def test_other_targets_of_a_folder_must_take_a_range_too():
    with pytest.raises(SpecError) as caught:
        resolve({"place": {"nodes": {"min": 2, "max": 3}, "render_targets": ["pytorchjob", "jobset", "ray"]},
                 "train": {"batch_size": 48}})
    (mistake,) = caught.value.mistakes
    assert (mistake.field, mistake.value) == ("place.render_targets", "jobset, ray")


@pytest.mark.parametrize(("setting", "what"), [
    ("model.num_tables=100000000", "less than or equal to 10000"),
    ("model.num_tables=2147483648", "less than or equal"),
    ("model.embedding_dim=4000000000", "less than or equal"), ("place.nodes=1000000000", "less than or equal"),
    ("train.num_steps=99999999999999999999", "is more than 9,007,199,254,740,992"),
    ("train.num_steps=" + "9" * 5000, "train.num_steps"), ("model.top_mlp=" + "[" * 3000 + "]" * 3000, "model.top_mlp"),
])
def test_what_no_machine_could_hold_is_refused_at_once(setting, what):
    with pytest.raises(SpecError, match=what):
        load_spec("laptop", [setting])


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "{b = " * 5000, "a = " + "9" * 5000,
                                  "[" + "a." * 5000 + "a]", "a = " + "[" * 200 + "]" * 200])
def test_deep_nesting_and_huge_numbers_are_refused(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError):
        load_spec(str(tmp_path / "run.toml"))


@pytest.mark.parametrize("source", [":y", "..x:y", "x" * 5000, "json:", ":", "a\0b"])
def test_a_source_that_is_none_is_refused_in_words(source):
    with pytest.raises(UserError):
        load_spec(source)
