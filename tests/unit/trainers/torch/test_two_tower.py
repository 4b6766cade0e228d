"""Two towers train, resume, are evaluated by exact search and are planned."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from embark.errors import UserError
from embark.model.work import dense_work_of
from embark.plan.predict import predict_local
from embark.spec import resolve
from embark.trainers import evaluate, feature_importance, train
from embark.trainers.torch.networks import dense_network
from embark.trainers.torch.two_tower import exact_search

NUM_USERS, NUM_ITEMS = 60, 40


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    """Users click items of their own of four groups; one row in ten is no click."""
    path, draw = tmp_path_factory.mktemp("clicks") / "clicks.csv", random.Random(1)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "age", "label"])
        for _ in range(3000):
            user = draw.randrange(NUM_USERS)
            item = user % 4 + 4 * draw.randrange(NUM_ITEMS // 4)
            rows.writerow([user, item, draw.random(), int(draw.random() < 0.9)])
    return path


@pytest.fixture
def spec(clicks, tmp_path):
    def make(*sets: str):
        return resolve({
            "name": "two", "model": {
                "kind": "two_tower", "num_dense": 1, "embedding_dim": 8,
                "tables": [{"name": "user", "rows": NUM_USERS}, {"name": "item", "rows": NUM_ITEMS}],
                "two_tower": {"item": "item", "user": "user", "user_layers": [8], "exclude_seen": False, "eval_k": 10,
                              "num_sampled_negatives": 16}},
            "data": {"kind": "columns", "path": str(clicks), "dense_columns": ["age"]},
            "train": {"batch_size": 100, "num_steps": 60, "learning_rate": 0.3, "dense_learning_rate": 0.1,
                      "precision": "fp32"},
            "place": {"device": "cpu"}, "store": {"root": str(tmp_path)}, "watch": {"every": 1, "tensorboard": False},
        }, sets)
    return make


def losses(run_dir: str) -> list[float]:
    from embark.events import read_events

    return [e.values["loss"] for e in read_events(Path(run_dir, "events.jsonl")) if e.kind == "step"]


def test_it_learns_and_a_resumed_run_is_bit_for_bit_the_undisturbed_one(spec):
    whole = train(spec("name=whole"))
    found = losses(whole["run_dir"])
    assert found[-1] < found[0] - 0.5
    assert whole["recall_at_k"] > 0.8  # of 40 items ten are of the user's group; by chance it is 0.25
    assert 50 < whole["num_users"] <= NUM_USERS
    train(spec("train.num_steps=20"))
    resumed = train(spec())
    assert losses(resumed["run_dir"]) == found
    assert (resumed["ndcg_at_k"], resumed["recall_at_k"]) == (whole["ndcg_at_k"], whole["recall_at_k"])
    again = evaluate(whole["run_dir"])
    assert again.ranking is not None
    assert again.ranking["ndcg_at_k"] == whole["ndcg_at_k"]
    with pytest.raises(UserError, match="retrieval model"):
        feature_importance(whole["run_dir"])


def test_items_that_a_user_has_are_not_searched_for_again(spec):
    values = train(spec("model.two_tower.exclude_seen=true", "train.num_steps=1", 'data.label=""'))
    assert values["num_users"] < 50  # most held-out items are in the training data too


def test_exact_search_gives_the_largest_products_not_left_out():
    users, items = torch.eye(2), torch.tensor([[3.0, 0], [2, 1], [1, 5]])
    assert exact_search(users, items, 2, [np.array([0]), np.array([], np.int64)]).tolist() == [[1, 2], [2, 1]]
    assert exact_search(users, items, 4, [np.array([0, 1, 2]), np.array([2])]).tolist() == [[-1] * 4, [1, 0, -1, -1]]


def test_the_plan_counts_its_weights(spec):
    one = spec("model.two_tower.item_layers=[16, 8]")
    assert dense_work_of(one.model, 100).num_values == sum(p.numel() for p in dense_network(one.model).parameters())
    bare = spec("model.num_dense=0", "data.dense_columns=[]", "model.two_tower.user_layers=[]")
    assert dense_work_of(bare.model, 100).num_values == sum(p.numel() for p in dense_network(bare.model).parameters())
    # 6 × (8 wide vectors) × (100 in-batch and 16 sampled candidates)
    assert dense_work_of(bare.model, 100).flops_per_sample == 6 * 8 * 116
    here = {"engine": "pipeline", "precision": "fp32", "world_size": 1, "device": "cpu", "device_name": "",
            "device_bytes": 0, "host_bytes": 8 << 30}
    few, many = (predict_local(spec(f"model.two_tower.num_sampled_negatives={num}"), here) for num in (0, 100_000))
    assert 0 < few["step_s"] < many["step_s"]
