"""Checks whether the cloud account can start a run's machines: identity, quotas, machines on sale, budgets, bucket.

Each cloud answers by its own command line; every failure becomes a check with its fix.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from embark.catalog import Catalog, load_catalog, machine_of_place
from embark.catalog.machine import WARNING_DAYS
from embark.errors import EmbarkError, UserError
from embark.formatting import format_usd, to_one_line
from embark.launch.backend import LaunchRequest
from embark.launch.backends.slurm import Slurm
from embark.launch.shell import Shell
from embark.render.job import Job, Location
from embark.render.monitoring import CloudQuota, cloud_quotas, needed_units, quota_name, quota_of
from embark.spec import RunSpec
from embark.store import BRIEF_RETRY, open_store
from embark.values import JsonDict, frozen, read_table
from .host import Check, Checks, check

CLOUDS: JsonDict = read_table(__file__, "account_clouds.toml")
"""The command line of each cloud, what it is asked, and what its errors mean."""
PRICE_MOVED = 0.25  # A spot price that differs this much from the catalog's is worth a warning.


@frozen
class Need:
    """The machines of a run, where they are, and how much of which quota they take."""

    job: Job
    location: Location
    catalog: Catalog

    @property
    def region(self) -> str:
        return self.location.region

    @property
    def num_units(self) -> int:
        """The amount of the quota that the run takes."""
        return needed_units(self.job)

    @property
    def unit(self) -> str:
        quota = quota_of(self.job)
        return f"{quota.unit}s" if quota else "units"

    @property
    def quota(self) -> tuple[str, str]:
        """The cloud's name for the quota, and its code; empty if the catalog does not know."""
        return quota_name(self.job)

    @property
    def market(self) -> str:
        return "on spot" if self.job.is_spot else "on demand"

    def __str__(self) -> str:
        return f"{self.job.num_nodes} x {self.job.machine.name} {self.market} in {self.region}"

    def quota_check(self, name: str, limit: float, used: float | None, fix: str) -> Check:
        """Check that enough of a quota is left. A limit of -1 is none; what is in use may be unknown."""
        in_use = "" if used is None else f", {used:g} in use"
        found = f"{limit:g} {self.unit}{in_use}; the run takes {self.num_units:g}"
        is_enough = limit < 0 or limit - (used or 0.0) >= self.num_units
        return check(f"quota {name}", is_enough, found, f"{self.num_units:g} {self.unit} free", fix)

    def offer_check(self, zones: Sequence[str]) -> Check:
        """Check that the machine is on sale in the region, and in the zone that the spec names."""
        machine, zone = self.location.machine_type, self.job.spec.place.zone
        if not zones:
            return self.not_offered(f"no {machine} in {self.region}")
        return check("machine offered", not zone or zone in zones, f"{machine} in {', '.join(zones)}",
                     f"in {zone or self.region}", f"set place.zone to one of {', '.join(zones)}")

    def cluster_check(self, product: str, version: str | None) -> Check:
        """Check that the version of the cluster is supported for some time; without one there is no cluster yet."""
        if version is None:
            return Check("cluster", "ok", "not created yet")
        support = self.catalog.support.get(f"{product}-{version[:4]}")
        notice = support.notice(datetime.now(UTC).date()) if support else ""
        return check("cluster", not notice, notice or f"Kubernetes {version}", f"supported for {WARNING_DAYS} days",
                     "upgrade it, or destroy it and start again: data and checkpoints are in the bucket", bad="warning")

    def not_offered(self, found: str, fix: str = "") -> Check:
        regions = [price.region for price in self.catalog.prices_of(self.job.machine) if price.region != self.region]
        return Check("machine offered", "wrong", found, f"{self.location.machine_type} in {self.region}",
                     f"{fix}another place.region: {', '.join(regions[:8]) or 'the catalog knows none'}")


def need_of(spec: RunSpec) -> Need:
    """Return the number of machines, their location and the quota that the spec's run needs."""
    place = spec.place
    catalog = load_catalog()
    machine = machine_of_place(catalog, place)
    if machine is None:
        raise UserError("which account? neither place.machine nor place.cloud is set",
                        "embark doctor --cloud --machine p5.48xlarge, or a spec that names one")
    # Not by make_job: the account is checked even where the run could not be rendered yet.
    job = Job.of(spec, machine)
    return Need(job, job.location, catalog)


