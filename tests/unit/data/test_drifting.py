"""The drifting stream: samples by position, ids that come and go, effects that move, the best AUC of every moment."""

import numpy as np
import pytest

from embark.data import open_source
from embark.data.drifting import DriftingSource
from embark.errors import SpecError
from embark.run.evaluation import halves_counter
from embark.spec import RunSpec, resolve

PER_DAY = 20_000


def _spec(**drift: float) -> RunSpec:
    return resolve({
        "model": {"num_dense": 3, "num_tables": 4, "rows_per_table": 100, "embedding_dim": 8, "bottom_mlp": [8],
                  "top_mlp": [8, 1]},
        "data": {"num_train_samples": 3 * PER_DAY, "num_eval_samples": 1000, "zipf_exponent": 1.0,
                 "drift": {"samples_per_day": PER_DAY, "num_ids": 1000, **drift}},
        "train": {"batch_size": 64},
    })


def _source(**drift: float) -> DriftingSource:
    source = open_source(_spec(**drift))
    assert isinstance(source, DriftingSource)
    return source


def test_a_sample_depends_on_its_position_alone() -> None:
    source = _source()
    far = 50 * PER_DAY  # behind the samples of an epoch
    together, alone = source.train_rows(0, far, far + 500), _source().train_rows(0, far + 77, far + 78)
    assert np.array_equal(alone.dense[0], together.dense[77])
    assert np.array_equal(alone.ids, together.ids.reshape(4, 500)[:, 77])
    assert alone.best_probability is not None
    assert together.best_probability is not None
    assert alone.best_probability[0] == together.best_probability[77]
    assert together.ids.max() < 100  # modulo the table's rows
    raw = np.stack([ids[:, 0] for ids in source.raw_ids(far, far + 500)])
    assert np.array_equal(raw % 100, together.ids.reshape(4, 500))
    assert raw.max() > 1 << 60


def test_new_ids_replace_as_many_as_id_churn_says() -> None:
    source = _source(id_churn=0.25)
    frequent = [{int(i) for i in ids[0].ravel()} for ids in
                (source.raw_ids(day * PER_DAY, day * PER_DAY + PER_DAY // 50) for day in (0, 1, 2))]
    stayed = [np.mean([one in source_ids for one in frequent[0]]) for source_ids in (
        {int(i) for i in source.raw_ids(day * PER_DAY, day * PER_DAY + PER_DAY)[0].ravel()} for day in (1, 2))]
    assert stayed[1] < stayed[0]
    ranks = np.arange(1000, dtype=np.int32).reshape(1, 1000, 1)
    before, after = (source._raw(ranks, [0], np.full(1000, float(day))) for day in (3, 4))
    assert np.mean(before == after) == pytest.approx(0.75, abs=0.05)
    assert np.array_equal(*(_source(id_churn=0)._raw(ranks, [0], np.full(1000, float(day))) for day in (3, 400)))


def test_effects_move_gradually_and_yesterdays_best_model_is_worse_today() -> None:
    source = _source(id_churn=0, preference_drift=1.0)
    batch = source.train_rows(0, 0, 4000)
    clicks = batch.label > 0.5

    def auc_of_the_teacher_at(day: float) -> float:
        """Its probabilities, for the samples of day 0."""
        raw = source.raw_ids(0, 4000)
        teacher = source.teacher.at(np.full(4000, day), {0: np.stack(raw)})  # type: ignore[attr-defined]
        ranks = [group.draw_ids(source.table_keys[0, 0], range(4000)) for group in source.groups]
        p = teacher.probability(teacher.parts(batch.dense, ranks, [None], [[0, 1, 2, 3]]), source.scales)
        return halves_counter(p[~clicks])(p[clicks]) / 2 / (clicks.sum() * (~clicks).sum())

    aucs = [auc_of_the_teacher_at(day) for day in (0.1, 0.5, 2.0)]
    assert aucs[0] > aucs[1] + 0.01 > aucs[2] + 0.03
    assert source.best_auc(0, 4000) == pytest.approx(aucs[0], abs=0.03)


def test_held_out_samples_follow_the_training_samples_in_time() -> None:
    source = _source()
    assert source.days(1, range(1))[0] == 3.0
    assert len(source.eval_rows(0, 1000).label) == 1000
    with pytest.raises(IndexError):
        source.eval_rows(0, 1001)


def test_drift_without_a_day_is_a_mistake() -> None:
    with pytest.raises(SpecError, match=r"data\.drift\.samples_per_day"):
        resolve({"data": {"drift": {"id_churn": 0.5}}})


def test_a_spec_without_drift_does_not_mention_it() -> None:
    assert "drift" not in resolve({}).model_dump(mode="json")["data"]
