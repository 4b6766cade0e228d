"""A version of an exported model, from its place to a scorer that is ready."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from embark.errors import DataError
from embark.export.artifact import current_version, open_artifact, open_versions
from embark.export.scoring_device import ScoringDevice
from embark.serve.request_rows import RequestScorer
from embark.serve.retrieve import open_retriever
from embark.serve.served_model import VersionChange

Loaded = TypeVar("Loaded")
_log = logging.getLogger("embark.serve")


def load_current(place: str, load: Callable[[int | None], Loaded]) -> tuple[Loaded, VersionChange | None]:
    """Load the current version; if it is damaged, the newest earlier one that is not, with the reason."""
    try:
        return load(None), None
    except DataError as error:
        versions = open_versions(place)
        try:
            wanted: int | None = current_version(versions)
        except DataError:  # `current.json` is what is damaged
            wanted = None
        for number in sorted((one.step for one in versions.committed()), reverse=True):
            if wanted is not None and number >= wanted:
                continue
            try:
                return load(number), VersionChange(wanted, number, error.what, error.fix)
            except DataError as other:
                _log.warning("version %d cannot be served either: %s", number, other.what)
        raise


def load_scorer(
    place: str, version: int | None, model_file: str = "", device: ScoringDevice | None = None,
    onto: RequestScorer | None = None, *, is_checked: bool = False,
) -> RequestScorer:
    """Load a version and warm it up. `onto` is a version that nobody uses any more: if this one is a delta of it, its
    tables are reused. `is_checked` is explained in `open_artifact`."""
    from embark.trainers.torch.scoring.open_model import open_model

    artifact = open_artifact(place, version, onto.artifact if onto else None, is_checked=is_checked)
    model = open_model(artifact, model_file, device or ScoringDevice(), onto.model if onto else None)
    scorer = RequestScorer(artifact, model.score, model.device, model.score_numbers)
    scorer.model = model
    scorer.score([scorer.empty_request()])
    scorer.retriever = open_retriever(scorer, model.user_vectors)
    return scorer
