"""As render.go, by Helm itself: its own Go packages, as a library for Python. Fails where `helm lint --strict` does."""

import pathlib
import sys

import helm_python

chart, release, namespace, *more = sys.argv[1:]
values = helm_python.values_from_yaml("\n".join(pathlib.Path(file).read_text() for file in more))
if errors := helm_python.lint(chart, values, strict=True, namespace=namespace)["errors"]:
    sys.exit(f"helm lint: {errors}")
with helm_python.Chart.load(chart) as loaded:
    for _, text in sorted(loaded.render(values, name=release, namespace=namespace).items()):
        print("---", text.strip("\n"), sep="\n")
