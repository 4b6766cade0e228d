"""Formats objects as kubectl does: tables, JSON, YAML, JSONPath, custom columns and names."""

import json
import re

import yaml

from cloudsim.grammar import ParsedCommand
from cloudsim.kubernetes.cluster import Cluster, Node, Object
from cloudsim.kubernetes.json_path import evaluate, find, text_of
from cloudsim.state import Refusal


def show(things: list[Object], command: ParsedCommand, *, is_list: bool) -> str:
    order = command.text("--sort-by")
    if order:
        path = order.strip("{}")
        things = sorted(things, key=lambda one: [text_of(each) for each in find(path, one)])
    form = command.text("--output")
    whole = {"apiVersion": "v1", "kind": "List", "items": things} if is_list or len(things) != 1 else things[0]
    if form == "json":
        return json.dumps(whole, indent=4) + "\n"
    if form == "yaml":
        return yaml.safe_dump(whole)
    if form == "name":
        return "".join(f"{one['kind'].lower()}/{one['metadata']['name']}\n" for one in things)
    kind, _, template = form.partition("=")
    try:
        if kind == "jsonpath":
            return evaluate(template, whole)
        if kind == "custom-columns":
            return _columns(things, template)
    except ValueError as error:
        raise Refusal(f"error: error parsing jsonpath {template}, {error}") from error
    if kind not in ("", "wide"):
        raise Refusal(f'error: unable to match a printer suitable for the output format "{form}"')
    return _table(things, command)


def node_object(cluster: Cluster, node: Node) -> Object:
    pool = cluster.pools[node.pool]
    is_ready = node.ready_at <= cluster.clock.now
    allocatable = {name: str(pool.allocatable[name]) for name in cluster.allocatable(node)} if is_ready else {}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name, "labels": cluster.labels(node)},
            "spec": {"taints": [dict(one) for one in pool.taints]},
            "status": {"allocatable": allocatable, "capacity": dict(pool.allocatable), "conditions": [
                {"type": "Ready", "status": "True" if is_ready else "False"}]}}


def is_selected(thing: Object, selector: str) -> bool:
    """Return whether an object meets a label selector such as `a=b,c!=d,e in (f,g),h,!i`."""
    labels = thing["metadata"].get("labels") or {}
    for part in filter(None, re.split(r",(?![^()]*\))", selector)):
        among = re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*", part)
        if among:
            is_in = labels.get(among[1]) in [one.strip() for one in among[3].split(",")]
            if is_in != (among[2] == "in"):
                return False
            continue
        name, sign, value = re.fullmatch(r"\s*(!?[^=!\s]+)\s*(?:(!=|==?)\s*(\S*))?\s*", part).groups()  # type: ignore[union-attr]
        if sign is None:
            is_met = name[1:] not in labels if name.startswith("!") else name in labels
        else:
            is_met = (labels.get(name) == value) == (sign != "!=")
        if not is_met:
            return False
    return True


def _columns(things: list[Object], template: str) -> str:
    columns = [one.split(":", 1) for one in template.split(",")]
    rows = [[name for name, _ in columns]]
    for thing in things:
        rows.append([",".join(text_of(each) for each in find(path.strip("{}"), thing)) or "<none>"
                     for _, path in columns])
    return _aligned(rows)


def _table(things: list[Object], command: ParsedCommand) -> str:
    if not things:
        return ""
    labels = [label for label in command.text("--label-columns").split(",") if label]
    head = ["NAME", "STATUS", *(label.rpartition("/")[2].upper() for label in labels)]
    if things[0]["kind"] == "Event":
        return _aligned([["TYPE", "REASON", "OBJECT", "MESSAGE"], *(
            [one["type"], one["reason"], f"{one['involvedObject']['kind'].lower()}/{one['involvedObject']['name']}",
             one["message"]] for one in things)])
    rows = [head]
    for thing in things:
        held = thing["metadata"].get("labels") or {}
        rows.append([thing["metadata"]["name"], _status(thing), *(str(held.get(label, "")) for label in labels)])
    return _aligned(rows)


def _status(thing: Object) -> str:
    status = thing.get("status") or {}
    if "phase" in status:
        waiting = find(".containerStatuses[0].state.waiting.reason", status)
        return str(waiting[0] if waiting else status["phase"])
    met = [one["type"] for one in status.get("conditions", []) if one.get("status") == "True"]
    return ",".join(met) or str(status.get("jobStatus") or status.get("state") or "")


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "".join("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
                   for row in rows)
