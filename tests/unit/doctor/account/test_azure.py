"""An Azure subscription is asked through az, whose answers have its real form."""

from __future__ import annotations

from typing import Any

import pytest

from embark.doctor.account import check_account, need_of
from embark.doctor.host import Check
from embark.errors import UserError
from embark.launch.shell import Shell
from embark.spec import load_spec

ACCOUNT = {"environmentName": "AzureCloud", "id": "00000000-0000-0000-0000-000000000001", "isDefault": True,
           "name": "Research", "state": "Enabled", "tenantId": "t", "user": {"name": "ann@example.com", "type": "user"}}
SKU = {"name": "Standard_ND96asr_v4", "resourceType": "virtualMachines", "restrictions": [],
       "locationInfo": [{"location": "eastus", "zones": ["2", "1"], "zoneDetails": []}]}
BUDGET = {"name": "embark-quickstart", "amount": 500.0, "currentSpend": {"amount": 120.5, "unit": "USD"}}


def usage(name: str, used: int, limit: int) -> dict[str, Any]:
    local = {"cores": "Total Regional vCPUs", "lowPriorityCores": "Total Regional Spot vCPUs"}.get(
        name, f"{name} vCPUs")
    return {"currentValue": str(used), "limit": str(limit), "localName": local, "unit": "Count",
            "name": {"localizedValue": local, "value": name}}


USAGE = [usage("cores", 100, 1000), usage("lowPriorityCores", 0, 96), usage("Standard NDASv4_A100 Family", 96, 192)]


def answers(**other: object) -> dict[str, object]:
    return {"account show": ACCOUNT, "vm list-usage": USAGE, "vm list-skus": [SKU], "consumption budget list": [BUDGET],
            "aks show": "1.99.1", **other}


def checks_of(*sets: str) -> dict[str, Check]:
    spec = load_spec("quickstart", ["place.machine=Standard_ND96asr_v4", "place.region=eastus", *sets])
    return {check.name: check for check in check_account(need_of(spec), Shell())}


FAMILY = "quota Standard NDASv4_A100 Family vCPUs"


def test_a_subscription_that_may_start_the_machines(cli):
    cli("az", answers())
    found = checks_of()
    assert {name: check.verdict for name, check in found.items()} == {
        "account": "ok", FAMILY: "ok", "quota Total Regional vCPUs": "ok", "machine offered": "ok", "cluster": "ok",
        "budgets": "ok"}
    assert found["cluster"].found == "Kubernetes 1.99.1"
    assert found["account"].found == f"Research ({ACCOUNT['id']}) as ann@example.com"
    assert found[FAMILY].found == "192 vCPUs, 96 in use; the run takes 96"
    assert found["machine offered"].found == "Standard_ND96asr_v4 in eastus, zones 1, 2"
    assert found["budgets"].found == "embark-quickstart: 120 of 500"


@pytest.mark.parametrize("name", ["standardNDASv4_A100Family", "standard NDASv4_A100 Family"])
def test_spaces_and_capitals_of_a_familys_name_do_not_matter(cli, name):
    cli("az", answers(**{"vm list-usage": [*USAGE[:2], usage(name, 96, 192)]}))
    assert checks_of()[FAMILY].verdict == "ok"


def test_two_machines_are_more_than_is_left(cli):
    cli("az", answers())
    check = checks_of("place.nodes=2")[FAMILY]
    assert (check.verdict, check.found) == ("wrong", "192 vCPUs, 96 in use; the run takes 192")
    assert "Standard NDASv4_A100 Family vCPUs in eastus" in check.fix


def test_spot_counts_to_a_quota_of_its_own(cli):
    cli("az", answers())
    found = checks_of("place.spot=true")
    assert found["quota Total Regional Spot vCPUs"].verdict == "ok"
    assert "quota Total Regional vCPUs" not in found
    assert checks_of("place.spot=true", "place.nodes=2")["quota Total Regional Spot vCPUs"].verdict == "wrong"


