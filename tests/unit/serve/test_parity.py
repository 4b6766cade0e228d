"""Raw rows through a running server have bit for bit the scores of the same rows, prepared and evaluated in fp32."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, validation_rows, write_csv
from served_models import while_serving

from embark import export_run
from embark.export.artifact import open_artifact
from embark.trainers.torch.scoring.cpu_model import ExportedModel


def as_json(row: list[str], draw: random.Random, has_lists: bool) -> dict[str, object]:
    """The same cells, as clients write them: lists, numbers, nulls and absent keys among them."""
    found: dict[str, object] = dict(zip(COLUMNS, row, strict=True))
    del found["clicked"]
    if has_lists:  # or text with delimiters
        found["tags"] = row[1].split("|") if row[1] else []
    if draw.random() < 0.5 and row[2].isdigit():
        found["number"] = int(row[2])
    if draw.random() < 0.5 and row[3].strip() not in ("", "nan"):
        found["price"] = float(row[3])
    for name in [name for name, cell in found.items() if cell == ""]:
        if draw.random() < 0.5:
            found[name] = None
        elif draw.random() < 0.5:
            del found[name]
    return found


@pytest.mark.parametrize("num_rows", [1_500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_scores_of_a_server_are_those_of_the_rows_prepared_and_evaluated(tmp_path, num_rows):
    draw = random.Random(7)
    rows = draw_rows(num_rows, 11, new_words=[f"unseen {i}" for i in range(30)])
    train, held_out = write_csv(tmp_path / "train.csv", draw_rows(400, 1)), write_csv(tmp_path / "later.csv", rows)
    spec = prepared_spec(tmp_path, train, held_out, features={
        "columns": {"word": {"statistics": ["count", "label_rate"]}, "number": {"rows": 997, "num_hashes": 2}},
        "crosses": [{"columns": ["word", "seen_at_hour"]}]})
    artifact = open_artifact(export_run(save_run(spec).uri, str(tmp_path / "models")).uri)
    ends = [0]
    while ends[-1] < num_rows:
        ends.append(min(num_rows, ends[-1] + draw.choice([1, 2, 9, 64, 250, 1_000])))
    requests = [[as_json(row, draw, draw.random() < 0.5) for row in rows[start:stop]]
                for start, stop in pairwise(ends)]
    for request in requests:  # a column that no row has is refused
        request[0] = dict.fromkeys(COLUMNS[:-1]) | request[0]

    def use(client):
        return [client("POST", "/score", {"rows": request})[1] for request in requests]

    answers = while_serving(artifact, use)
    assert [answer["errors"] for answer in answers] == [[]] * len(requests)
    scores = np.array([score for answer in answers for score in answer["scores"]], np.float32)
    prepared, model = validation_rows(spec.data.path), ExportedModel(artifact)
    # In batches of the same sizes, since not every matrix library sums in the same order in all of them.
    expected = np.concatenate([model.score_encoded(prepared.cut(start, stop))
                               for start, stop in pairwise(ends)])
    assert len(np.unique(expected)) > num_rows / 10
    assert np.array_equal(scores.view(np.uint32), expected.view(np.uint32))
