"""`/retrieve` of a model of the next item: a history in, the next items out, ranked as an evaluation ranks them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from served_models import while_serving

import embark
from embark.data import open_source
from embark.export.artifact import open_artifact
from embark.serve.version_poller import load_scorer
from embark.spec import resolve
from embark.store.checkpoint_inspect import find_trained

NUM_USERS, NUM_ITEMS = 250, 60


@pytest.fixture(scope="module", params=["sasrec", "hstu"])
def run(request, tmp_path_factory) -> str:
    """A trained run; users have up to 15 items, more than a history has room for."""
    folder, draw = tmp_path_factory.mktemp("next"), random.Random(1)
    rows = [f"{user} {(7 * user + 3 * step + draw.randrange(3)) % NUM_ITEMS + 5}"
            for user in range(NUM_USERS) for step in range(draw.randrange(4, 16))]
    (folder / "log.txt").write_text("\n".join(rows))
    spec = resolve({
        "name": "next", "model": {"kind": request.param, "num_dense": 0, "embedding_dim": 16, "tables": [
            {"name": "item", "rows": NUM_ITEMS + 40, "pooling": "none", "max_length": 9},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 10}],
            "sequence": {"history": "item", "negatives": "negatives"}},
        "data": {"kind": "interactions", "path": str(folder / "log.txt"),
                 "interactions": {"column_names": ["user", "item"]}},
        "train": {"batch_size": 50, "num_steps": 30, "learning_rate": 0.1, "precision": "fp32"},
        "store": {"root": str(folder), "checkpoint_at_end": True}, "watch": {"tensorboard": False},
        "place": {"device": "cpu"}})
    return str(embark.train(spec)["run_dir"])


def test_ranks_by_the_server_are_those_of_the_evaluation(run, tmp_path):
    uri = embark.export_run(run, str(tmp_path / "models")).uri
    source = open_source(find_trained(run).spec)
    num = source.num_eval_samples
    assert num == NUM_USERS
    batch = source.eval_rows(0, num)
    targets = batch.by_feature(batch.ids)[0][np.cumsum(batch.lengths[0]) - 1].tolist()
    items, lengths = source.eval_seen(0, num)
    histories = [one.tolist() for one in np.split(items, np.cumsum(lengths)[:-1])]
    assert max(map(len, histories)) > 8

    def use(ask):
        ranks: dict[bool, list[int]] = {False: [], True: []}
        for start in range(0, num, 50):
            some = range(start, min(start + 50, num))
            for exclude_seen, found in ranks.items():
                status, answer, _ = ask("POST", "/retrieve", {
                    "users": [{"item": histories[user]} for user in some], "k": 1_000, "exclude_seen": exclude_seen})
                assert (status, answer["errors"]) == (200, [])
                for user, one in zip(some, answer["results"], strict=True):
                    if not exclude_seen:
                        assert sorted(one["items"]) == source.catalog.tolist()
                        found.append(one["items"].index(targets[user]))
                    elif targets[user] not in histories[user]:
                        assert not set(one["items"]) & set(histories[user])
                        found.append(one["items"].index(targets[user]))
        rankings = embark.evaluate(run).rankings
        for exclude_seen, name in ((False, "all_items"), (True, "unseen_items")):
            found = np.array(ranks[exclude_seen])
            assert rankings[name]["num_users"] == len(found) > 100
            for k in (5, 10, 20, 50):
                assert rankings[name][f"hit_at_{k}"] == pytest.approx(np.mean(found < k))
            assert rankings[name]["mrr_at_50"] == pytest.approx(np.mean(np.where(found < 50, 1 / (1 + found), 0)))

    while_serving(None, use, scorer=load_scorer(uri, None))


def test_histories_without_an_item_have_an_error_and_others_an_answer(run, tmp_path):
    uri = embark.export_run(run, str(tmp_path / "models"), tables="fp16").uri
    info = open_artifact(uri).info
    assert info.item_index is not None
    assert (info.item_index.kind, info.item_index.k) == ("exact", 20)

    def use(ask):
        users = [{"item": []}, {"item": [9, 12]}, {"item": [9, 10_000]}, {"item": "9|12"}]
        status, found, _ = ask("POST", "/retrieve", {"users": users, "k": 3, "exclude_seen": True})
        assert status == 200
        assert [one["row"] for one in found["errors"]] == [0, 2]
        assert "no item" in found["errors"][0]["why"]
        assert "not in 0 to" in found["errors"][1]["why"]
        assert found["results"][1] == found["results"][3]
        assert len(found["results"][1]["items"]) == 3
        first = found["results"][1]["items"][0]
        _, found, _ = ask("POST", "/retrieve", {"user": users[1], "k": 2, "exclude": [first, 9, 12]})
        assert first not in found["results"][0]["items"]
        status, scored, _ = ask("POST", "/score", {"user": {"item": [9, 12]}, "candidates": [
            {"candidate": item} for item in found["results"][0]["items"]]})
        assert status == 200
        assert scored["scores"] == sorted(scored["scores"], reverse=True)

    while_serving(None, use, scorer=load_scorer(uri, None))