def test_the_regions_own_limit_counts_too(cli):
    cli("az", answers(**{"vm list-usage": [usage("cores", 990, 1000), *USAGE[1:]]}))
    assert checks_of()["quota Total Regional vCPUs"].verdict == "wrong"


def test_a_family_that_the_region_does_not_list_is_not_known(cli):
    cli("az", answers(**{"vm list-usage": USAGE[:2]}))
    assert checks_of()[FAMILY].verdict == "warning"


def test_a_machine_that_is_not_sold_to_the_subscription_is_wrong(cli):
    barred = {**SKU, "restrictions": [{"reasonCode": "NotAvailableForSubscription", "type": "Location",
                                       "values": ["eastus"]}]}
    cli("az", answers(**{"vm list-skus": [barred]}))
    check = checks_of()["machine offered"]
    assert check.verdict == "wrong"
    assert "NotAvailableForSubscription" in check.found


def test_a_region_without_the_machine_is_wrong(cli):
    cli("az", answers(**{"vm list-skus": []}))
    assert checks_of()["machine offered"].verdict == "wrong"


def test_a_cluster_past_its_date_is_named(cli):
    cli("az", answers(**{"aks show": "1.33.2"}))
    found = checks_of()["cluster"]
    assert found.verdict == "warning"
    assert found.found.startswith("Kubernetes 1.33 on AKS is out of support since 2026-07-31: then AKS creates no")


def test_a_cluster_that_is_not_there_yet_is_all_right(cli):
    cli("az", answers(), {"aks show": "ERROR: (ResourceGroupNotFound) Resource group 'embark' could not be found."})
    assert checks_of()["cluster"].verdict == "ok"


@pytest.mark.parametrize(("budgets", "verdict"), [
    ([], "warning"), ([{**BUDGET, "currentSpend": {"amount": 500.0}}], "warning"), ([BUDGET], "ok"),
])
def test_budgets(cli, budgets: list[object], verdict: str):
    cli("az", answers(**{"consumption budget list": budgets}))
    assert checks_of()["budgets"].verdict == verdict


def test_another_subscription_than_the_spec_names_is_wrong(cli):
    cli("az", answers())
    check = checks_of("place.account=another")["account"]
    assert (check.verdict, check.fix) == ("wrong", "az account set --subscription another")


def test_a_subscription_that_is_turned_off_is_wrong(cli):
    cli("az", answers(**{"account show": {**ACCOUNT, "state": "Disabled"}}))
    assert checks_of()["account"].verdict == "wrong"


@pytest.mark.parametrize("said", [
    "ERROR: Please run 'az login' to setup account.\n",
    "ERROR: AADSTS700082: The refresh token has expired due to inactivity. The token was issued on 2026-01-01\n",
])
def test_after_a_missing_or_expired_login_nothing_more_is_asked(cli, said: str):
    cli("az", answers(), {"account show": said})
    found = checks_of()
    assert list(found) == ["account"]
    assert (found["account"].verdict, found["account"].fix) == ("wrong", "az login")


def test_what_the_identity_may_not_ask_is_a_warning_and_the_rest_is_asked(cli):
    result = ("ERROR: (AuthorizationFailed) The client 'ann@example.com' does not have authorization to perform action "
            "'Microsoft.Compute/locations/usages/read'\n")
    cli("az", answers(), {"vm list-usage": result})
    found = checks_of()
    assert found["quota"].verdict == "warning"
    assert "Reader" in found["quota"].fix
    assert found["machine offered"].verdict == "ok"


def test_an_answer_that_is_no_json_is_a_warning(cli, tmp_path):
    cli("az", answers())
    (tmp_path / "programs" / "az.1").write_text("Welcome to Azure!")
    assert checks_of()["quota"].verdict == "warning"


def test_a_missing_az_is_reported_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = checks_of().values()
    assert (check.name, check.verdict) == ("account", "wrong")
    assert check.found == "az, Azure's command line, is not installed"
    assert check.fix.startswith("pip install azure-cli")


def test_no_machine_and_no_cloud_is_a_question():
    with pytest.raises(UserError, match="which account"):
        need_of(load_spec("quickstart"))
