"""`/retrieve`: the items with the highest scores for a user, by the towers and the item index of one version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.errors import DataError, EmbarkError
from embark.export.artifact import Artifact
from embark.export.item_values import StoredValues
from embark.features.rows import RawRows
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.spec.two_tower import is_item_table

MAX_K, MAX_EXCLUDED = 1_000, 10_000
MAX_FOUND = 1 << 18  # Limit for a request, over its users: requested and excluded items are searched.
Value = int | str
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """Users, and how many items are wanted for each."""

    users: tuple[Mapping[str, Any], ...]
    k: int
    exclude: frozenset[Value]

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True, slots=True)
class RetrieveResponse:
    """The items of each user, best first; None for a user that cannot be read."""

    results: tuple[dict[str, list[Any]] | None, ...]
    errors: tuple[tuple[int, str], ...]
    version: int


def read_retrieve(body: Mapping[str, Any]) -> RetrieveRequest:
    """Read `{"user": {…}}` or `{"users": [{…}, …]}`, with `k` and `exclude`."""
    if unknown := sorted(set(body) - {"user", "users", "k", "exclude"}):
        raise ValueError(f"{unknown[0]!r} is unknown; a request has 'user' or 'users', 'k' and 'exclude'")
    if ("user" in body) == ("users" in body):
        raise ValueError("a request has either 'user', an object, or 'users', an array of objects")
    users = [body["user"]] if "user" in body else body["users"]
    if not isinstance(users, list) or not all(isinstance(user, dict) for user in users):
        raise ValueError("'user' is not an object, or 'users' not an array of objects")
    k, exclude = body.get("k", 20), body.get("exclude", [])
    if type(k) is not int or not 1 <= k <= MAX_K:
        raise ValueError(f"'k' is not a whole number from 1 to {MAX_K:,}")
    is_list = isinstance(exclude, list) and len(exclude) <= MAX_EXCLUDED
    if not is_list or not all(type(one) in (int, str) for one in exclude):
        raise ValueError(f"'exclude' is not an array of up to {MAX_EXCLUDED:,} item ids")
    if len(users) * (k + len(exclude)) > MAX_FOUND:
        raise ValueError(f"{len(users):,} users with 'k' and 'exclude' of {k + len(exclude):,} items are more than "
                         f"{MAX_FOUND:,} in all; ask for fewer users at once")
    return RetrieveRequest(tuple(users), k, frozenset(exclude))


class Retriever:
    """Searches the index of an artifact with the vectors that its user tower gives."""

    def __init__(self, scorer: RequestScorer, user_vectors: Callable[[RawRows], Floats], index: Any) -> None:
        self._scorer, self._user_vectors, self._index = scorer, user_vectors, index
        artifact = scorer.artifact
        self._values, self._version = StoredValues(artifact.items), artifact.version
        self._temperature = artifact.info.model.two_tower.temperature
        # A user has no item: the item tower's columns are filled with what any row may have.
        self._fill = dict.fromkeys(_item_columns(artifact), None if artifact.info.rows.plain_ids is None else 0)

    def retrieve(self, requests: Sequence[RetrieveRequest]) -> list[RetrieveResponse | EmbarkError]:
        """Return the items of each request, all by the same version, or the error that it has instead."""
        return [self._retrieve(request) for request in requests]

    def _retrieve(self, request: RetrieveRequest) -> RetrieveResponse | EmbarkError:
        raw = self._scorer.parse(JsonColumns([{**self._fill, **user} for user in request.users]))
        if isinstance(raw, EmbarkError):
            return raw
        results: list[dict[str, list[Any]] | None] = [None] * len(request)
        why = {bad.line: bad.why for bad in raw.bad}
        rest = "; ".join(raw.reasons)
        if len(raw):
            num = min(request.k + len(request.exclude), int(self._index.ntotal))
            vectors = np.ascontiguousarray(self._user_vectors(raw), np.float32)
            scores, found = self._index.search(vectors, num)
            for position, own, items in zip(raw.positions.tolist(), scores, found, strict=True):
                results[position] = self._chosen(own / self._temperature, items, request)
        return RetrieveResponse(tuple(results), tuple((row, why.get(row, rest)) for row, one in enumerate(results)
                                               if one is None), self._version)

    def _chosen(self, scores: Floats, found: NDArray[np.int64], request: RetrieveRequest) -> dict[str, list[Any]]:
        items: list[Value] = []
        kept: list[float] = []
        for score, position in zip(scores.tolist(), found.tolist(), strict=True):
            if position >= 0 and (value := self._values[position]) not in request.exclude:
                items.append(value)
                kept.append(score)
        return {"items": items[: request.k], "scores": kept[: request.k]}


def _item_columns(artifact: Artifact) -> list[str]:
    info, columns = artifact.info, artifact.info.rows.columns
    num_dense = info.model.two_tower.num_item_dense
    return [*(column.source for column in columns.sparse if is_item_table(info.model, column.name)),
            *columns.dense[len(columns.dense) - num_dense :]]


def open_retriever(scorer: RequestScorer, user_vectors: Callable[[RawRows], Floats]) -> Retriever | None:
    """Return the retriever of a retrieval model; None for any other."""
    info = scorer.artifact.info.item_index
    if info is None:
        return None
    from embark.trainers.torch.scoring.item_index import require_faiss

    faiss = require_faiss()
    try:
        index = faiss.deserialize_index(np.array(scorer.artifact.items["index"]))
    except (KeyError, RuntimeError) as error:
        raise DataError(f"{scorer.artifact.folder}: its item index cannot be read: {error}",
                        fix="export the run again") from None
    if index.ntotal != info.num_items:
        raise DataError(f"{scorer.artifact.folder}: its item index has {index.ntotal} items instead of "
                        f"{info.num_items}", fix="export the run again")
    retriever = Retriever(scorer, user_vectors, index)
    retriever.retrieve([RetrieveRequest((dict.fromkeys(scorer.columns),), 1, frozenset())])
    return retriever
