"""Every kind of model in the captured step, one operation at a time on a CPU: it trains what the pipeline trains."""

from __future__ import annotations

import pytest
import torch
from captured_kinds import KINDS, refuse_waiting, sets_of

from embark.errors import UserError
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.spec import Task
from embark.trainers.torch.engines.cuda_graph import engine
from embark.trainers.torch.task_metrics import TaskWindow


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_the_pipeline(train_tiny, tmp_path, kind):
    sets = (*sets_of(kind, tmp_path), "train.num_steps=8")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets, "train.engine=cuda_graph")
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    # HSTU's tiny models multiply the last bit of a sum by some thousands in so many steps, also of the pipeline alone.
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=3e-4 if "hstu" in kind else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_exact(train_tiny, tmp_path, kind):
    sets = (*sets_of(kind, tmp_path), "store.checkpoint_every=4", "train.engine=cuda_graph",
            "train.dense_optimizer=adam")
    reference = train_tiny(*sets, "name=whole", "train.num_steps=8")
    train_tiny(*sets, "name=parts", "train.num_steps=4", fresh=False)
    resumed = train_tiny(*sets, "name=parts", "train.num_steps=8", fresh=False)
    assert resumed.of("resume")[0]["step"] == 4
    assert resumed.losses() == reference.losses()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_the_network_waits_for_the_device(train_tiny, tmp_path, monkeypatch, kind):
    """Forward, loss, backward and metrics run as they are inside a graph, and no operation needs the host."""
    num_calls = []

    def watched(holder, name):
        call = getattr(holder, name)

        def calling(*arguments, **more):
            num_calls.append(name)
            with refuse_waiting():
                return call(*arguments, **more)

        monkeypatch.setattr(holder, name, calling)

    for network in (engine.AutogradNetwork, engine.Network):
        watched(network, "backward_to_pooled")
    watched(engine.CudaGraphEngine, "_measure")
    train_tiny(*sets_of(kind, tmp_path), "train.num_steps=2", "train.engine=cuda_graph")
    assert num_calls == ["backward_to_pooled", "_measure"] * 2


def test_lists_are_counted_without_waiting_for_the_device():
    window = TaskWindow([Task(name="order", loss="listwise", list_size=4, k=2)], torch.device("cpu"))
    labels = torch.tensor([[1.0], [0], [0], [torch.nan], [0], [0], [0], [0]])
    with refuse_waiting():
        window.add(torch.randn(8, 1), labels)
    assert window.clone_sums()[3] == 1  # list with a relevant row


@pytest.mark.parametrize("kind", KINDS)
def test_auto_captures_every_kind_on_a_gpu(tiny, tmp_path, kind):
    spec = tiny(*sets_of(kind, tmp_path))
    why = cuda_graph_obstacle(spec, "cuda", has_tables_on_host=False)
    assert select_engine(spec, "cuda", why)[0] == "cuda_graph"


def test_what_is_not_captured_is_refused(tiny):
    spec = tiny(*KINDS["two_tower_in_batch"], "data.path=a.csv", "train.engine=cuda_graph")
    with pytest.raises(UserError, match=r'train\.engine = "cuda_graph" cannot be used: some tables live in the host'):
        select_engine(spec, "cuda", cuda_graph_obstacle(spec, "cuda", has_tables_on_host=True))
