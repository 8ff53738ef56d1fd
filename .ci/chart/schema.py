#!/usr/bin/env python3
"""schema.py CHART WRONG VALUES...: holds values.schema.json against the chart's own values, each of VALUES, and WRONG: a map
from every key of values.yaml, as a.b.c, to a value that must be refused there."""

import copy
import json
import pathlib
import sys

import jsonschema
import yaml

chart, wrong, *more = map(pathlib.Path, sys.argv[1:])
schema = json.loads((chart / "values.schema.json").read_text())
jsonschema.Draft7Validator.check_schema(schema)
validator = jsonschema.Draft7Validator(schema)
default = yaml.safe_load((chart / "values.yaml").read_text())


def merge(into, values):
    """As Helm does: maps key by key, everything else is replaced."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
    return into


def below(path):
    """The part of the schema for a key; its own keys, if it lists them."""
    part = schema
    for key in path:
        part = part.get("properties", {}).get(key, {})
    return part.get("properties", {})


def keys(path=()):
    """Every key that has a value of its own."""
    for key in below(path):
        at = (*path, key)
        yield from keys(at) if below(at) else [".".join(at)]


def known(values, path=()):
    for key, value in values.items():
        at = (*path, key)
        yield from known(value, at) if isinstance(value, dict) and below(at) else [".".join(at)]


mistakes = []
for file in [chart / "values.yaml", *more]:
    values = merge(copy.deepcopy(default), yaml.safe_load(file.read_text()))
    mistakes += [f"{file}: {error.json_path}: {error.message}" for error in validator.iter_errors(values)]
cases = yaml.safe_load(wrong.read_text())
in_schema, in_values = set(keys()) - {"global"}, set(known(default))
mistakes += [f"{key} is in values.yaml and not in the schema" for key in in_values - in_schema]
mistakes += [f"{key} is in the schema and has no default" for key in in_schema - in_values]
mistakes += [f"{key} has no wrong value in {wrong}" for key in in_schema - set(cases)]
for path, value in cases.items():
    values = copy.deepcopy(default)
    *parents, last = path.split(".")
    part = values
    for key in parents:
        part = part.setdefault(key, {})
    part[last] = value
    if validator.is_valid(values):
        mistakes.append(f"{path}: {value!r} is taken")
for mistake in mistakes:
    print(f"schema: {mistake}", file=sys.stderr)
if mistakes:
    sys.exit(1)
print(f"the schema takes {1 + len(more)} files of values and refuses {len(cases)} wrong ones")
