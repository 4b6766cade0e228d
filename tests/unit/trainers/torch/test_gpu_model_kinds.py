"""Every kind of model as a graph on a GPU: it trains what the pipeline trains, and resumes to the bit. Run by hand."""

from __future__ import annotations

import pytest
from captured_kinds import KINDS, sets_of

pytestmark = pytest.mark.gpu
GPU = ("place.device=cuda", "train.num_steps=24", "train.eps=1e-4", "train.engine=cuda_graph")


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_the_losses_are_those_of_the_pipeline(train_tiny, tmp_path, kind):
    num_steps = 8 if kind.startswith("hstu") else 24  # HSTU makes a hundredth of a difference of 1e-7 in 24 steps.
    sets = (*sets_of(kind, tmp_path), *GPU, f"train.num_steps={num_steps}")
    captured, pipeline = train_tiny(*sets), train_tiny(*sets, "train.engine=pipeline")
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=5e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_exact(train_tiny, tmp_path, kind, precision):
    sets = (*sets_of(kind, tmp_path), *GPU, f"train.precision={precision}", "store.checkpoint_every=8",
            "train.dense_optimizer=adam", "train.dense_learning_rate=0.01")
    reference = train_tiny(*sets, "name=whole")
    train_tiny(*sets, "name=parts", "train.num_steps=16", fresh=False)
    resumed = train_tiny(*sets, "name=parts", fresh=False)
    assert resumed.of("resume")[0]["step"] == 16
    assert resumed.losses() == reference.losses()
