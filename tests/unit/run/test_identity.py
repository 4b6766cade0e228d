"""A run resumes what it is: other settings and other data are refused by name, or accepted by name and recorded."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embark.data import open_source, resolve_from_data
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError, ExitCode, SpecError, UserError
from embark.events import Event, EventLog
from embark.events.events import Change, changes_of
from embark.run.identity import changes_since, identity_of
from embark.run.open_run import RunOpener, open_run
from embark.run.resolve import ResolvedRun
from embark.run.signals import StopSignals
from embark.run.training_data import TrainingData
from embark.spec import RunSpec, resolve
from embark.spec.run import KEY, KIND_OF_FIELD, LEARNING_FIELDS, accepting
from embark.spec.tasks import HEAD_FIELDS
from embark.store import ChecksumWriter, RunDir, checkpoint_name
from embark.trainers import train

NUM_STEPS = 100
OTHER_VALUES = {
    "model.kind": "dcnv2", "model.code": "x = 1", "model.num_dense": 4, "model.embedding_dim": 12,
    "model.bottom_mlp": "[8]", "model.top_mlp": "[8]", "model.dropout": 0.1, "model.num_cross_layers": 2,
    "model.cross_rank": 7, "model.tables": "[{name='a', rows=9}]",
    "model.tasks": "[{name='click'}]", "model.task_head": "ple", "model.num_experts": 2, "model.num_task_experts": 3,
    "model.num_heads": 4, "model.num_feature_maps": 8, "model.num_members": 4,
    "model.num_extraction_layers": 3, "model.tower_mlp": "[8]", "model.two_tower": "{item='cat_1', user_layers=[8]}",
    "data.kind": "prepared", "data.code": "x = 1", "data.label": "y",
    "data.dense_columns": "['b', 'c', 'd']", "data.time_column": "t",
    "data.eval_fraction": 0.2, "data.eval_split": "test", "data.shuffle": "none", "data.on_bad_id": "clip",
    "data.num_train_samples": 4097, "data.num_eval_samples": 301, "data.zipf_exponent": 1.3, "data.signal": 2.0,
    "data.task_conflict": 0.5, "data.ragged": "true", "data.seed": 7, "data.interactions": "{user='who'}",
    "model.sequence": "{history='seen', candidate='a', num_blocks=3}",
    "train.batch_size": 256, "train.learning_rate": 0.1, "train.dense_learning_rate": 0.01, "train.optimizer": "sgd",
    "train.dense_optimizer": "sgd", "train.eps": 1e-6, "train.weight_decay": 0.01,
    "train.embedding_l2": 1e-5, "train.max_gradient_norm": 1.0, "train.warmup_steps": 5, "train.decay": "linear",
    "train.decay_start_step": 3, "train.decay_steps": 9, "train.final_rate": 0.1, "train.precision": "bf16",
    "train.table_dtype": "fp16", "train.comms_dtype": "bf16", "train.seed": 3, "train.dense_init": "centered",
    "train.warm_start": "runs/other",
    "features.numbers": "none", "features.missing_flags": "false", "features.num_buckets": 8,
    "features.bucket_tables": "true",
    "features.columns": "{b={transform='log'}}",
}
BASES = {"interactions": ("data.kind=interactions", "data.path=some", "model.kind=sasrec", "model.num_dense=0",
                          "model.tables=[{name='a', rows=9, pooling='none', max_length=3}, "
                          "{name='n', shares='a', pooling='none', max_length=2}]",
                          "model.sequence={history='a', negatives='n'}"),
         "synthetic": (), "prepared": ("data.kind=prepared", "data.path=some"),
         "columns": ("data.kind=columns", "data.path=some.csv", "data.dense_columns=['b', 'c', 'e']")}


def of(spec: RunSpec, fingerprint: str = "", num_steps: int = NUM_STEPS, ranks: list[str] | None = None):
    world = SimpleNamespace(gathered=lambda value: ranks or [value])
    return identity_of(spec, SimpleNamespace(fingerprint=lambda: fingerprint), num_steps, world)


@pytest.fixture
def open_tiny(tiny, alone):
    """A function that starts a run as far as its directory."""
    def start(*sets: str, data: str = "", num_steps: int = NUM_STEPS):
        with StopSignals() as signals, ExitStack() as at_end:
            spec = tiny(*sets)
            run = ResolvedRun(spec, spec.store.accept_changes, TrainingData(None), num_steps, num_steps,
                              of(spec, data, num_steps))
            return open_run(run, alone, RunOpener(signals, (), at_end), fresh=False)

    return start


@pytest.fixture
def saved(tiny, tmp_path):
    """A function that commits a checkpoint as a run with these settings does."""
    return lambda step, *sets, data="", num_steps=NUM_STEPS: commit(
        tmp_path / "tiny", step, {KEY: of(tiny(*sets), data, num_steps)})


def commit(run: Path, step: int, values: dict[str, Any]) -> None:
    checkpoints = RunDir(str(run)).checkpoints
    folder, files = checkpoint_name(step), ChecksumWriter(checkpoints.store)
    files.write(f"{folder}/index.json", b"{}")
    marks = {path.removeprefix(f"{folder}/"): mark for path, mark in files.marks.items()}
    checkpoints.commit(step, marks, {"world_size": 1, **values})


@pytest.mark.parametrize("field", sorted(LEARNING_FIELDS))
def test_a_changed_value_is_refused_with_both_values_and_both_fixes(field, open_tiny, saved, tmp_path):
    decay = {"train.decay_steps": ("train.decay=cosine",),
             "train.decay_start_step": ("train.decay=cosine", "train.decay_steps=9")}.get(field, ())
    tasks = {"model.sequence": ("model.kind=hstu", "model.tables=[{name='a', rows=9}, {name='seen', shares='a', "
                                "pooling='none', max_length=3}]", "model.sequence={history='seen', candidate='a'}"),
             "model.two_tower": ("model.kind=two_tower", "model.two_tower={item='cat_0', user_layers=[8]}"),
             "model.num_heads": ("model.kind=autoint",), "model.num_feature_maps": ("model.kind=xdeepfm",),
             "model.num_members": ("model.kind=tabm",),
             "model.task_head": ("model.tasks=[{name='a'}]",), "data.task_conflict": ("model.tasks=[{name='a'}]",),
             **{f"model.{name}": ("model.tasks=[{name='a'}]", "model.task_head=ple") for name in HEAD_FIELDS[1:]}}
    base = (*BASES[KIND_OF_FIELD.get(field, "synthetic")], *decay, *tasks.get(field, ()))
    changed = (*base, *(("data.path=some",) if field == "data.kind" else ()), f"{field}={OTHER_VALUES[field]}")
    saved(70, *base)
    with pytest.raises(UserError) as raised:
        open_tiny(*changed)
    assert raised.value.exit_code == ExitCode.BAD_INPUT
    assert f"\n  {field}: " in raised.value.what
    assert "at step 70" in raised.value.what
    assert "--fresh" in raised.value.fix
    assert f"--accept-change {field}" in raised.value.fix
    accepted = [field, *(["model.tables"] if field == "model.embedding_dim" else [])]
    assert open_tiny(*changed, f"store.accept_changes={accepted}")[0].uri == str(tmp_path / "tiny")
    assert set(OTHER_VALUES) == LEARNING_FIELDS


def test_the_message_has_each_changed_field_on_a_line_of_its_own(open_tiny, saved):
    saved(70, data="ab12" * 16)
    with pytest.raises(UserError) as raised:
        open_tiny("train.learning_rate=0.1", "model.rows_per_table=[50, 60, 50, 50]", data="cd34" * 16)
    assert raised.value.what.splitlines()[1:] == [
        "  model.tables: cat_1.rows = 50 at step 70, cat_1.rows = 60 now",
        "  train.learning_rate: 0.05 at step 70, 0.1 now",
        "  data: sha256 ab12ab12ab12… at step 70, sha256 cd34cd34cd34… now",
    ]


def test_what_only_says_where_how_fast_and_how_long_may_change(open_tiny, saved, tmp_path):
    saved(70)
    sets = ("train.num_steps=500", "train.num_epochs=9", "train.eval_every=5", "train.engine=pipeline", "watch.every=7",
            "train.sharding=row_wise", "train.memory_reserve=0.3", "store.checkpoint_every=3", "place.device=auto",
            "data.cache_gb=9", "store.keep_best=2",
            # the same tables, by name
            "model.tables=[{name='cat_0',rows=50},{name='cat_1',rows=50},{name='cat_2',rows=50},{name='cat_3',rows=50}]")
    assert open_tiny(*sets, num_steps=500)[0].uri == str(tmp_path / "tiny")
    saved(70, *BASES["prepared"], data="1")
    open_tiny(*BASES["prepared"], "data.path=elsewhere", "data.num_train_samples=5000", "data.prepare.max_ids=9",
              data="1")


def test_more_steps_are_a_change_if_the_decay_ends_with_the_run(open_tiny, saved):
    saved(70, "train.decay=cosine", "train.warmup_steps=10")
    with pytest.raises(UserError, match=r"train\.decay_steps: 90 at step 70, 190 now"):
        open_tiny("train.decay=cosine", "train.warmup_steps=10", num_steps=200)
    saved(70, "train.decay=cosine", "train.decay_steps=50")
    open_tiny("train.decay=cosine", "train.decay_steps=50", num_steps=200)


@pytest.mark.parametrize("step", [60, 80])
def test_a_checkpoint_of_another_run_is_refused_wherever_it_was_put(open_tiny, saved, step):
    saved(70)
    saved(step, "data.seed=9", "train.seed=9")
    with pytest.raises(UserError) as raised:
        open_tiny()
    assert f"data.seed: 9 at step {step}, 1 now" in raised.value.what
    assert f"train.seed: 9 at step {step}, 1 now" in raised.value.what


def test_a_checkpoint_without_an_identity_is_not_trusted(open_tiny, saved, tmp_path):
    commit(tmp_path / "tiny", 70, {})
    with pytest.raises(UserError, match="identity: not recorded at step 70"):
        open_tiny()
    open_tiny("store.accept_changes=['identity']")


def test_without_a_checkpoint_nothing_is_resumed_and_nothing_refused(open_tiny, tmp_path):
    log(tmp_path, Event("start", {"first_step": 0}))
    assert open_tiny("train.learning_rate=0.7")[1:] == (0, [])


def test_an_accepted_change_stays_accepted_and_taking_it_back_is_another(open_tiny, saved, tmp_path):
    saved(60)
    saved(70)
    log(tmp_path, Event("start", {"first_step": 70}),
        Event("change", {"step": 70, "field": "train.learning_rate", "old": 0.05, "new": 0.1}))
    assert open_tiny("train.learning_rate=0.1")[2] == [Change("train.learning_rate", 0.05, 0.1, 70)]
    with pytest.raises(UserError, match=r"0\.1 at step 70, 0\.05 now"):
        open_tiny()
    with pytest.raises(UserError, match=r"0\.1 at step 70, 0\.2 now"):
        open_tiny("train.learning_rate=0.2")
    saved(80, "train.learning_rate=0.1")
    open_tiny("train.learning_rate=0.1")


def log(root: Path, *events: Event) -> None:
    with closing(EventLog(root / "tiny" / "events.jsonl")) as file:
        for event in events:
            file.emit(event)


def test_a_run_that_falls_back_to_before_a_change_records_it_there(tiny, saved, tmp_path):
    saved(60)
    (checkpoint,) = RunDir(str(tmp_path / "tiny")).checkpoints.committed()
    recorded = [Change("train.learning_rate", 0.05, 0.1, 70)]
    now = of(tiny("train.learning_rate=0.1"))
    assert changes_since(checkpoint, now, recorded) == []
    before = [change for change in recorded if change.step <= 60]
    assert changes_since(checkpoint, now, before) == [Change("train.learning_rate", 0.05, 0.1, 60)]


def test_a_start_from_an_earlier_step_undoes_later_changes():
    events = [Event("start", {"first_step": 0}), Event("start", {"first_step": 70}),
              Event("change", {"step": 70, "field": "data", "old": "a", "new": "b"}), Event("change", {"step": None})]
    assert changes_of([*events, Event("start", {"first_step": 70})]) == [Change("data", "a", "b", 70)]
    assert changes_of([*events, Event("start", {"first_step": 69})]) == []


def test_an_unknown_field_is_not_accepted(tiny):
    with pytest.raises(SpecError, match=r"did you mean 'train\.learning_rate'"):
        tiny("store.accept_changes=['train.learning_rat']")
    with pytest.raises(SpecError, match="is not a field that decides what a run learns"):
        accepting(tiny(), ["train.num_steps"])
    with pytest.raises(SpecError, match="did you mean 'data"):
        train(tiny(), accept_change=["dat"])
    assert accepting(tiny(), ()) == tiny()


def test_ranks_that_read_different_data_are_refused(tiny):
    with pytest.raises(DataError, match="rank 2 reads other data than rank 0"):
        of(tiny(), "a", ranks=["a", "a", "b"])


CSV = "label,user,price\n" + "".join(f"{i % 2},u{i % 7},{i / 3}\n" for i in range(60))


def prepared_print(folder: Path, text: str, name: str = "visits.csv", **data) -> str:
    """The checksum of what `embark data prepare` makes of the text."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    spec = resolve({"data": {"kind": "prepared", "path": str(folder / "out"), "prepare": {"input": str(folder / name)},
                             **data}})
    prepare_from_spec(spec, folder / "out", fresh=True)
    return open_source(resolve_from_data(spec)).fingerprint()


