"""`embark doctor`: its flags and its output."""

from collections.abc import Iterable
from pathlib import Path

from embark.doctor.host import Check, Host
from embark.doctor.machine import check_host
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize
from embark.spec import load_spec
from .console import Console, Flag, Settings

_STYLES = {"ok": "", "warning": "yellow", "wrong": "bold red"}
_MARKS = {"ok": "ok", "warning": "warning", "wrong": "WRONG"}
_NAME_WIDTH = 16


def doctor(
    spec: str = "", /, *, set_: Settings = (), cloud: Flag = False, machine: str = "", console: Console = Console()
) -> int:
    """Check that this machine, or with --cloud the account, is ready: versions, GPUs, links, memory, disk, limits.

    Exit code 1 if something is wrong; warnings do not count.

    Parameters
    ----------
    spec
        With --cloud: the spec whose machines, region and bucket are checked.
    cloud
        Instead, check the cloud account, or the existing cluster or the Slurm that the spec names.
    machine
        With --cloud: a machine from embark catalog list, if no spec names one.
    """
    if not cloud:
        if spec or machine or set_:
            raise UserError("a spec, --machine and --set need --cloud", "embark doctor --cloud SPEC")
        return _show(console, check_host(Host(run_dir=Path("runs"))), "this machine")
    from embark.doctor.account import check_account, check_slurm, need_of
    from embark.launch.shell import Shell

    sets = [*([f"place.machine={machine}"] if machine else []), *set_]
    loaded = load_spec(spec or "quickstart", sets)
    if loaded.place.is_existing:
        from embark.doctor.cluster import check_cluster

        return _show(console, check_cluster(loaded, Shell()), f"the cluster for {loaded.name}")
    if loaded.place.target == "slurm":
        return _show(console, check_slurm(loaded, Shell()), f"the cluster for {loaded.name}")
    need = need_of(loaded)
    console.text(f"{need}: {need.num_units} {need.unit}")
    return _show(console, check_account(need, Shell()), str(need))


def _show(console: Console, checks: Iterable[Check], subject: str) -> ExitCode:
    """Show each check as soon as it is done; as JSON all of them together."""
    found: list[Check] = []
    for one in checks:
        found.append(one)
        _render(console, one)
    wrong = [one.name for one in found if one.verdict == "wrong"]
    warnings = [one.name for one in found if one.verdict == "warning"]
    also = f"; warnings: {', '.join(warnings)}" if warnings else ""
    sentence = f"not ready: {', '.join(wrong)}" if wrong else f"ready ({pluralize(len(found), 'check')})"
    console.show(found, lambda console, _: console.result(f"{subject}: {sentence}{also}"))
    return ExitCode.OTHER if wrong else ExitCode.DONE


def _render(console: Console, one: Check) -> None:
    expected = f"; expected {one.expected}" if one.verdict != "ok" and one.expected else ""
    head = f"{_MARKS[one.verdict]:<8}{one.name:<{_NAME_WIDTH}} "
    console.text(f"{head}{one.found}{expected}", style=_STYLES[one.verdict])
    if one.fix:
        console.text(f"{'':8}{'':{_NAME_WIDTH}} fix: {one.fix}", style="green")
