"""`/retrieve`: raw users in, raw items out, by the towers and the index of one version."""

from __future__ import annotations

import random

import pytest
from exported_runs import save_run, write_csv
from served_models import while_serving

import embark
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError
from embark.export.artifact import open_artifact
from embark.serve.served_model import ServedModel
from embark.serve.version_poller import load_scorer
from embark.spec import resolve

ITEMS = [f"film {number}" for number in range(30)]


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """Of drawn weights; user and item are words, and the genre belongs to the item."""
    folder, draw = tmp_path_factory.mktemp("retrieval"), random.Random(1)
    rows = [[f"u{draw.randrange(20)}", draw.choice(ITEMS), "1"] for _ in range(900)]
    path = write_csv(folder / "rows.csv", [[*row[:2], f"g{len(row[1]) % 3}", row[2]] for row in rows],
                     ["user", "film", "genre", "watched"])
    spec = resolve({
        "name": "films", "model": {"kind": "two_tower", "num_dense": 0, "embedding_dim": 4,
                                   "two_tower": {"item": "film", "user": "user", "item_tables": ["genre"]}},
        "data": {"kind": "prepared", "path": str(folder / "prepared"), "label": "watched",
                 "prepare": {"input": str(path), "sparse_columns": ["user", "film", "genre"], "min_count": 1}},
        "place": {"device": "cpu"}, "store": {"root": str(folder)}})
    prepare_from_spec(spec, folder / "prepared")
    return embark.export_run(save_run(spec).uri, str(folder / "models")).uri


def test_the_artifact_says_what_its_index_finds(uri):
    info = open_artifact(uri).info.item_index
    assert info is not None
    assert (info.num_items, info.kind, info.k, info.recall) == (len(ITEMS), "exact", 20, 1.0)
    assert info.num_queries > 50


def test_items_are_ordered_by_score_and_excluded_ones_are_left_out(uri):
    def use(ask):
        every = [{"film": film, "genre": f"g{len(film) % 3}"} for film in ITEMS]
        status, scored, _ = ask("POST", "/score", {"user": {"user": "u3"}, "candidates": every})
        assert status == 200
        by_score = [film for _, film in sorted(zip(scored["scores"], ITEMS, strict=True), reverse=True)]
        status, found, headers = ask("POST", "/retrieve", {"user": {"user": "u3"}, "k": 5})
        assert headers["Embark-Identity"] == open_artifact(uri).identity[:12]
        assert (status, found["results"][0]["items"], found["errors"]) == (200, by_score[:5], [])
        assert found["results"][0]["scores"] == sorted(found["results"][0]["scores"], reverse=True)
        both = {"users": [{"user": "u3"}, {"user": "nobody"}], "k": 4, "exclude": [by_score[0], by_score[2], "unknown"]}
        status, found, _ = ask("POST", "/retrieve", both)
        assert found["results"][0]["items"] == [by_score[1], *by_score[3:6]]
        assert len(found["results"][1]["items"]) == 4
        user = {"user": "a"}
        for body in ({}, {"user": 3}, {"user": {}, "users": []}, {"user": user, "k": 0}, {"users": []},
                     {"user": user, "exclude": [1.5]}, {"user": {"name": "a"}}, {"user": user, "n": 3},
                     {"users": [user] * 300, "k": 1_000}, {"users": [user] * 30, "exclude": list(range(10_000))}):
            status, refused, _ = ask("POST", "/retrieve", body)
            assert status == 400, body
            assert refused["error"]

    while_serving(None, use, scorer=load_scorer(uri, None))


def test_a_version_without_an_index_does_not_take_over(uri):
    served, other = ServedModel(load_scorer(uri, None)), load_scorer(uri, None)
    served.check(other)
    without = other.artifact.info.model_copy(update={"item_index": None})
    object.__setattr__(other.artifact, "info", without)
    with pytest.raises(DataError, match="no retrieval model"):
        served.check(other)
