"""Evaluates the policies of roles, including Amazon's own."""

import json
from functools import cache

from cloudsim.aws.account import NUMBER, AwsAccount
from cloudsim.aws.api import ApiError, Parameters, operation
from embark.values import JsonDict, JsonMap

POLICY_VERSIONS = ("2012-10-17", "2008-10-17")
ARN_PARTS = 6
ACTIONS = {False: ("s3:ListBucket", "s3:GetObject"), True: ("s3:ListBucket", "s3:GetObject", "s3:PutObject")}


@operation("iam.AttachRolePolicy")
def attach_role_policy(account: AwsAccount, region: str, given: Parameters) -> None:
    """Give moto the one policy of Amazon's that is named: to load all of them takes seconds."""
    arn = given["PolicyArn"]
    if arn.startswith("arn:aws:iam::aws:policy/"):
        add_amazon_policy(account, arn)


def add_amazon_policy(account: AwsAccount, arn: str) -> None:
    from moto.iam.models import AWSManagedPolicy

    known = account.backends("iam")["aws"].managed_policies
    if arn in known:
        return
    name = arn.rpartition("/")[2]
    data = _amazon_policies().get(name)
    found = None if data is None else AWSManagedPolicy.from_data(name, NUMBER, "us-east-1", data)
    if found is None or found.arn != arn:
        raise ApiError("NoSuchEntity", f"Policy {arn} does not exist or is not attachable.")
    known[arn] = found


def policy_error(policy: JsonMap) -> str:
    """Return why IAM refuses a policy, or an empty text."""
    if str(policy.get("Version", POLICY_VERSIONS[0])) not in POLICY_VERSIONS:
        return "Policy document must be version 2012-10-17 or greater."
    statements = policy.get("Statement") or []
    for one in statements if isinstance(statements, list) else [statements]:
        if one.get("Effect") not in ("Allow", "Deny"):
            return f"Invalid effect: {one.get('Effect')}"
        actions, resources = ([value] if isinstance(value := one.get(name) or [], str) else value
                              for name in ("Action", "Resource"))
        for action in actions:
            if action != "*" and ":" not in action:
                return f"Actions/Conditions must be prefaced by a vendor, e.g., iam, sdb, ec2, etc. ({action})"
        for resource in resources:
            if resource != "*" and len(resource.split(":")) < ARN_PARTS:
                return f'Resource {resource} must be in ARN format or "*".'
        if not actions or not resources:
            return f"Policy statement must contain {'resources' if actions else 'actions'}."
    return ""


def role_documents(account: AwsAccount, role: str) -> list[str]:
    """Return the policies of a role as JSON texts."""
    found = next((one for one in account.backends("iam")["aws"].roles.values() if one.name == role), None)
    if found is None:
        return []
    inline = [one if isinstance(one, str) else json.dumps(one) for one in found.policies.values()]
    managed = [version.document for policy in found.managed_policies.values() for version in policy.versions
               if version.is_default]
    return [*inline, *managed]


def denial(documents: list[str], who: str, action: str, resource: str) -> str:
    """Return the sentence of S3 or ECR if no policy allows an action, else an empty text."""
    from moto.iam.access_control import IAMPolicy, PermissionResult

    results = [IAMPolicy(document).is_action_permitted(action, resource) for document in documents]
    if PermissionResult.DENIED in results or PermissionResult.PERMITTED not in results:
        return (f"User: {who} is not authorized to perform: {action} on resource: {resource} because no "
                f"identity-based policy allows the {action} action")
    return ""


def role_arn(role: str, session: str) -> str:
    return f"arn:aws:sts::{NUMBER}:assumed-role/{role}/{session}"


def bucket_error(account: AwsAccount, uri: str, documents: list[str], who: str, *, write: bool) -> str:
    """Return why policies do not let someone use an address of S3, or an empty text."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://"):
        return f"{uri}: only s3:// is reachable with what AWS gives to a program"
    if bucket not in account.backends("s3")["aws"].buckets:
        return f"NoSuchBucket: The specified bucket does not exist: {bucket}"
    for action in ACTIONS[write]:
        resource = f"arn:aws:s3:::{bucket}" + ("" if action == "s3:ListBucket" else f"/{key.rstrip('/')}/object")
        if why := denial(documents, who, action, resource):
            return f"AccessDenied: {why}"
    return ""


@cache
def _amazon_policies() -> dict[str, JsonDict]:
    from moto.iam.aws_managed_policies import aws_managed_policies_data

    loaded: dict[str, JsonDict] = json.loads(aws_managed_policies_data)
    return loaded