def check_account(need: Need, shell: Shell) -> Checks:
    """Yield each check as soon as it is known. The only change is one small file in the bucket, deleted at once."""
    checks = _ask_all(CloudCli(need, shell), need)
    first = next(checks)
    yield first
    if first.verdict == "ok":  # without an identity nothing else can be asked
        yield from checks
        if (bucket := bucket_check(need.job.spec)) is not None:
            yield bucket


def check_slurm(spec: RunSpec, shell: Shell) -> Checks:
    """Ask Slurm whether it would start the run: the partition, the account, so many nodes with so many GPUs."""
    backend, expected = Slurm(shell, notify=lambda _: None), "a job that sbatch --test-only accepts"
    try:
        found = backend.check_cluster(LaunchRequest(spec, backend.handle_of(spec)))
    except EmbarkError as error:
        yield Check("Slurm", "wrong", error.what, expected, error.fix)
        return
    yield Check("Slurm", "ok", found, expected)


def _ask_all(cli: CloudCli, need: Need) -> Checks:
    for question in QUESTIONS[need.job.cloud]:
        try:
            yield from question(cli, need)
        except CheckFailed as failed:
            yield failed.check


def budget_check(budgets: Sequence[tuple[str, float, float]], currency: str = "") -> Check:
    """Check that there is a budget, and money left in all. `budgets`: name, limit and spent; 0 and 0 if not known."""
    if not budgets:
        return Check("budgets", "warning", "none: nobody is alerted when money is spent", "at least one",
                     "EMAIL=you@example.com ./budget.sh budget, in the folder that embark render writes")
    found = "; ".join(f"{name}: {currency}{spent:,.0f} of {currency}{limit:,.0f}" if limit else name
                      for name, limit, spent in budgets)
    is_left = not any(limit and spent >= limit for _, limit, spent in budgets)
    return check("budgets", is_left, found, "money left in all",
                 "an alert stops nothing: look at the bill", bad="warning")


def bucket_check(spec: RunSpec) -> Check | None:
    """Write, read back and delete a small file where the run writes its checkpoints. None without a bucket."""
    root = spec.store.root
    if root.partition("://")[0] not in ("s3", "gs", "az"):
        return None
    try:
        store = open_store(root, BRIEF_RETRY)
        store.list("embark-doctor-looks-for-nothing")
        store.check()
    except EmbarkError as error:
        return Check("bucket", "wrong", error.what, f"{root} can be listed, written, read and deleted in", error.fix)
    return Check("bucket", "ok", f"{root}: a small file was written, read back and deleted")


class CheckFailed(Exception):
    """The command line gave no answer; `check` says why."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.found)
        self.check = check


class CloudCli:
    """A cloud's command line: `aws`, `az` or `gcloud`."""

    def __init__(self, need: Need, shell: Shell) -> None:
        self._need, self._shell = need, shell
        self._about: JsonDict = CLOUDS[need.job.cloud]
        self._program: str = self._about["program"]
        self.flags: list[str] = [*self._about["flags"]]  # Appended to every command.
        self.account = ""  # AWS's account or Google's project, once the identity is checked.

    def ask(self, question: str, *more: str, **values: object) -> Any:
        """Return the answer's JSON; None if the error has the question's text `missing`. Any other error fails its
        check. `more`: further words of the command."""
        asked = self._about["questions"][question]
        name, missing = asked["check"], asked.get("missing")
        if shutil.which(self._program) is None:
            found = f"{self._program}, {self._about['title']}'s command line, is not installed"
            raise CheckFailed(Check(name, "wrong", found, f"{self._program} on the path", self._about["install"]))
        words = [word.format(need=self._need, account=self.account, **values) for word in shlex.split(asked["command"])]
        done = self._shell.ask([self._program, *words, *more, *self.flags], timeout_s=120)
        if done.has_timed_out:
            raise CheckFailed(Check(name, "wrong", f"{self._program} did not answer in time", "an answer",
                                    "check the network, or a proxy"))
        if not done.is_ok:
            said = to_one_line(done.err)
            if missing and missing in said:
                return None
            raise CheckFailed(self._refusal(name, said) or Check(
                name, "warning", f"{self._program} refused: {said[:240]}", "an answer",
                "ask again, or look in the console"))
        try:
            return json.loads(done.out or "[]")
        except ValueError:
            found = f"{self._program} did not print JSON: {to_one_line(done.out)[:100]}"
            raise CheckFailed(Check(name, "warning", found, "JSON", self._about["upgrade"])) from None

    def _refusal(self, name: str, error: str) -> Check | None:
        """Return the check that explains an error of the cloud; None if the error is not known."""
        values = {"said": error[:160], "action": self._about.get("actions", {}).get(name, "")}
        for one in self._about["refusals"]:
            if any(text in error for text in one["texts"]):
                return Check(name, one["verdict"], *(one[key].format(**values) for key in ("found", "expected", "fix")))
        return None


