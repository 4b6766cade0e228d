"""The reader that `stream.source` names."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from embark.errors import MissingPackage, UserError
from embark.spec import RunSpec
from embark.values import JsonDict
from .records import StreamReader

OPTIONS = "EMBARK_STREAM_OPTIONS"


def open_reader(spec: RunSpec, run_uri: str) -> StreamReader:
    """Open the reader that `stream.source` names. Nothing is contacted before `open`. `run_uri` is that of the run's
    directory: the broker's names have its last part, and those of NATS its hash, since two runs may have one name."""
    stream, name = spec.stream, run_uri.rpartition("/")[2]
    _check_servers(spec)
    if stream.source == "files":
        from .files_reader import FilesReader

        return FilesReader(stream.path, stream.late_files)
    if stream.is_custom:
        from .custom_reader import CustomReader

        return CustomReader(stream)
    with _needs_client(stream.source):
        if stream.source == "kafka":
            from .kafka_reader import KafkaReader

            return KafkaReader(stream, name, client_options())
        from .nats_reader import NatsReader

        return NatsReader(stream, f"{name}-{sha256(run_uri.encode()).hexdigest()[:8]}", client_options())


def make_streams(spec: RunSpec) -> list[str]:
    """Make the NATS streams of `stream.topics` that do not exist; return their names."""
    if spec.stream.source != "nats":
        raise UserError(f'--make-streams: stream.source is "{spec.stream.source}"',
                        "leave it out; topics of Kafka are made with its own tools")
    _check_servers(spec)
    with _needs_client("nats"):
        from . import nats_reader
    return nats_reader.make_streams(spec.stream, spec.name, client_options())


def _check_servers(spec: RunSpec) -> None:
    if spec.stream.source == "nats" and not spec.stream.servers:
        raise UserError("stream.servers: is empty, which is for a broker that `embark render` deploys",
                        "name the broker's address, such as nats://127.0.0.1:4222")


@contextmanager
def _needs_client(source: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(f'stream.source = "{source}" needs {error.name}, which is not installed',
                             f"pip install 'embark-rec[{source}]'") from None


def client_options() -> JsonDict:
    """Read the TOML file that the environment names: the options may be secret, so no spec has them."""
    path = os.getenv(OPTIONS, "")
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{OPTIONS} = {path}: {error}", "name a TOML file with the client's options") from None
