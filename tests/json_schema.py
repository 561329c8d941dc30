"""A strict validator for the part of JSON Schema that docs/schemas uses: it refuses keywords that it does not know."""

from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
_ABOUT = {"$schema", "$id", "$defs", "title", "description", "default"}


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    """The places where a JSON value breaks a schema; none if it is valid. A field that is not in the schema is an error."""
    return list(_errors(schema, value, schema.get("$defs", {}), "$"))


def _errors(schema: dict[str, Any], value: Any, definitions: dict[str, Any], place: str) -> list[str]:
    found: list[str] = []
    for keyword, rule in schema.items():
        if keyword in _ABOUT or keyword in ("additionalProperties", "required"):
            continue
        if keyword == "$ref":
            found += _errors(definitions[rule.removeprefix("#/$defs/")], value, definitions, place)
        elif keyword == "anyOf":
            tries = [_errors(each, value, definitions, place) for each in rule]
            found += [] if any(not each for each in tries) else min(tries, key=len)
        elif keyword == "type":
            if not isinstance(value, _TYPES[rule]) or (isinstance(value, bool) and rule in ("integer", "number")):
                return [f"{place}: {rule} expected, {value!r:.40} found"]
        elif keyword == "const":
            found += [] if value == rule else [f"{place}: {value!r:.40} is not {rule!r}"]
        elif keyword == "enum":
            found += [] if value in rule else [f"{place}: {value!r:.40} is none of {rule}"]
        elif keyword in ("minimum", "maximum", "exclusiveMinimum"):
            outside = {"minimum": value < rule, "maximum": value > rule, "exclusiveMinimum": value <= rule}[keyword]
            found += [f"{place}: {value} is outside of its {keyword} {rule}"] if outside else []
        elif keyword in ("minItems", "maxItems"):
            outside = len(value) < rule if keyword == "minItems" else len(value) > rule
            found += [f"{place}: {len(value)} items, {keyword} {rule}"] if outside else []
        elif keyword == "items":
            for number, item in enumerate(value):
                found += _errors(rule, item, definitions, f"{place}[{number}]")
        elif keyword == "properties":
            found += _property_errors(schema, value, definitions, place)
        else:
            raise ValueError(f"{place}: the validator does not know {keyword!r}")
    if "properties" not in schema and isinstance(schema.get("additionalProperties"), dict):
        for name, item in value.items():
            found += _errors(schema["additionalProperties"], item, definitions, f"{place}.{name}")
    return found


def _property_errors(schema: dict[str, Any], value: Any, definitions: dict[str, Any], place: str) -> list[str]:
    found = [f"{place}: {name} is missing" for name in schema.get("required", []) if name not in value]
    for name, item in value.items():
        if name in schema["properties"]:
            found += _errors(schema["properties"][name], item, definitions, f"{place}.{name}")
        else:
            found.append(f"{place}: {name} is not in the schema")
    return found
