"""Write the JSON Schema of every file format of emp-llm to docs/schemas, from the declarations that
write and read the files.

    python scripts/write_schemas.py [--check]

--check writes nothing; the exit code is 1 if a schema in docs/schemas differs from its declaration.
"""

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from emp_llm.common.declared import fields_of, has_kinds
from emp_llm.evaluation.results import SuiteFile
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import ActivationsInfo, Corpus, FileRecord
from emp_llm.records.evaluation import Bench
from emp_llm.records.run_report import Manifest, Measure, Results, RunReport, Sweep
from emp_llm.reporting.page import ReportPage
from emp_llm.study.plan import Study

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
# Name of the schema -> declaration, and the file that it describes.
FORMATS: dict[str, tuple[Any, str]] = {
    "run": (RunReport, "emp_report.json"),
    "manifest": (Manifest, "emp_manifest.json"),
    "results": (Results, "the output of emp-llm evaluate"),
    "sweep": (Sweep, "the first line of sweep.jsonl"),
    "measure": (Measure, "the output of emp-llm measure"),
    "bench": (Bench, "the output of emp-llm bench"),
    "report": (ReportPage, "report.json"),
    "study": (Study, "study.yaml"),
    "activations": (ActivationsInfo, "the metadata `emp_llm` of an activations file"),
    "corpus": (Corpus, "a recipe in calibration/, and the [perplexity] table of a suite"),
    "suite": (SuiteFile, "a suite in eval/"),
}
# Fields that are not written there: points of a sweep have lines of their own.
_IN_MEMORY = {"run": ["push"], "sweep": ["points"]}


def tree_schemas(kind: Any) -> dict[str, Any]:
    """The JSON Schemas of a node and of those in it, by class, from the declarations."""
    if has_kinds(kind):
        own = {name: each for name, each in kind.kinds.items() if "emp_llm" in each.__module__}
        properties = {name: _reference(each) for name, each in sorted(own.items())}
        schema = _object(kind, properties) | {"minProperties": 1, "maxProperties": 1}
        found = {kind.__name__: schema}
        for each in own.values():
            found |= tree_schemas(each)
        return found
    found = {}
    properties = {}
    for field in fields_of(kind):
        if field.node is not None:
            reference = _reference(field.node)
            may_be_none = NoneType in field.value.types
            null: list[Any] = [{"type": "null"}]
            properties[field.name] = {"anyOf": [reference, *null]} if may_be_none else reference
            found |= tree_schemas(field.node)
            continue
        annotation = field.value.annotation
        properties[field.name] = {} if annotation is Any else msgspec.json.schema(annotation)
        about = field.value.declared
        limits = {
            "description": about.help or None,
            "minimum": about.minimum,
            "maximum": about.maximum,
            "exclusiveMinimum": about.above,
            "exclusiveMaximum": about.below,
        }
        known = {name: value for name, value in limits.items() if value is not None}
        properties[field.name] |= known
    return {kind.__name__: _object(kind, properties)} | found


def _named(part: dict[str, Any]) -> list[str]:
    """The definitions that a part of a schema refers to."""
    return re.findall(r'"#/\$defs/(\w+)"', json.dumps(part))


def _reference(kind: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _object(kind: Any, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": kind.__name__,
        "description": (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " "),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of a format; its id and title name the version."""
    kind, file = FORMATS[name]
    schema: dict[str, Any] = msgspec.json.schema(kind, schema_hook=lambda _: _reference(Recipe))
    definitions = schema["$defs"]
    if "#/$defs/Recipe" in json.dumps(schema):
        for title, each in tree_schemas(Recipe).items():
            assert title not in definitions, title
            definitions[title] = each
    record = definitions[kind.__name__]
    version = kind.VERSION if issubclass(kind, FileRecord) else 1
    if issubclass(kind, FileRecord):
        record["properties"]["format"] = {"const": f"emp-llm {kind.KIND} {version}"}
        record["required"] = ["format", *record.get("required", [])]
    for field in _IN_MEMORY.get(name, []):
        del record["properties"][field]
    found = {kind.__name__}
    while more := {each for one in found for each in _named(definitions[one])} - found:
        found |= more
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:emp-llm:{name}:{version}",
        "title": f"emp-llm {name}, version {version}: {file}",
        "$ref": schema["$ref"],
        "$defs": {each: definitions[each] for each in sorted(found)},
    }


def schema_text(name: str) -> str:
    """The schema as a file. msgspec before 0.22 has the alternatives of a field in another
    order; here null is the last.
    """

    def ordered(part: dict[str, Any]) -> dict[str, Any]:
        if "anyOf" in part:
            part["anyOf"].sort(key=lambda each: (each.get("type") == "null", json.dumps(each)))
        return part

    return (
        json.dumps(
            json.loads(json.dumps(schema_of(name)), object_hook=ordered), indent=2, allow_nan=False
        )
        + "\n"
    )


def main(line: list[str] | None = None) -> None:
    """Write the schemas, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check: bool = parser.parse_args(line).check
    different = []
    for name in FORMATS:
        path = FOLDER / f"{name}.schema.json"
        if not path.is_file() or path.read_text() != schema_text(name):
            different.append(path.name)
    if check:
        print(
            "\n".join(f"{name}: differs from its declaration" for name in different)
            or "all schemas are up to date"
        )
        sys.exit(1 if different else 0)
    FOLDER.mkdir(exist_ok=True)
    for name in FORMATS:
        (FOLDER / f"{name}.schema.json").write_text(schema_text(name))
    print(f"{len(FORMATS)} schemas in {FOLDER}, {len(different)} changed")


if __name__ == "__main__":
    main()