def test_prepared_data_is_its_rows_its_split_and_its_id_maps(tmp_path):
    first = prepared_print(tmp_path / "a", CSV)
    assert prepared_print(tmp_path / "b", CSV, "moved.csv") == first
    renamed = re.sub(r",u(\d)", r",v\1", CSV)  # the same rows, each of another visitor
    assert len({first, prepared_print(tmp_path / "a", renamed), prepared_print(tmp_path / "a", CSV, seed=5)}) == 3


def test_columns_are_the_values_that_the_spec_reads(tmp_path):
    def of_text(text: str, name: str = "rows.csv") -> str:
        (tmp_path / name).write_text(text)
        return open_source(resolve({
            "model": {"num_dense": 1, "tables": [{"name": "user", "rows": 7, "multi_hot": 2}]},
            "data": {"kind": "columns", "path": str(tmp_path / name), "dense_columns": ["price"]}})).fingerprint()

    text = re.sub(r",u(\d)", r",\1", CSV)
    first = of_text(text)
    assert of_text(text, "moved.csv") == first
    lines = text.splitlines()
    swapped = "\n".join([*lines[:3], lines[4], lines[3], *lines[5:]])
    longer = "\n".join([*lines, lines[-1]])
    two_ids = text.replace("1,1,", "1,1|2,", 1)
    changed = [text.replace("\n0,0,", "\n1,0,", 1), text.replace(",6,2.0", ",6,2.5"), swapped, longer, two_ids]
    assert text not in changed
    assert len({first, *map(of_text, changed)}) == 6
