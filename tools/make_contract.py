"""Writes the table of the contract into docs/guides/existing-cluster.md, from the data that `embark doctor` checks."""

import re
from pathlib import Path

from embark.kubernetes.contract import CONTRACT, ITEMS

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "existing-cluster.md"
BLOCK = re.compile(r"(?<=<!-- tools/make_contract.py writes this table -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def table() -> str:
    rows = ["| Check | The cluster must have | In `[place]` | Repair |", "|---|---|---|---|"]
    for name, item in ITEMS.items():
        needs = item["needs"].format(min_version=CONTRACT["min_version"])
        fix = item["fix"].replace("{min_version}", CONTRACT["min_version"])
        fix = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), fix).replace("|", "\\|")
        fix = {"kinds": "the command that installs the operator is printed",
               "secrets": "the command that creates it is printed"}.get(name, fix)
        fields = ", ".join(f"`{field}`" for field in item["field"].split(", ") if field)
        rows.append(f"| {name.replace('_', ' ')} | {needs} | {fields} | {fix} |")
    return "\n".join(rows)


def page() -> str:
    return BLOCK.sub(lambda _: table(), GUIDE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    GUIDE.write_text(page(), encoding="utf-8")
