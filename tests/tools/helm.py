#!/usr/bin/env python3
"""Helm itself, by its own packages: what `helm install`, `upgrade` and `uninstall` do, and wait for. `.ci/chart/check helm` puts the
packages where PYTHONPATH must lead.

  helm.py install CHART VALUES.yaml...    --create-namespace --wait
  helm.py upgrade CHART VALUES.yaml...    --reset-values --wait
  helm.py rollback REVISION               --wait
  helm.py uninstall                       --wait
  helm.py list                            the releases, a name a line

The release is `nebula` in the namespace `nebula-system` of the cluster of KUBECONFIG. TIMEOUT is in seconds (300). Ends with 1
and Helm's own words where Helm fails.
"""
import os
import pathlib
import sys

import helm_python

RELEASE, NAMESPACE = "nebula", "nebula-system"
verb, *rest = sys.argv[1:] or ["help"]
timeout = int(os.environ.get("TIMEOUT", "300"))
try:
    with helm_python.Config(namespace=NAMESPACE) as config:
        if verb in ("install", "upgrade"):
            chart, *files = rest
            values = helm_python.values_from_yaml("\n".join(pathlib.Path(file).read_text() for file in files))
            more = {"create_namespace": True} if verb == "install" else {"reset_values": True}
            getattr(config, verb)(chart, RELEASE, values, namespace=NAMESPACE, timeout=timeout, wait="watcher", **more)
        elif verb == "rollback":
            config.rollback(RELEASE, version=int(rest[0]), timeout=timeout, wait="watcher")
        elif verb == "uninstall":
            config.uninstall(RELEASE, timeout=timeout, wait="watcher")
        elif verb == "list":
            print(*(release["name"] for release in config.list(all_states=True)), sep="\n", end="")
        else:
            sys.exit(__doc__)
except helm_python.HelmError as error:
    sys.exit(f"helm {verb}: {error}")
