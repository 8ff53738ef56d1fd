"""As render.go, by Helm itself: its own Go packages, as a library for Python. Fails where `helm lint --strict` does, which holds
the values against the schema."""

import os
import pathlib
import sys

import helm_python


def wanted(file):
    prefix = os.environ.get("TEMPLATES", "")
    if prefix.startswith("!"):
        return not file.startswith(prefix[1:])
    return not prefix or file.startswith(tuple(prefix.split()))


chart, release, namespace, *more = sys.argv[1:]
values = helm_python.values_from_yaml("\n".join(pathlib.Path(file).read_text() for file in more))
if errors := helm_python.lint(chart, values, strict=True, namespace=namespace)["errors"]:
    sys.exit(f"helm lint: {errors}")
with helm_python.Chart.load(chart) as loaded:
    for path, text in sorted(loaded.render(values, name=release, namespace=namespace).items()):
        file = path.split("/templates/", 1)[1]
        if file.endswith(".yaml") and text.strip() and wanted(file):
            print("---", text.strip("\n"), sep="\n")
