"""`embark plan --serve`: replicas and machines for a rate of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.formatting import format_bytes, format_usd
from embark.plan.serving import ServePlan, ServeRequest
from embark.plan.serving import plan_serving as make_plan
from embark.spec import RunSpec

MOST_OFFERS = 6


def plan_serving(
    console: Console, spec: RunSpec, flags: Mapping[str, Any], where: Mapping[str, Any], others: Sequence[str],
) -> ExitCode:
    """Exit code 1 if it is not possible."""
    if others:
        raise UserError(f"--serve plans a server, and {others[0]} a training run", fix="leave one out")
    for flag in ("--qps", "--p99-ms"):
        if flags[flag] is None:
            raise UserError(f"--serve needs {flag}", fix="embark plan SPEC --serve --qps 500 --p99-ms 20")
    request = ServeRequest(
        qps=flags["--qps"], p99_ms=flags["--p99-ms"],
        rows_per_request=128 if flags["--rows"] is None else flags["--rows"], tables=flags["--tables"] or "fp32",
        machine=flags["--cpu-machine"], **where)
    found = make_plan(spec, request)
    console.show(found, _render)
    return ExitCode.DONE if found.is_ok else ExitCode.OTHER


def _render(console: Console, found: ServePlan) -> None:
    console.result(found.sentence)
    if console.quiet:
        return
    if found.offers:
        console.text("\n".join(["", *found.why]))
        console.text("")
        console.table([{
            "machine": one.machine, "replicas": one.replicas_per_machine or None, "machines": one.num_machines or None,
            "$ a month": format_usd(one.usd_per_month), "$ a million": format_usd(one.usd_per_million),
            "region": one.region, "": one.why_not or " "} for one in found.offers[:MOST_OFFERS]])
        console.text("")
        console.table([{
            "tables": one.tables, "of all tables": format_bytes(one.table_bytes),
            "of a replica": format_bytes(one.replica_bytes),
            "cheapest": one.offer and f"{one.offer.num_machines} x {one.offer.machine}",
            "$ a month": format_usd(one.offer and one.offer.usd_per_month)} for one in found.by_tables])
        console.text(f"a replica: {found.replica_qps:,.4g} requests/s, {found.replica_rows_per_s:,.0f} rows/s at "
                     f"{found.utilization:.0%} of a core", style="dim")
    console.text(found.basis, style="dim")
