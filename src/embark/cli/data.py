"""`embark data prepare`, `make`, `check` and `copy`."""

from __future__ import annotations

from embark.cli.console import Console
from embark.cli.options import Flag, Settings, Spec


def prepare(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    dry_run: Flag = False,
    fresh: Flag = False,
    console: Console = Console(),
) -> int:
    """Turn the files of [data.prepare] into prepared data at data.path.

    What the spec does not say of the columns is guessed; --dry-run shows how. A preparation that was stopped goes on.

    Parameters
    ----------
    dry_run
        Only show what each column is taken for and why, and the memory it will take.
    fresh
        Begin anew, whatever is at data.path already.
    """
    from embark.cli.data_output import prepare_data
    from embark.spec import load_spec

    return prepare_data(console, load_spec(spec, set_), spec, dry_run=dry_run, fresh=fresh)


def make(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    out: str = "",
    force: Flag = False,
    console: Console = Console(),
) -> int:
    """Write the synthetic samples of a spec as prepared data: any size, any skew, one id or many.

    Parameters
    ----------
    out
        The folder to write; data.path where it is not given.
    force
        Replace the prepared data that is there.
    """
    from embark.cli.data_output import make_data
    from embark.spec import load_spec

    return make_data(console, load_spec(spec, set_), out, force=force)


def check(place: str, /, *, console: Console = Console()) -> int:
    """Read prepared data through: is it whole, is every value in range, does a column give the label away.

    Exit code 1 if something is wrong. Hints change nothing.

    Parameters
    ----------
    place
        A folder or a uri of prepared data, or a spec that names it.
    """
    from embark.cli.data_output import check_data

    return check_data(console, place)


def copy(
    source: str,
    target: str,
    /,
    *,
    verify: Flag = False,
    dry_run: Flag = False,
    force: Flag = False,
    console: Console = Console(),
) -> int:
    """Copy data between this machine and s3://, gs://, az://. A copy that was stopped goes on.

    Parameters
    ----------
    source
        A folder, a file or a uri. What is below it goes to the same paths below TARGET.
    target
        A folder or a uri.
    verify
        Read everything back and compare checksums; prepared data that comes here is always so compared.
    dry_run
        Only show what would be copied.
    force
        Replace what is at TARGET already.
    """
    from embark.cli.data_copy import copy as copy_data

    return copy_data(console, source, target, verify=verify, dry_run=dry_run, force=force)
