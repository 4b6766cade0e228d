"""A run in JAX from its first step to its last: it stops, goes on, ends, and refuses, as a run in torch does."""

from __future__ import annotations

import os
import signal

import pytest

from embark.errors import DataError, Preempted, SpecError


def test_a_run_in_bf16_learns(train_tiny):
    result = train_tiny("train.precision=bf16", "train.comms_dtype=bf16", "train.table_dtype=fp16", num_devices=2)
    exact = train_tiny(num_devices=2)
    assert result.of("start")[0]["precision"] == "bf16"
    assert result.losses() != exact.losses()
    assert result.of("eval")[-1]["auc"] == pytest.approx(exact.of("eval")[-1]["auc"], abs=0.01)
    assert exact.of("eval")[-1]["auc"] > 0.7


def test_a_preempted_run_saves_and_continues_to_the_same_bits(train_tiny):
    sets = ("train.num_steps=30", "watch.every=3", "name=stopped")

    class KillAt:
        def emit(self, event):
            if event.kind == "step" and event.values["step"] == 12:
                os.kill(os.getpid(), signal.SIGTERM)

        def close(self):
            pass

    with pytest.raises(Preempted) as raised:
        train_tiny(*sets, view=[KillAt()], fresh=False)
    assert raised.value.exit_code == 75
    result = train_tiny(*sets, fresh=False)
    assert result.of("resume")[0]["step"] == result.of("interrupt")[0]["step"] >= 12
    reference = train_tiny("train.num_steps=30", "watch.every=3")
    assert result.losses() == reference.losses()
    assert result.of("eval")[-1]["auc"] == reference.of("eval")[-1]["auc"]


def test_a_finished_run_is_left_alone(train_tiny):
    sets = ("train.num_steps=5", "name=once", "data.num_eval_samples=0")
    train_tiny(*sets, fresh=False, num_devices=1)
    assert len(train_tiny(*sets, fresh=False, num_devices=1).losses()) == 5


def test_an_id_outside_its_table_is_named_with_its_step(train_tiny, monkeypatch):
    from embark.data.synthetic import SyntheticSource

    honest = SyntheticSource.train_rows

    def with_a_bad_id(self, epoch, start, stop):
        batch = honest(self, epoch, start, stop)
        if start <= 3 * 128 < stop:
            batch.ids[len(batch.label) + 3 * 128 - start] = 99  # cat_1 has 3 rows
        return batch

    monkeypatch.setattr(SyntheticSource, "train_rows", with_a_bad_id)
    with pytest.raises(DataError, match=r"table cat_1: id 99 .* in step 4 "):
        train_tiny("train.num_steps=10", num_devices=1)


@pytest.mark.parametrize(
    ("setting", "what"),
    [("train.optimizer=adam", "train.optimizer"), ("train.sharding=column_wise", "train.sharding"),
     ("train.batch_size=100", "does not divide over 8 ranks")],
)
def test_what_this_trainer_cannot_do_is_refused_as_a_mistake_in_the_spec(train_tiny, setting, what):
    with pytest.raises(SpecError, match=what):
        train_tiny(setting)
