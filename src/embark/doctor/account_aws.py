"""An AWS account, by boto3: identity, quotas, zones that have the machine, spot price, budgets."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from embark.doctor import Check, check
from embark.doctor.account import CLOUDS, Need, budget_check, refusal
from embark.errors import MissingPackage
from embark.formatting import format_usd, to_one_line

PRICE_MOVED = 0.25  # A spot price that differs this much from the catalog's is worth a warning.
LOGIN: str = CLOUDS["aws"]["login"]


def check_aws(need: Need) -> Iterator[Check]:
    """The identity first."""
    try:
        import boto3
        import botocore.exceptions
        from botocore.config import Config
    except ImportError:
        raise MissingPackage("checking an AWS account needs boto3, which is not installed",
                             fix="pip install 'embark-rec[cloud]'") from None
    config = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 2, "mode": "standard"})
    try:
        session = boto3.Session(region_name=need.region)
    except botocore.exceptions.ProfileNotFound as error:
        yield Check("account", "wrong", to_one_line(error), "an existing profile", "aws configure list-profiles")
        return

    def client(name: str, region: str = "") -> Any:
        """Created when needed: each reads megabytes of AWS's own description."""
        return session.client(name, region_name=region or need.region, config=config)

    identity: dict[str, str] = {}
    yield from _answer("account", "sts:GetCallerIdentity", lambda: _identity(client("sts"), need, identity))
    account, ec2 = identity["Account"], client("ec2")
    questions: tuple[tuple[str, str, Callable[[], list[Check]]], ...] = (
        ("machine offered", "ec2:DescribeInstanceTypeOfferings", lambda: _offered(ec2, need)),
        ("quota", "servicequotas:GetServiceQuota, ec2:DescribeInstances and ec2:DescribeInstanceTypes",
         lambda: _quota(client("service-quotas"), ec2, need)),
        ("spot price", "ec2:DescribeSpotPriceHistory", lambda: _spot_price(ec2, need)),
        ("budgets", "budgets:ViewBudget", lambda: _budgets(client("budgets", "us-east-1"), account)),
    )
    for name, action, question in questions:
        yield from _answer(name, action, question)


def families_of(quota_name: str) -> tuple[str, ...]:
    """Of `All P4, P3 and P2 Spot Instance Requests` and `Running On-Demand G and VT instances`: `p4 p3 p2`, `g vt`."""
    middle = re.sub(r"^(Running On-Demand|All)|(Spot Instance Requests|instances)$", "", quota_name)
    return tuple(word.lower() for word in re.findall(r"\b[A-Z]+\d*\b", middle))


def counts_to(instance_type: str, families: tuple[str, ...]) -> bool:
    """Whether a machine counts towards a quota of these families: `p5en.48xlarge` to `p5` and `p`, and not to `g`."""
    letters = re.match(r"[a-z]+", instance_type)
    family = instance_type.partition(".")[0]
    return any(family.startswith(one) if one[-1].isdigit() else letters is not None and letters.group() == one
               for one in families)


def _identity(sts: Any, need: Need, identity: dict[str, str]) -> list[Check]:
    """`identity` receives AWS's answer."""
    identity |= sts.get_caller_identity()
    wanted = need.job.spec.place.account
    found = f"{identity['Account']} as {identity['Arn']}"
    return [check("account", not wanted or wanted == identity["Account"], found, f"account {wanted}" if wanted else "",
                  "AWS_PROFILE chooses another; or correct place.account")]


def _offered(ec2: Any, need: Need) -> list[Check]:
    machine = need.location.machine_type
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [machine]}])
    return [need.offer_check(sorted({row["Location"] for page in pages for row in page["InstanceTypeOfferings"]}))]


