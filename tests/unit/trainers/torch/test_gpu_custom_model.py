"""A custom model in a CUDA graph. Run by hand; what came of it is in bench/RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from custom_models import AUTOINT, DLRM, KIND, SIMPLE, STATEFUL

from embark.errors import UserError

pytestmark = pytest.mark.gpu
GPU = (KIND, "place.device=cuda", "train.num_steps=40", "data.num_train_samples=16384", "train.eps=1e-4")
ADAM = ("train.dense_optimizer=adam", "train.dense_learning_rate=0.01", "train.weight_decay=0.1",
        "train.max_gradient_norm=0.5")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("code", "sets"), [
    (AUTOINT, ()), (AUTOINT, ADAM), (DLRM, ("train.optimizer=adam", "train.learning_rate=0.005")), (STATEFUL, ADAM),
], ids=["autoint", "autoint adam", "dlrm", "stateful"])
def test_in_fp32_the_losses_are_those_of_the_pipeline(train_tiny, code, sets):
    Path("my_model.py").write_text(code)
    pipeline = train_tiny(*GPU, *sets, "train.engine=pipeline")
    captured = train_tiny(*GPU, *sets)
    assert captured.of("start")[0]["engine"] == "cuda_graph", captured.of("start")[0]["engine_reason"]
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=5e-4)


@pytest.mark.parametrize("code", [AUTOINT, STATEFUL], ids=["autoint", "stateful"])
def test_in_bf16_a_resumed_run_is_bit_exact_and_near_the_pipeline(train_tiny, code):
    Path("my_model.py").write_text(code)
    sets = (*GPU, *ADAM, "train.precision=bf16", "store.checkpoint_every=8")
    reference = train_tiny(*sets, "name=whole", "train.eval_every=5")
    assert reference.of("start")[0]["engine"] == "cuda_graph"
    train_tiny(*sets, "name=parts", "train.num_steps=16", fresh=False)
    resumed = train_tiny(*sets, "name=parts", fresh=False)
    assert resumed.of("resume")[0]["step"] == 16
    assert resumed.losses() == reference.losses()
    assert reference.losses() == pytest.approx(train_tiny(*sets, "train.engine=pipeline").losses(), rel=0.03)


@pytest.mark.parametrize("line", [
    "return x + torch.tensor([1.0]).to(x.device)", "torch.cuda.synchronize(); return nn.functional.dropout(x, 0.1)",
], ids=["waits for a copy", "waits for the device"])
def test_an_uncapturable_model_trains_in_the_pipeline(train_tiny, line):
    Path("my_model.py").write_text(SIMPLE.format(line=line))
    run = train_tiny(*GPU)
    start = run.of("start")[0]
    assert start["engine"] == "pipeline"
    assert "my_model:MyModel cannot be captured: my_model.py:12: " in start["engine_reason"]
    assert run.losses()[-1] < run.losses()[0]


def test_nan_of_the_file_is_found_before_the_first_step(train_tiny):
    Path("my_model.py").write_text(SIMPLE.format(line="return torch.log(-x.square())"))
    with pytest.raises(UserError, match=r"my_model\.py:12: forward makes NaN or infinity of finite inputs .*\(log\)"):
        train_tiny(*GPU)
