"""The step in JAX learns what the torch trainer learns, however its tables are cut."""

from __future__ import annotations

import pytest

TOLERANCE = 1e-6
"""Between losses of about 0.5. Only the order of sums differs, which moves the last bits of fp32; over 100 steps that
came to 1.2e-7. A step that is wrong in anything else is off by more than 1e-4 within three steps."""
CASES = {
    "dlrm": (),
    "dcnv2, adagrad and adam, warm-up and decay": (
        "model.kind=dcnv2", "train.optimizer=adagrad", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01",
        "train.warmup_steps=10", "train.decay=cosine",
    ),
    "sgd, several ids or none, sums and means": (
        "train.optimizer=sgd", "train.dense_optimizer=sgd", "data.ragged=true", "model.num_dense=0",
        'model.tables=[{name="a", rows=50, multi_hot=3, pooling="mean"}, {name="b", rows=400, multi_hot=5}, '
        '{name="c", rows=7}]',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_torch_trainer_on_one_device_and_on_eight(train_tiny, train_in_torch, case):
    expected = train_in_torch(*CASES[case])
    for num_devices in (1, 8) if case == "dlrm" else (8,):
        found = train_tiny(*CASES[case], num_devices=num_devices)
        assert len(found.losses()) == 100
        assert found.losses() == pytest.approx(expected.losses(), abs=TOLERANCE)
        assert found.of("step")[-1]["learning_rate"] == expected.of("step")[-1]["learning_rate"]
        for metric in ("auc", "log_loss", "normalized_entropy", "calibration", "best_auc", "best_log_loss"):
            assert found.of("eval")[-1][metric] == pytest.approx(expected.of("eval")[-1][metric], abs=1e-5)
        assert found.of("eval")[-1]["num_samples"] == 300


@pytest.mark.slow
def test_several_devices_learn_the_same_as_one(train_tiny):
    sets = ("train.num_steps=20", "data.num_eval_samples=0",
            'model.tables=[{name="a", rows=60, dim=8}, {name="b", rows=300, dim=16, multi_hot=2}]',
            "model.kind=dcnv2", "model.num_cross_layers=1", "train.optimizer=sgd", "train.dense_optimizer=sgd")
    expected = train_tiny(*sets, num_devices=1).losses()
    found = train_tiny(*sets, "train.sharding=row_wise")
    assert found.losses() == pytest.approx(expected, abs=TOLERANCE)
    assert {t["sharding"] for t in found.of("plan")[0]["tables"]} == {"row_wise"}
