"""Operations of AWS's API that moto lacks or does not check enough; they are answered here before moto sees them."""

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cloudsim.aws.account import AwsAccount
from embark.values import JsonDict

Parameters = JsonDict
Operation = Callable[[AwsAccount, str, Parameters], JsonDict | None]
OPERATIONS: dict[str, Operation] = {}
"""Functions by `service.Operation`; they get the region and the parameters, and None leaves the answer to moto."""


class ApiError(Exception):
    """An error with AWS's own code and message, which the CLI prints."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def operation(name: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS[name] = function
        return function
    return register


def hook(account: AwsAccount, session: Any, denial: Callable[[str], str]) -> None:
    """Let a botocore session ask `OPERATIONS` before it sends a request; `denial` returns why an action is not allowed,
    or an empty text."""

    def keep(params: Parameters, context: JsonDict, **_: Any) -> None:
        context["embark_parameters"] = params

    def answer(model: Any, context: JsonDict, **_: Any) -> tuple[Any, JsonDict] | None:
        service = model.service_model.service_name
        found = OPERATIONS.get(f"{service}.{model.name}")
        try:
            if why := denial(f"{service}:{model.name}"):
                raise ApiError("AccessDeniedException", why)
            if service == "sagemaker" and (why := _shape_error(model.input_shape, context["embark_parameters"])):
                raise ApiError("ValidationException", why)
            if found is None:
                return None
            body = found(account, str(context.get("client_region")), context.get("embark_parameters") or {})
        except ApiError as error:
            about = {"Error": {"Code": error.code, "Message": error.message}}
            return SimpleNamespace(status_code=400, headers={}), {**about, "ResponseMetadata": {"HTTPStatusCode": 400}}
        if body is None:
            return None
        return SimpleNamespace(status_code=200, headers={}), {**body, "ResponseMetadata": {"HTTPStatusCode": 200}}

    session.register("before-parameter-build.*.*", keep)
    session.register("before-call.*.*", answer)


def _shape_error(shape: Any, value: Any, path: str = "") -> str:
    """Return which constraint of AWS's own model a request does not meet, or an empty text."""
    rules, inner = shape.metadata, []
    if shape.type_name == "structure":
        inner = [(shape.members[key], one, key) for key, one in value.items() if key in shape.members]
    elif shape.type_name == "list":
        inner = [(shape.member, one, f"{path}.{number + 1}.member") for number, one in enumerate(value)]
    size = value if isinstance(value, int | float) else len(value)
    what = ""
    if rules.get("enum") and value not in rules["enum"]:
        what = f"enum value set: {json.dumps(rules['enum'])}"
    elif "max" in rules and size > rules["max"]:
        what = f"a value or length less than or equal to {rules['max']}"
    elif "pattern" in rules and not re.fullmatch(rules["pattern"], value):
        what = f"regular expression pattern: {rules['pattern']}"
    if what:
        return f"1 validation error detected: Value '{value}' at '{path}' failed to satisfy constraint: Member must " \
               f"satisfy {what}"
    return next((why for one in inner if (why := _shape_error(*one))), "")