def _azure_identity(az: CloudCli, need: Need) -> Checks:
    account = az.ask("account")
    wanted = need.job.spec.place.account
    found = f"{account.get('name')} ({account.get('id')}) as {account.get('user', {}).get('name')}"
    if account.get("state", "Enabled") != "Enabled":
        yield Check("account", "wrong", f"{found}: {account['state']}", "Enabled",
                    "ask the subscription's owner to enable it")
        return
    yield check("account", not wanted or wanted in (account.get("id"), account.get("name")), found,
                f"subscription {wanted}" if wanted else "", f"az account set --subscription {wanted}")


def _azure_quotas(az: CloudCli, need: Need) -> Checks:
    """Spot counts towards one number for all families; on demand towards the family's and the region's."""
    usage = az.ask("usage")
    # Names have spaces in some families and none in others, and not the same everywhere.
    rows = {_plain(name): row for row in usage for name in (row.get("localName", ""), row["name"]["value"])}
    name, code = need.quota
    fix = (f"az quota update, or https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade: {name} in "
           f"{need.region}; it may take days")
    for key, label in ((code, name), ("cores", "Total Regional vCPUs"))[: 1 if need.job.is_spot else 2]:
        row = rows.get(_plain(key)) or rows.get(_plain(label))
        if row is None:
            yield Check(f"quota {label or need.job.machine.name}", "warning",
                        f"{key or 'its name'} is not among the quotas of {need.region}", "a quota of that name",
                        "az vm list-usage lists them; a machine that is not sold there has none")
        else:
            yield need.quota_check(label, float(row["limit"]), float(row["currentValue"]), fix)


def _plain(name: str) -> str:
    return name.replace(" ", "").lower()


def _azure_offer(az: CloudCli, need: Need) -> Checks:
    machine = need.location.machine_type
    skus = az.ask("offer")
    rows = [row for row in skus if row.get("name") == machine]
    barred = [limit for row in rows[:1] for limit in row.get("restrictions", []) if limit.get("type") == "Location"]
    if not rows:
        yield need.not_offered(f"no {machine} in {need.region}")
    elif barred:
        yield need.not_offered(f"{machine} in {need.region}: {barred[0].get('reasonCode')}",
                               "request access in the portal (a support request for the family and the region), or ")
    else:
        zones = sorted({zone for info in rows[0].get("locationInfo", []) for zone in info.get("zones") or []})
        yield Check("machine offered", "ok", f"{machine} in {need.region}"
                    + (f", zones {', '.join(zones)}" if zones else ""))


def _azure_cluster(az: CloudCli, need: Need) -> Checks:
    yield need.cluster_check("aks", az.ask("cluster"))


def _azure_budgets(az: CloudCli, _: Need) -> Checks:
    budgets = az.ask("budgets")
    yield budget_check([(str(one.get("name")), float(one.get("amount") or 0),
                         float((one.get("currentSpend") or {}).get("amount") or 0)) for one in budgets])


def _gcp_identity(gcloud: CloudCli, need: Need) -> Checks:
    accounts = gcloud.ask("account")
    if not accounts:
        raise CheckFailed(Check("account", "wrong", "not logged in to Google Cloud", "a login", "gcloud auth login"))
    account, project = str(accounts[0].get("account")), need.job.spec.place.account
    if not project:
        config = gcloud.ask("project") or {}
        project = str(config.get("core", {}).get("project", ""))
    if not project:
        raise CheckFailed(Check("account", "wrong", f"{account}, and no project", "a project that pays",
                                "set place.account, or gcloud config set project ID"))
    gcloud.account = project
    gcloud.flags.append(f"--project={project}")
    yield Check("account", "ok", f"project {project} as {account}")


