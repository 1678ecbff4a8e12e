"""The JSON Schema of a plan, from the same type hints that are read and written.

`python -m autopar.plan.schema` rewrites `plan.schema.json`, which ships with the package.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from autopar.plan.codec import Schemas, codec_of
from autopar.plan.plan import PLAN_VERSION, Plan
from autopar.plan.serialize import write_text

SCHEMA_FILE = "plan.schema.json"


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `plan.json`."""
    defs: Schemas = {}
    codec_of(Plan).schema(defs)
    root = defs.pop("Plan")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autopar plan",
        **root,
        "properties": {**root["properties"], "version": {"const": PLAN_VERSION}},
        "required": ["version", *root["required"]],
        "$defs": dict(sorted(defs.items())),
    }


def schema_text() -> str:
    """The bytes of the packaged file, as generated now."""
    return json.dumps(plan_schema(), indent=2) + "\n"


def packaged_schema() -> dict[str, Any]:
    """The JSON Schema as it ships."""
    text = (files("autopar.plan") / SCHEMA_FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


if __name__ == "__main__":
    write_text(schema_text(), Path(__file__).with_name(SCHEMA_FILE))
