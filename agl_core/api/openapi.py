"""The OpenAPI 3.1 document, made from the routes and the attrs classes that they name."""

from __future__ import annotations

import collections.abc
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from agl_core import __version__
from agl_core.api.routes import JSON, Answer, Route
from agl_core.api.shapes import ProblemDocument
from agl_core.records import usable_id

_MODEL_PATHS = {
    "/rollout/{rollout_id}/attempt/{attempt_id}/v1/{path}": (
        "Call a model as a rollout's attempt; any path below v1 of the model server's API."
    ),
    "/v1/{path}": "The same, with the rollout taken from the token and its running attempt.",
}
_COMPARISONS = {
    ">=": "minimum",
    ">": "exclusiveMinimum",
    "<=": "maximum",
    "<": "exclusiveMaximum",
}
_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe ``routes`` and the model paths, which are served in front of them."""
    schemas = Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    for path, says in _MODEL_PATHS.items():
        paths[path] = {"post": _model_operation(path, says)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agl-lite",
            "version": __version__,
            "summary": "Capture, store and execution of LLM agents for reinforcement learning.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {
                "Problem": {
                    "description": "An error.",
                    "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
                    "content": {
                        "application/problem+json": {
                            "schema": schemas.of(ProblemDocument, is_request=False)
                        }
                    },
                }
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A role's key, or for agents the rollout's token. "
                    "The headers x-api-key and api-key do as well.",
                }
            },
        },
    }


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.says,
        "parameters": [*_path_parameters(route.path), *_query_parameters(route, schemas)],
        "responses": {
            **_responses(route.answers, schemas),
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    if route.roles is None:
        operation["security"] = []
    else:
        roles = ", ".join(["algorithm", *route.roles])
        operation["security"] = [{"key": []}]
        operation["description"] = f"Roles: {roles}."
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.needs_body,
            "content": {JSON: {"schema": schemas.of(route.body, is_request=True)}},
        }
    return operation


def _model_operation(path: str, says: str) -> dict[str, Any]:
    return {
        "operationId": "post" + re.sub(r"\W+", "_", path).rstrip("_"),
        "summary": says,
        "description": "Roles: agent, algorithm. Errors have the shape that the SDK in use parses.",
        "parameters": _path_parameters(path),
        "requestBody": {"content": {"*/*": {}}},
        "responses": {"default": {"description": "The model server's answer."}},
        "security": [{"key": []}],
    }


def _operation_id(route: Route) -> str:
    return route.method.lower() + re.sub(r"\W+", "_", route.path).rstrip("_")


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(route: Route, schemas: Schemas) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    hints = get_type_hints(route.query)
    for attribute in attrs.fields(route.query):
        schema = schemas.of_attribute(attribute, hints[attribute.name], is_request=True)
        # Absence is how a query says null.
        options = [one for one in schema.pop("anyOf", ()) if one != {"type": "null"}]
        if len(options) == 1:
            schema = {**options[0], **schema}
        elif options:
            schema["anyOf"] = options
        if schema.get("default", 0) is None:
            del schema["default"]
        parameter: dict[str, Any] = {
            "name": attribute.name,
            "in": "query",
            "required": attribute.default is attrs.NOTHING,
            "schema": schema,
        }
        if schema.get("type") == "array":
            parameter |= {"style": "form", "explode": False}
        parameters.append(parameter)
    return parameters


def _responses(answers: Sequence[Answer], schemas: Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for answer in answers:
        response: dict[str, Any] = {
            "description": answer.says,
            "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
        }
        if answer.kind is not None:
            schema = schemas.of(answer.kind, is_request=False)
            response["content"] = {answer.media_type: {"schema": schema}}
        responses[str(answer.status)] = response
    return responses


class Schemas:
    """JSON schemas of types; attrs classes become components that are referred to."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def of(self, hint: Any, *, is_request: bool) -> dict[str, Any]:
        """The schema of a type.

        Args:
            hint: A class, union, literal, tuple or mapping.
            is_request: In requests unknown keys are refused and defaults may be left out; in
                answers every key is there, and newer services may add more.
        """
        if hint in _SIMPLE:
            return dict(_SIMPLE[hint])
        if attrs.has(hint):
            return self._component(hint, is_request)
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Literal:
            return {"enum": list(inner)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(member, is_request=is_request) for member in inner]}
        if origin is tuple:
            return {"type": "array", "items": self.of(inner[0], is_request=is_request)}
        if origin in (dict, collections.abc.Mapping):
            values = self.of(inner[1], is_request=is_request)
            return {"type": "object", "additionalProperties": values or True}
        raise TypeError(f"no schema for {hint!r}")

    def of_attribute(
        self, attribute: attrs.Attribute[Any], hint: Any, *, is_request: bool
    ) -> dict[str, Any]:
        """The schema of one field, with its bounds and in requests its default."""
        schema = self.of(hint, is_request=is_request)
        bounds = dict(_bounds_of(attribute.validator))
        if bounds and "anyOf" in schema:
            schema["anyOf"] = [
                {**one, **bounds} if one != {"type": "null"} else one for one in schema["anyOf"]
            ]
        else:
            schema.update(bounds)
        is_plain = isinstance(attribute.default, str | int | float | bool | type(None))
        if is_request and is_plain:
            schema["default"] = attribute.default
        return schema

    def _component(self, kind: type[Any], is_request: bool) -> dict[str, Any]:
        name = f"{kind.__name__}Request" if is_request else kind.__name__
        if name not in self.components:
            self.components[name] = {}  # a class may refer to itself
            hints = get_type_hints(kind)
            fields = attrs.fields(kind)
            component: dict[str, Any] = {
                "type": "object",
                "description": _first_paragraph(kind),
                "properties": {
                    each.name: self.of_attribute(each, hints[each.name], is_request=is_request)
                    for each in fields
                },
            }
            required = [
                each.name
                for each in fields
                if each.default is attrs.NOTHING
                or (not is_request and not _may_be_absent(kind, each.name))
            ]
            if required:
                component["required"] = required
            if is_request:
                component["additionalProperties"] = False
            self.components[name] = component
        return {"$ref": f"#/components/schemas/{name}"}


def _may_be_absent(kind: type[Any], name: str) -> bool:
    return kind is ProblemDocument and name in ("hint", "details")


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())


def _bounds_of(validator: Any) -> Mapping[str, Any]:
    """What attrs validators say, in JSON Schema's words."""
    if validator is None:
        return {}
    if validator is usable_id:
        return {"minLength": 1, "maxLength": 256}
    bounds: dict[str, Any] = {}
    several = getattr(validator, "_validators", None)  # and_
    if several is not None:
        for one in several:
            bounds |= _bounds_of(one)
        return bounds
    inner = getattr(validator, "validator", None)  # optional
    if inner is not None:
        return _bounds_of(inner)
    if hasattr(validator, "compare_op"):
        bounds[_COMPARISONS[validator.compare_op]] = validator.bound
    if hasattr(validator, "min_length"):
        bounds["minLength"] = validator.min_length
    if hasattr(validator, "max_length"):
        bounds["maxLength"] = validator.max_length
    return bounds