def _gcp_quotas(gcloud: CloudCli, need: Need) -> Checks:
    """Yield quotas of Compute Engine in the region, or of Cloud Quotas, which has what `gcloud compute` does not
    show."""
    name, _ = need.quota
    quotas = list(cloud_quotas(need.job))
    for quota in quotas:
        infos = gcloud.ask("cloud_quota", quota=quota)
        location = need.location.zone if quota.is_zonal else need.region
        limit = _cloud_quota_limit(infos, quota, location)
        fix = (f"https://console.cloud.google.com/iam-admin/quotas?project={gcloud.account}: ask for "
               f"{need.num_units} of {quota.name} in {location}; it may take days")
        if limit is None:
            yield Check(f"quota {quota.name}", "warning", f"no such quota is listed for {location}",
                        f"{need.num_units} {need.unit} free", fix)
        else:
            yield need.quota_check(quota.name, limit, None, fix)
    if quotas:
        return
    region = gcloud.ask("region")
    rows = {row["metric"]: row for row in region.get("quotas", [])}
    if name in rows:
        yield _gcp_quota(rows[name], need, f"in {need.region}", gcloud.account)
    else:
        yield Check(f"quota {name or need.job.machine.name}", "warning",
                    f"gcloud compute does not list it in {need.region}", f"{need.num_units} {need.unit} free",
                    f"https://console.cloud.google.com/iam-admin/quotas?project={gcloud.account}")


def _cloud_quota_limit(infos: Sequence[JsonDict], quota: CloudQuota, location: str) -> float | None:
    """Return the limit of a quota. A limit for its own dimension value takes precedence over a general one; no value
    means 0."""
    found: dict[str, float] = {}
    for row in (row for info in infos for row in info.get("dimensionsInfos", [])):
        if location in row.get("applicableLocations", []):
            value = row.get("dimensions", {}).get(quota.dimension, "")
            found[value] = float(row.get("details", {}).get("value") or 0)
    return found.get(quota.value, found.get(""))


def _gcp_global_quotas(gcloud: CloudCli, need: Need) -> Checks:
    info = gcloud.ask("all_regions")
    rows = {row["metric"]: row for row in info.get("quotas", [])}
    for name in quota.also if (quota := quota_of(need.job)) else ():
        if name in rows:
            yield _gcp_quota(rows[name], need, "in all regions", gcloud.account)


def _gcp_quota(row: JsonDict, need: Need, where: str, project: str) -> Check:
    limit, used = float(row["limit"]), float(row["usage"])
    return need.quota_check(row["metric"], limit, used,
                            f"https://console.cloud.google.com/iam-admin/quotas?project={project}: ask for "
                            f"{used + need.num_units:g} of {row['metric']} {where}; it may take days")


def _gcp_offer(gcloud: CloudCli, need: Need) -> Checks:
    if not need.job.machine.machine_type:  # The first TPUs are no machines of Compute Engine.
        name, zone = need.job.machine.name, need.location.zone
        rows = gcloud.ask("first_tpus")
        yield need.offer_check([zone] if any(row.get("type") == name for row in rows) else [])
        return
    yield need.offer_check(sorted(str(row.get("zone", "")).rsplit("/", 1)[-1] for row in gcloud.ask("offer")))


def _gcp_billing(gcloud: CloudCli, _: Need) -> Checks:
    billing = gcloud.ask("billing")
    if not billing.get("billingEnabled"):
        yield Check("billing", "wrong", f"project {gcloud.account} has no billing account", "one that pays",
                    f"gcloud billing projects link {gcloud.account} --billing-account=ID")
        return
    account = str(billing.get("billingAccountName", "")).rsplit("/", 1)[-1]
    budgets = gcloud.ask("budgets", f"--billing-account={account}")
    yield budget_check([(str(budget.get("displayName", "")), 0.0, 0.0) for budget in budgets])


def _aws_identity(aws: CloudCli, need: Need) -> Checks:
    aws.flags += ["--region", need.region]
    identity = aws.ask("account")
    aws.account = str(identity["Account"])
    wanted = need.job.spec.place.account
    yield check("account", wanted in ("", aws.account), f"{aws.account} as {identity['Arn']}",
                f"account {wanted}" if wanted else "", "AWS_PROFILE chooses another; or correct place.account")


