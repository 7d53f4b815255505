"""The part of the SARIF 2.1.0 schema that the scanner's logs use, and a checker for it.

Every object of the official schema is closed (additionalProperties: false), so that this subset, which names
fewer properties, refuses more than the official one.
Source: OASIS, sarif-schema-2.1.0.json.
"""

from __future__ import annotations

import re
from typing import Any

MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
ARTIFACT = {"type": "object", "properties": {"uri": {"type": "string", "format": "uri-reference"}}}
REGION = {
    "type": "object",
    "properties": {
        "startLine": {"type": "integer", "minimum": 1},
        "startColumn": {"type": "integer", "minimum": 1},
        "endLine": {"type": "integer", "minimum": 1},
        "endColumn": {"type": "integer", "minimum": 1},
        "byteOffset": {"type": "integer", "minimum": -1},
        "byteLength": {"type": "integer", "minimum": 0},
    },
}
LOCATION = {
    "type": "object",
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation"],
            "properties": {"artifactLocation": ARTIFACT, "region": REGION},
        }
    },
}
LEVEL = {"type": "string", "enum": ["none", "note", "warning", "error"]}
SEMVER = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
RULE = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string"},
        "shortDescription": MESSAGE,
        "fullDescription": MESSAGE,
        "defaultConfiguration": {"type": "object", "properties": {"level": LEVEL}},
    },
}
REPLACEMENT = {
    "type": "object",
    "required": ["deletedRegion"],
    "properties": {
        "deletedRegion": REGION,
        "insertedContent": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
FIX = {
    "type": "object",
    "required": ["artifactChanges"],
    "properties": {
        "description": MESSAGE,
        "artifactChanges": {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": {
                "type": "object",
                "required": ["artifactLocation", "replacements"],
                "properties": {
                    "artifactLocation": ARTIFACT,
                    "replacements": {"type": "array", "minItems": 1, "items": REPLACEMENT},
                },
            },
        },
    },
}
RESULT = {
    "type": "object",
    "required": ["message"],
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": -1},
        "level": LEVEL,
        "message": MESSAGE,
        "locations": {"type": "array", "items": LOCATION},
        "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
        "fixes": {"type": "array", "uniqueItems": True, "items": FIX},
    },
}
NOTIFICATION = {
    "type": "object",
    "required": ["message"],
    "properties": {
        "level": LEVEL,
        "message": MESSAGE,
        "locations": {"type": "array", "uniqueItems": True, "items": LOCATION},
    },
}
INVOCATION = {
    "type": "object",
    "required": ["executionSuccessful"],
    "properties": {
        "executionSuccessful": {"type": "boolean"},
        "toolExecutionNotifications": {"type": "array", "items": NOTIFICATION},
    },
}
DRIVER = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "semanticVersion": {"type": "string", "pattern": SEMVER},
        "rules": {"type": "array", "uniqueItems": True, "items": RULE},
    },
}
RUN = {
    "type": "object",
    "required": ["tool"],
    "properties": {
        "tool": {"type": "object", "required": ["driver"], "properties": {"driver": DRIVER}},
        "invocations": {"type": "array", "items": INVOCATION},
        "columnKind": {"type": "string", "enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        "results": {"type": "array", "items": RESULT},
    },
}
LOG = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "format": "uri-reference"},
        "version": {"type": "string", "enum": ["2.1.0"]},
        "runs": {"type": "array", "items": RUN},
    },
}
_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_URI = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")


def violations(value: Any, schema: dict[str, Any] = LOG, place: str = "log") -> list[str]:
    """Return everything in which the value breaks the schema."""
    kind = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{place}: not of type {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        found.append(f"{place}: {value!r} does not match")
    if schema.get("format") == "uri-reference" and not _URI.fullmatch(value):
        found.append(f"{place}: {value!r} is no URI reference")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place}: {value} is below {schema['minimum']}")
    if isinstance(value, dict):
        found += [f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if known is None:
                found.append(f"{place}: {name} is not allowed")
            else:
                found += violations(item, known, f"{place}.{name}")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{place}: too short")
        if schema.get("uniqueItems") and any(item in value[:index] for index, item in enumerate(value)):
            found.append(f"{place}: items repeat")
        for index, item in enumerate(value):
            found += violations(item, schema["items"], f"{place}[{index}]")
    return found
