"""SageMaker endpoints: what SageMaker refuses, and the server behind one. moto keeps models and configurations."""

import io

from moto.sagemaker.models import FakeEndpointConfig

from cloudsim.aws.account import NUMBER, AwsAccount
from cloudsim.aws.api import ApiError, Parameters, operation
from cloudsim.aws.ec2 import machine_type
from cloudsim.aws.ecr import HOST, EcrRegistry, pull_denial
from cloudsim.aws.iam import bucket_error, role_arn, role_documents
from cloudsim.state import Resource
from embark.rehearse.running_servers import EndpointServer
from embark.render.targets.endpoints import ARTIFACT
from embark.values import JsonDict, JsonMap

ENDPOINT = "SageMaker endpoint"
TAKES_S = 300.0
FakeEndpointConfig.validate_instance_type = lambda *_: None  # moto's list is older than AWS's own.


def refuse(message: str, code: str = "ValidationException") -> ApiError:
    return ApiError(code, message)


@operation("sagemaker.CreateModel")
def create_model(account: AwsAccount, region: str, given: Parameters) -> None:
    image, role = str(given["PrimaryContainer"]["Image"]), str(given["ExecutionRoleArn"])
    found = HOST.match(image)
    if found is None:
        raise refuse(f'Using non-ECR image "{image}" without Vpc repository access mode is not supported.')
    trust = {one.arn: str(one.assume_role_policy_document) for one in account.backends("iam")["aws"].roles.values()}
    if "sagemaker.amazonaws.com" not in trust.get(role, ""):
        raise refuse(f"Could not assume role {role}. Please ensure that the role exists and allows principal "
                     "'sagemaker.amazonaws.com' to assume the role.")
    if found[2] != region or (why := EcrRegistry(account).image_error(image)):
        raise refuse(f"Requested image {image} not found: " + (why if found[2] == region else f"it is not in {region}"))


@operation("sagemaker.CreateEndpointConfig")
def create_endpoint_config(account: AwsAccount, region: str, given: Parameters) -> None:
    for variant in given["ProductionVariants"]:
        if variant["ModelName"] not in account.backends("sagemaker")[region]._models:
            raise refuse(f'Could not find model "arn:aws:sagemaker:{region}:{NUMBER}:model/{variant["ModelName"]}".')
        kind = variant["InstanceType"]
        if "VolumeSizeInGB" in variant and (machine_type(kind[3:]) or {}).get("InstanceStorageSupported"):
            raise refuse(f"VolumeSizeInGB parameter is not allowed for the selected Instance type {kind}.")


