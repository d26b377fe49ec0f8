"""What may open connections to a run's pods: they themselves, KubeRay's operator, and Prometheus. Pure.

Ranks, keepers and Ray's own processes listen at ports that the kernel chooses, on all of which the run's pods may speak
to each other; torch's stores and gloo let in whatever connects.
"""

from typing import Any

from regrow.config.schema import SubmitConfig

DASHBOARD = 8265  # and Ray's job API: the operator and the submitter ask it
METRICS = (8080, 44217, 44227)  # of the node's agent, the autoscaler and the dashboard
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}  # as KubeRay's chart and its kustomization label it


def network_policy(submit: SubmitConfig, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """A NetworkPolicy for the pods with these labels: those of one run, whatever Ray clusters it has had.

    What they connect to themselves is not restricted: object stores, hubs and Redis may be anywhere.
    """
    if submit.operator_namespace is None:
        operator: dict[str, Any] = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
    else:
        operator = _namespace(submit.operator_namespace)
    ingress = [
        {"from": [{"podSelector": {"matchLabels": labels}}]},
        {"from": [operator], "ports": [_port(DASHBOARD)]},
    ]
    if submit.monitoring_namespace is not None:
        ports = [_port(port) for port in METRICS]
        ingress.append({"from": [_namespace(submit.monitoring_namespace)], "ports": ports})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": submit.namespace, "labels": labels},
        "spec": {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
