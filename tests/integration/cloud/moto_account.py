"""moto's server, with quotas of EC2 besides those of VPC, which are all that it has itself. A program of its own."""

from __future__ import annotations

import json
import sys

from moto.server import main
from moto.servicequotas.exceptions import NoSuchResource
from moto.servicequotas.models import ServiceQuotasBackend
from moto.servicequotas.responses import ServiceQuotasResponse

APPLIED = {"L-417A185B": 384.0, "L-3819A6DF": 64.0}
"""P machines on demand, and G machines on spot: raised once for this account."""
DEFAULTS = {"L-DB2E81BA": 96.0}
"""G machines on demand: never changed, so that only AWS's default is known."""


def quota(values: dict[str, float], code: str) -> dict[str, object]:
    if code not in values:
        raise NoSuchResource
    return {"ServiceCode": "ec2", "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)", "QuotaCode": code,
            "Value": values[code], "Unit": "None", "Adjustable": True, "GlobalQuota": False}


def get_service_quota(self: ServiceQuotasBackend, service_code: str, quota_code: str) -> dict[str, object]:
    return quota(APPLIED, quota_code)


def get_aws_default_service_quota(self: ServiceQuotasResponse) -> str:
    return json.dumps({"Quota": quota(DEFAULTS, json.loads(self.body)["QuotaCode"])})


if __name__ == "__main__":
    ServiceQuotasBackend.get_service_quota = get_service_quota
    ServiceQuotasResponse.get_aws_default_service_quota = get_aws_default_service_quota
    main(sys.argv[1:])
