"""`/retrieve`: the items with the highest scores for a user or after a history, by the network and the item index of
one version."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from embark.errors import DataError, EmbarkError
from embark.export.artifact import Artifact
from embark.export.item_values import StoredValues
from embark.features.rows import RawRows
from embark.spec.model import CANDIDATE
from embark.spec.two_tower import is_item_table
from embark.values import JsonDict, JsonMap, frozen
from .request_rows import JsonColumns, RequestScorer

MAX_K, MAX_EXCLUDED = 1_000, 10_000
MAX_FOUND = 1 << 18  # Limit for a request, over its users: requested and excluded items are searched.
Value = int | str
Floats = NDArray[np.float32]


class RetrieveRequest(BaseModel):
    """Users, and how many items are wanted for each."""

    model_config = ConfigDict(extra="forbid", strict=True)

    users: list[JsonDict]
    k: int = Field(default=20, ge=1, le=MAX_K)
    exclude: list[Value] = Field(default=[], max_length=MAX_EXCLUDED)
    exclude_seen: bool = False  # Leave out the items of the user's history.

    def __len__(self) -> int:
        return len(self.users)


@frozen
class RetrieveResponse:
    """The items of each user, best first; None for a user that cannot be read."""

    results: tuple[dict[str, list[Any]] | None, ...]
    errors: tuple[tuple[int, str], ...]
    version: int
    identity: str = ""


def read_retrieve(body: JsonMap) -> RetrieveRequest:
    """Read `{"user": {…}}` or `{"users": [{…}, …]}`, with `k` and `exclude`."""
    if ("user" in body) == ("users" in body):
        raise ValueError("a request has either 'user', an object, or 'users', an array of objects")
    user = {"users": [body["user"]]} if "user" in body else {}
    asked = RetrieveRequest.model_validate({name: value for name, value in body.items() if name != "user"} | user)
    if len(asked) * (asked.k + len(asked.exclude)) > MAX_FOUND:
        raise ValueError(f"{len(asked):,} users with 'k' and 'exclude' of {asked.k + len(asked.exclude):,} items are "
                         f"more than {MAX_FOUND:,} in all; ask for fewer users at once")
    return asked


class Retriever:
    """Searches the index of an artifact with the vectors that its network gives users or their histories."""

    def __init__(self, scorer: RequestScorer, user_vectors: Callable[[RawRows], Floats], index: Any) -> None:
        self._scorer, self._user_vectors, self._index = scorer, user_vectors, index
        artifact = scorer.artifact
        self._values, self._answered_by = StoredValues(artifact.items), (artifact.version, artifact.identity)
        model = artifact.info.model
        self._history = model.sequence.history if model.is_next_item else ""
        self._temperature = 1.0 if self._history else model.two_tower.temperature
        # A user has no item: its columns are filled with what any row may have.
        self._fill = dict.fromkeys([CANDIDATE] if self._history else _item_columns(artifact),
                                   None if artifact.info.rows.plain_ids is None else 0)

    def retrieve(self, requests: Sequence[RetrieveRequest]) -> list[RetrieveResponse | EmbarkError]:
        """Return the items of each request, all by the same version, or the error that it has instead."""
        return [self._retrieve(request) for request in requests]

    def _retrieve(self, request: RetrieveRequest) -> RetrieveResponse | EmbarkError:
        if request.exclude_seen and not self._history:
            return DataError("exclude_seen: the user of this model has no history", "name the items in 'exclude'")
        seen = [self._seen(user) if request.exclude_seen else frozenset() for user in request.users]
        num_excluded = len(request.exclude) + max(map(len, seen), default=0)
        if len(request) * (request.k + num_excluded) > MAX_FOUND:
            return DataError(f"{len(request):,} users with so many items to leave out are too many",
                             "ask for fewer users at once")
        raw = self._scorer.parse(JsonColumns([{**self._fill, **user} for user in request.users]))
        if isinstance(raw, EmbarkError):
            return raw
        results: list[dict[str, list[Any]] | None] = [None] * len(request)
        why = {bad.line: bad.why for bad in raw.bad}
        rest = "; ".join(raw.reasons)
        if len(raw):
            num = min(request.k + num_excluded, int(self._index.ntotal))
            vectors = np.ascontiguousarray(self._user_vectors(raw), np.float32)
            scores, found = self._index.search(vectors, num)
            excluded = frozenset(request.exclude)
            for position, vector, own, items in zip(raw.positions.tolist(), vectors, scores, found, strict=True):
                if self._history and not vector.any():
                    why[position] = f"column {self._history!r} has no item that the model knows"
                    continue
                results[position] = self._chosen(own / self._temperature, items, request.k, excluded | seen[position])
        return RetrieveResponse(tuple(results), tuple((row, why.get(row, rest)) for row, one in enumerate(results)
                                               if one is None), *self._answered_by)

    def _seen(self, user: JsonMap) -> frozenset[Value]:
        """Return the items of a history as they are sent, also those for which it has no room."""
        cell = user.get(self._history)
        if isinstance(cell, str):
            cell = self._scorer.parser.split_cell(cell)
        items = cell if isinstance(cell, list) else [] if cell is None else [cell]
        return frozenset(item for one in items for item in self._values.like(one))

    def _chosen(self, scores: Floats, found: NDArray[np.int64], k: int, excluded: frozenset[Value],
                ) -> dict[str, list[Any]]:
        items: list[Value] = []
        kept: list[float] = []
        for score, position in zip(scores.tolist(), found.tolist(), strict=True):
            if position >= 0 and (value := self._values[position]) not in excluded:
                items.append(value)
                kept.append(score)
        return {"items": items[:k], "scores": kept[:k]}


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
                        "export the run again") from None
    if index.ntotal != info.num_items:
        raise DataError(f"{scorer.artifact.folder}: its item index has {index.ntotal} items instead of "
                        f"{info.num_items}", "export the run again")
    retriever = Retriever(scorer, user_vectors, index)
    retriever.retrieve([RetrieveRequest(users=[dict.fromkeys(scorer.columns)], k=1)])
    return retriever
