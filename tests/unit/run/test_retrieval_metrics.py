"""Recall@K, NDCG@K and Hit@K, by hand."""

import math

import numpy as np
import pytest

from embark.run.retrieval_metrics import ranking_metrics, ranking_sums


def test_the_metrics_are_those_computed_by_hand():
    top = np.array([[5, 7, 9], [1, 2, 3], [4, -1, -1]])
    relevant = [np.array([7, 8]), np.array([6]), np.array([], np.int64)]
    found = ranking_metrics(ranking_sums(top, relevant), 3)
    ndcg = (1 / math.log2(3)) / (1 + 1 / math.log2(3))
    assert found == pytest.approx({"recall_at_k": 0.25, "ndcg_at_k": ndcg / 2, "hit_at_k": 0.5, "num_users": 2, "k": 3})


def test_the_best_order_of_more_items_than_k_has_an_ndcg_of_1():
    found = ranking_metrics(ranking_sums(np.array([[1, 2]]), [np.array([1, 2, 3, 4])]), 2)
    assert (found["ndcg_at_k"], found["recall_at_k"], found["hit_at_k"]) == (1.0, 0.5, 1.0)


def test_without_users_the_metrics_are_undefined():
    assert math.isnan(ranking_metrics(ranking_sums(np.empty((0, 5), np.int64), []), 5)["recall_at_k"])
