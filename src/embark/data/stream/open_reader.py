"""The reader that `stream.source` names."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from embark.data.stream.records import StreamReader
from embark.errors import MissingPackage, UserError
from embark.spec.run import RunSpec

OPTIONS = "EMBARK_STREAM_OPTIONS"


def open_reader(spec: RunSpec) -> StreamReader:
    """Nothing is contacted before `open`."""
    stream = spec.stream
    if stream.source == "files":
        from embark.data.stream.files_reader import FilesReader

        return FilesReader(stream.path)
    if stream.is_own:
        from embark.data.stream.own_reader import OwnReader

        return OwnReader(stream)
    try:
        if stream.source == "kafka":
            from embark.data.stream.kafka_reader import KafkaReader

            return KafkaReader(stream, spec.name, client_options())
        from embark.data.stream.nats_reader import NatsReader

        return NatsReader(stream, spec.name, client_options())
    except ModuleNotFoundError as error:
        raise MissingPackage(f'stream.source = "{stream.source}" needs {error.name}, which is not installed',
                             fix=f"pip install 'embark-rec[{stream.source}]'") from None


def client_options() -> dict[str, Any]:
    """Of the TOML file that the environment names: they may be secret, so no spec has them."""
    path = os.environ.get(OPTIONS, "")
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{OPTIONS} = {path}: {error}", fix="name a TOML file with the client's options") from None
