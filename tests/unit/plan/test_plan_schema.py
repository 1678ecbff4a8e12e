"""The packaged JSON Schema: current, valid, and in agreement with the reader."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from autopar.plan.schema import SCHEMA_FILE, packaged_schema, plan_schema, schema_text
from autopar.plan.serialize import to_json

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(packaged_schema())
    return jsonschema.Draft202012Validator(packaged_schema())


def test_packaged_file_is_current():
    text = (files("autopar.plan") / SCHEMA_FILE).read_text(encoding="utf-8")
    assert text == schema_text(), "run: python -m autopar.plan.schema"
    assert packaged_schema() == plan_schema()


def test_sample_is_valid(validator, sample_plan):
    validator.validate(json.loads(to_json(sample_plan)))


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (["version"], 2, "version"),
        (["pipeline"], "2", "pipeline"),
        (["stages", 0, "parameters", 0, "layout", 0], "Q", "stages.0.parameters.0.layout.0"),
        (["model", "inputs", 0, "shape", 0], "batch*2", "model.inputs.0.shape.0"),
        (["stages", 0, "collectives", 0, "op"], "broadcast", "stages.0.collectives.0.op"),
        (["prediction", "time_s", "forward"], None, "prediction.time_s.forward"),
        (["cluster", "links", 0, "color"], "red", "cluster.links.0"),
    ],
)
def test_what_the_reader_refuses_is_invalid(validator, sample_plan, path, value, where):
    data = json.loads(to_json(sample_plan))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    errors = list(validator.iter_errors(data))
    assert [".".join(map(str, error.absolute_path)) for error in errors] == [where]


def test_required_fields_are_those_without_a_default():
    schema = plan_schema()
    assert "version" in schema["required"] and "pins" not in schema["required"]
    assert "tied" not in schema["$defs"]["ParameterPlan"]["required"]