def _quota(quotas: Any, ec2: Any, need: Need) -> list[Check]:
    name, code = need.quota
    if not code:
        return [Check("quota", "warning", f"the quota for {need.job.machine.name} {need.market} is not known",
                      fix=f"https://{need.region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas")]
    try:
        limit = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
    except quotas.exceptions.NoSuchResourceException:  # never changed for this account
        limit = quotas.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
    used = _vcpus_in_use(ec2, families_of(name), is_spot=need.job.is_spot)
    fix = (f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
           f"--desired-value {used + need.num_units:g} --region {need.region}: it may take days")
    return [need.quota_check(name, float(limit), used, fix)]


def _vcpus_in_use(ec2: Any, families: tuple[str, ...], *, is_spot: bool) -> float:
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}])
    running: Counter[str] = Counter()
    for page in pages:
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            is_of_it = (instance.get("InstanceLifecycle") == "spot") == is_spot
            if is_of_it and counts_to(instance["InstanceType"], families):
                running[instance["InstanceType"]] += 1
    if not running:
        return 0.0
    # A machine counts with all its processors, however many it was started with.
    kinds = ec2.get_paginator("describe_instance_types").paginate(InstanceTypes=sorted(running))
    return float(sum(running[kind["InstanceType"]] * kind["VCpuInfo"]["DefaultVCpus"]
                     for page in kinds for kind in page["InstanceTypes"]))


def _spot_price(ec2: Any, need: Need) -> list[Check]:
    if not need.job.is_spot:
        return []
    machine = need.location.machine_type
    history = ec2.describe_spot_price_history(InstanceTypes=[machine], ProductDescriptions=["Linux/UNIX"],
                                              StartTime=datetime.now(UTC), MaxResults=100)
    prices = {row["AvailabilityZone"]: float(row["SpotPrice"]) for row in history["SpotPriceHistory"]}
    if not prices:
        return [Check("spot price", "warning", f"none for {machine} in {need.region} now", "one",
                      "it may not be sold on spot there: another place.region, or place.spot = false")]
    zone, price = min(prices.items(), key=lambda row: row[1])
    known = need.job.price.usd_per_machine_hour
    found = f"{format_usd(price)} an hour in {zone} now; the catalog says {format_usd(known) if known else 'nothing'}"
    is_near = known is not None and abs(price - known) <= PRICE_MOVED * known
    return [check("spot price", is_near, found, f"within {PRICE_MOVED:.0%} of the catalog",
                  "embark catalog refresh FILE imports today's price; plans and costs use the catalog's",
                  bad="warning")]


def _budgets(client: Any, account: str) -> list[Check]:
    budgets = client.describe_budgets(AccountId=account).get("Budgets", [])
    return [budget_check([(one["BudgetName"], float(one.get("BudgetLimit", {}).get("Amount", 0)),
                           float(one.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0)))
                          for one in budgets], currency="$")]


def _answer(name: str, action: str, question: Callable[[], list[Check]]) -> list[Check]:
    """AWS's answer, or a check that says why there is none."""
    import botocore.exceptions as wrong

    try:
        return question()
    except (wrong.NoCredentialsError, wrong.PartialCredentialsError):
        return [Check(name, "wrong", "no credentials for AWS were found", "credentials", LOGIN)]
    except (wrong.UnauthorizedSSOTokenError, wrong.SSOTokenLoadError, wrong.TokenRetrievalError):
        return [Check(name, "wrong", "the login of the AWS profile has expired", "a valid login", "aws sso login")]
    except (wrong.EndpointConnectionError, wrong.HTTPClientError) as error:
        return [Check(name, "wrong", f"AWS cannot be reached: {to_one_line(error)}", "an answer",
                      "check the network, a proxy, AWS_ENDPOINT_URL, and the spelling of the region")]
    except wrong.ClientError as error:
        code, said = (str(error.response.get("Error", {}).get(key, "")) for key in ("Code", "Message"))
        return [refusal("aws", name, code, said=code, action=action, login=LOGIN) or Check(
            name, "warning", f"AWS refused: {code}: {to_one_line(said)}", "an answer",
            "try again, or look in the console")]
    except (wrong.BotoCoreError, KeyError, ValueError) as error:
        return [Check(name, "warning", f"AWS's answer cannot be read: {to_one_line(error)}", "an answer", "try again")]
