"""`embark follow`: train on a stream without end."""

from embark.cli.console import Console
from embark.cli.options import Accepted, Flag, Settings, Spec
from embark.cli.train import train_here
from embark.errors import UserError


def follow(
    spec: Spec, /, *, set_: Settings = (), fresh: Flag = False, accept_change: Accepted = (),
    make_streams: Flag = False, console: Console = Console(),
) -> int:
    """Train on a spec's [stream] until it is stopped: NATS JetStream, Kafka, a folder that grows, your own code.

    A stopped run resumes behind its last checkpoint, no record is trained on twice. With --json: one event per line.

    Parameters
    ----------
    fresh
        Start in a new directory (NAME-2, NAME-3, …) even if the run exists.
    make_streams
        With NATS: first make a JetStream stream of stream.retention_hours for each of stream.topics that has none.
    """
    from embark.spec import load_spec
    from embark.spec.run import accepting

    run = accepting(load_spec(spec, set_), accept_change)
    if not run.stream.is_on:
        raise UserError(f"{spec}: stream.source is empty, so there is nothing to follow",
                        fix="set it in [stream] (docs/follow.md); `embark train` trains on the data")
    if make_streams:
        from embark.data.stream.open_reader import make_streams as make

        for name in make(run):
            console.text(f"made the NATS stream {name}")
    return train_here(run, console, fresh=fresh)
