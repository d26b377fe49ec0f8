"""What a Kubernetes node's label says becomes a label of the Ray node: in an init container of a worker pod.

    python -m regrow.submit.node_labels KUBERNETES_LABEL RAY_LABEL FILE

`ray start --labels-file=FILE` reads it. Pods are not told their node's labels but zone and region, so it asks the API.
Without an answer the file is empty: the run starts, and each node is a failure domain by itself.
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TRIES, RETRY_S, TIMEOUT_S = 5, 2.0, 10.0


def main(arguments: Sequence[str], environment: Mapping[str, str], credentials: Path = CREDENTIALS) -> None:
    key, ray_label, file = arguments
    node = environment["NODE_NAME"]
    found: dict[str, str] = {}
    for left in reversed(range(TRIES)):
        try:
            labels = _labels_of(node, environment, credentials)
        except (OSError, ValueError) as error:
            print(f"node {node}: {type(error).__name__}: {error}", flush=True)
            time.sleep(RETRY_S if left else 0.0)
            continue
        found = {ray_label: labels[key]} if key in labels else {}
        break
    print(f"node {node}: {found or f'no label {key}: it is a failure domain by itself'}", flush=True)
    Path(file).write_text(json.dumps(found))  # which is YAML


def _labels_of(node: str, environment: Mapping[str, str], credentials: Path) -> dict[str, str]:
    """Of a Kubernetes node. Raises OSError, where the API does not answer or refuses, or ValueError."""
    api = f"https://{environment['KUBERNETES_SERVICE_HOST']}:{environment['KUBERNETES_SERVICE_PORT']}"
    token = (credentials / "token").read_text().strip()
    request = urllib.request.Request(f"{api}/api/v1/nodes/{node}", headers={"Authorization": f"Bearer {token}"})
    trusted = ssl.create_default_context(cafile=str(credentials / "ca.crt"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted) as answer:
        labels: dict[str, str] = json.load(answer)["metadata"].get("labels", {})
    return labels


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