@operation("sagemaker.CreateEndpoint")
def create_endpoint(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    name, moto = given["EndpointName"], account.backends("sagemaker")[region]
    if name in moto.endpoints:
        raise refuse(f'Cannot create already existing endpoint "{moto.endpoints[name].arn}".')
    server = _start(account, region, given)
    made = moto.create_endpoint(name, given["EndpointConfigName"], [])
    if isinstance(server, str):
        made.endpoint_status, made.failure_reason = "Failed", server
    account.resources.add(ENDPOINT, f"{region}/{name}", takes_s=TAKES_S, is_paid=made.endpoint_status != "Failed",
                          server=server)
    return {"EndpointArn": made.arn}


@operation("sagemaker.UpdateEndpoint")
def update_endpoint(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    """Replace the machines of an endpoint. If the new ones do not answer, the old ones stay."""
    found, moto = _find(account, region, given), account.backends("sagemaker")[region]
    endpoint, server = moto.endpoints[given["EndpointName"]], _start(account, region, given)
    if isinstance(server, str):
        endpoint.failure_reason = server
    else:
        found.attributes["server"].close()
        endpoint.endpoint_config_name, endpoint.failure_reason = given["EndpointConfigName"], None
        found.attributes["server"] = server
    found.ready_at = account.clock.now + TAKES_S
    return {"EndpointArn": endpoint.arn}


@operation("sagemaker.DescribeEndpoint")
def describe_endpoint(account: AwsAccount, region: str, given: Parameters) -> JsonDict | None:
    endpoint = account.backends("sagemaker")[region].endpoints.get(given["EndpointName"])
    if endpoint is None or account.resources.is_ready(_find(account, region, given)):
        return None
    return {**endpoint.response_object, "EndpointStatus": "Creating"}


@operation("sagemaker.DeleteEndpoint")
def delete_endpoint(account: AwsAccount, region: str, given: Parameters) -> None:
    found = _find(account, region, given)
    if isinstance(found.attributes["server"], EndpointServer):
        found.attributes["server"].close()
    account.resources.remove(*found.key)


@operation("application-autoscaling.RegisterScalableTarget")
def register_target(account: AwsAccount, region: str, given: Parameters) -> None:
    _, name, *_ = given["ResourceId"].split("/")
    if given["ServiceNamespace"] == "sagemaker" and not account.resources.is_ready(
            _find(account, region, {"EndpointName": name})):
        raise refuse(f"The endpoint {name} is not in service.")


@operation("sagemaker-runtime.InvokeEndpoint")
def invoke_endpoint(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    found = _find(account, region, given)
    if isinstance(found.attributes["server"], str) or not account.resources.is_ready(found):
        raise refuse(f"Endpoint {given['EndpointName']} of account {NUMBER} is not in service.", "ValidationError")
    status, text = found.attributes["server"].ask("/invocations", given["Body"])
    if status != 200:
        raise refuse(f'Received client error ({status}) from primary with message "{text}".', "ModelError")
    return {"Body": io.BytesIO(text.encode()), "ContentType": "application/json", "InvokedProductionVariant": "all"}


def _find(account: AwsAccount, region: str, given: JsonMap) -> Resource:
    found = account.resources.find(ENDPOINT, f"{region}/{given['EndpointName']}")
    if found is None:
        raise refuse(f'Could not find endpoint "arn:aws:sagemaker:{region}:{NUMBER}:endpoint/{given["EndpointName"]}".')
    return found


def _start(account: AwsAccount, region: str, given: Parameters) -> EndpointServer | str:
    """Start the server of a configuration, or return the reason that SageMaker gives for its failure."""
    moto = account.backends("sagemaker")[region]
    if given["EndpointConfigName"] not in moto.endpoint_configs:
        raise refuse(f"Could not find endpoint configuration \"arn:aws:sagemaker:{region}:{NUMBER}:endpoint-config/"
                     f"{given['EndpointConfigName']}\".")
    variant = moto.endpoint_configs[given["EndpointConfigName"]].production_variants[0]
    limit = f"{variant['InstanceType']} for endpoint usage"
    if variant["InitialInstanceCount"] > account.quotas.get(limit, 1e6):
        raise refuse(f"The account-level service limit '{limit}' is {account.quotas[limit]:g} Instances, with current "
                     f"utilization of 0 Instances and a request delta of {variant['InitialInstanceCount']} Instances. "
                     "Please use AWS Service Quotas to request an increase for this quota.", "ResourceLimitExceeded")
    model = moto._models[variant["ModelName"]]
    image, env, arn = model.primary_container["Image"], model.primary_container["Environment"], model.execution_role_arn
    documents, who = role_documents(account, arn.rpartition("/")[2]), role_arn(arn.rpartition("/")[2], "SageMaker")
    if why := pull_denial(documents, who):
        return f"The role '{arn}' does not have BatchGetImage permission for the image: '{image}'. {why}"
    server = account.make_server(given["EndpointConfigName"])
    why = bucket_error(account, env.get(ARTIFACT, ""), documents, who, write=False) or server.start(
        env, port="8080", probe="/ping", disk_gib=variant.get("VolumeSizeInGB", 30))
    return f"The primary container for production variant {variant['VariantName']} did not pass the ping health " \
           f"check. Please check CloudWatch logs for this endpoint. {why}" if why else server