def _aws_offer(aws: CloudCli, need: Need) -> Checks:
    yield need.offer_check(sorted({row["Location"] for row in aws.ask("offer")["InstanceTypeOfferings"]}))


def _aws_quotas(aws: CloudCli, need: Need) -> Checks:
    name, code = need.quota
    if not code:
        yield Check("quota", "warning", f"the quota for {need.job.machine.name} {need.market} is not known",
                    fix=f"https://{need.region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas")
        return
    answer = aws.ask("quota", code) or aws.ask("default_quota", code)
    used = _vcpus_in_use(aws, need, families_of(name))
    fix = (f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
           f"--desired-value {used + need.num_units:g} --region {need.region}: it may take days")
    yield need.quota_check(name, float(answer["Quota"]["Value"]), used, fix)


def _vcpus_in_use(aws: CloudCli, need: Need, families: tuple[str, ...]) -> float:
    answer = aws.ask("running")
    instances = [one for reservation in answer["Reservations"] for one in reservation["Instances"]]
    running = Counter(one["InstanceType"] for one in instances if counts_to(one["InstanceType"], families)
                      and (one.get("InstanceLifecycle") == "spot") == need.job.is_spot)
    if not running:
        return 0.0
    # A machine counts with all its processors, however many it was started with.
    kinds = aws.ask("kinds", *running)
    return float(sum(running[kind["InstanceType"]] * kind["VCpuInfo"]["DefaultVCpus"]
                     for kind in kinds["InstanceTypes"]))


def families_of(quota_name: str) -> tuple[str, ...]:
    """`p4 p3 p2` of `All P4, P3 and P2 Spot Instance Requests`, `g vt` of `Running On-Demand G and VT instances`."""
    middle = re.sub(r"^(Running On-Demand|All)|(Spot Instance Requests|instances)$", "", quota_name)
    return tuple(word.lower() for word in re.findall(r"\b[A-Z]+\d*\b", middle))


def counts_to(instance_type: str, families: tuple[str, ...]) -> bool:
    """Return whether a machine counts towards a quota of these families: `p5en.48xlarge` to `p5` and `p`, and not to
    `g`."""
    letters = re.match(r"[a-z]+", instance_type)
    family = instance_type.partition(".")[0]
    return any(family.startswith(one) if one[-1].isdigit() else letters is not None and letters.group() == one
               for one in families)


def _aws_cluster(aws: CloudCli, need: Need) -> Checks:
    yield need.cluster_check("eks", aws.ask("cluster"))


def _aws_spot_price(aws: CloudCli, need: Need) -> Checks:
    if not need.job.is_spot:
        return
    machine = need.location.machine_type
    answer = aws.ask("spot_price", datetime.now(UTC).isoformat())
    prices = {row["AvailabilityZone"]: float(row["SpotPrice"]) for row in answer["SpotPriceHistory"]}
    if not prices:
        yield Check("spot price", "warning", f"none for {machine} in {need.region} now", "one",
                    "it may not be sold on spot there: another place.region, or place.spot = false")
        return
    zone, price = min(prices.items(), key=lambda row: row[1])
    known = need.job.price.usd_per_machine_hour
    found = f"{format_usd(price)} an hour in {zone} now; the catalog says {format_usd(known) if known else 'nothing'}"
    is_near = known is not None and abs(price - known) <= PRICE_MOVED * known
    yield check("spot price", is_near, found, f"within {PRICE_MOVED:.0%} of the catalog",
                "embark catalog refresh FILE imports today's price; plans and costs use the catalog's", bad="warning")


def _aws_budgets(aws: CloudCli, _: Need) -> Checks:
    answer = aws.ask("budgets")
    yield budget_check([(one["BudgetName"], float(one.get("BudgetLimit", {}).get("Amount", 0)),
                         float(one.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0)))
                        for one in answer.get("Budgets", ())], currency="$")


Question = Callable[[CloudCli, Need], Checks]
QUESTIONS: dict[str, tuple[Question, ...]] = {
    "aws": (_aws_identity, _aws_offer, _aws_quotas, _aws_cluster, _aws_spot_price, _aws_budgets),
    "azure": (_azure_identity, _azure_quotas, _azure_offer, _azure_cluster, _azure_budgets),
    "gcp": (_gcp_identity, _gcp_quotas, _gcp_global_quotas, _gcp_offer, _gcp_billing)
}
