"""The pods of a Ray cluster: a head that runs the driver, and workers that run ranks; how many and how large. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from regrow.config.check import topologies
from regrow.config.ray_health import health_checks
from regrow.config.schema import Network, PretrainConfig, SubmitConfig, Toleration
from regrow.config.spares import most_workers
from regrow.control.membership import ENDS_WITH_JOB, NODE_NAME
from regrow.forecast.estimate import rank_bytes, snapshot_bytes, topologies_of_groups
from regrow.record.claim import OWNER
from regrow.storage import local_path
from regrow.submit.node_labels import CREDENTIALS

GIB = 2**30
HEADERS = 1.02  # of snapshots, over their tensors: headers, checksums, pages
COMMUNICATION_GB = 8.0  # that NCCL and gloo take of /dev/shm
PROCESSES_GB = 8.0  # of the raylet, the agents and the keeper
START_S = 90.0  # for new workers to be placed, to import and to join
USER, GROUP = 1000, 100  # as k8s/Dockerfile makes them
HEAD_SHM_GIB = 8
HEAD_OBJECT_STORE_BYTES = 4_000_000_000
LEAVE_S = 10  # `ray start` drains again when it is told to end; by then there is nothing to drain
END_S = 35  # for the containers to end after the drain
STOP_S = 420  # of a job that is stopped: for the step that it trains, and to end once its checkpoint is there
DEAD_HOST_S = 30  # from a host that is found dead to the eviction of a head or submitter; Kubernetes' default is 300 s
NOT_MOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
GPU = "nvidia.com/gpu"

NETWORK_RESOURCE = {Network.efa: "vpc.amazonaws.com/efa", Network.infiniband: "rdma/hca_shared_devices_a"}
NETWORK_DEVICES = {Network.efa: 32, Network.infiniband: 1}  # a p5.48xlarge has 32; shared devices are asked for once
NETWORK_ENV = {
    Network.plain: {},
    Network.efa: {"FI_PROVIDER": "efa"},
    Network.infiniband: {"NCCL_IB_HCA": "mlx5"},
}
HUGE_PAGES = {"hugepages-2Mi": "5Gi"}  # that the EFA provider maps
# KubeRay puts it before `ray start`, whose processes inherit the limit. Devices pin memory, and IPC_LOCK would not let
# them: a process that is not root keeps no added capability (kubernetes#56374). A high limit may do: the pod goes on
LOCK_MEMORY = (
    'ulimit -l unlimited 2>/dev/null || { ulimit -l hard; echo "warning: `ulimit -l` KiB of memory may be locked here, '
    "and NCCL may fail to register its buffers (ibv_reg_mr: Cannot allocate memory): give this host's container "
    'runtime LimitMEMLOCK=infinity, as k8s/README.md says under Networks"; }'
)

OPEN_FILES = {"RAY_START_ULIMIT_OPEN_FILES": "hard"}  # of `ulimit -n`, KubeRay's 65536 is too few for many ranks

Fields = dict[str, Any]

LABELS_FILE = "/etc/regrow/labels/labels.yaml"  # that `ray start` reads, of a worker
LABELS_MOUNT: Fields = {"name": "labels", "mountPath": "/etc/regrow/labels"}
API_MOUNT: Fields = {"name": "api", "mountPath": str(CREDENTIALS), "readOnly": True}  # of one container alone
RACK_VOLUMES: list[Fields] = [
    {"name": "labels", "emptyDir": {}},
    {
        "name": "api",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            ]
        },
    },
]


@dataclass(frozen=True)
class Sizes:
    """Worker pods: how many, and what each has."""

    least_nodes: int
    most_nodes: int
    workers: int  # ranks on a node
    gpus: int
    cpus: int
    snapshot_bytes: int  # the most that snapshots take of a node's memory
    shm_gib: int
    memory_gib: int  # with /dev/shm


def sizes(config: PretrainConfig, submit: SubmitConfig) -> Sizes:
    """Pods for `cluster.min_workers` to `cluster.max_workers` ranks and the spare ones."""
    cluster = config.cluster
    most = most_workers(cluster)
    workers = min(submit.workers_per_node, most)
    least_nodes, most_nodes = ceil(cluster.min_workers / workers), ceil(most / workers)
    of_ranks = rank_bytes(config, topologies_of_groups(config, topologies(config)))
    copies = min(config.snapshot.copies, most_nodes - 1)
    snapshots = 0
    for world_size in of_ranks:
        on_node = min(workers, world_size)  # copies are on spare nodes, too
        here = {"ranks_on_node": on_node, "ranks_copied": on_node * copies}
        snapshots = max(snapshots, snapshot_bytes(config, world_size, of_ranks, **here))
    shm = snapshots * HEADERS + (submit.object_store_gb + COMMUNICATION_GB) * 1e9
    shm_gib = ceil((submit.shm_gb * 1e9 if submit.shm_gb is not None else shm) / GIB)
    return Sizes(
        least_nodes=least_nodes,
        most_nodes=most_nodes,
        workers=workers,
        gpus=workers * cluster.gpus_per_worker,
        cpus=ceil(submit.cpus_per_node or workers * cluster.cpus_per_worker * 1.25 + 1),
        snapshot_bytes=snapshots,
        shm_gib=shm_gib,
        memory_gib=shm_gib + ceil((workers * submit.memory_gb_per_worker + PROCESSES_GB) * 1e9 / GIB),
    )


def longest_restart_s(config: PretrainConfig) -> float:
    """For which a node may have nothing to do although the run will need it: a hang found late, then a new start."""
    return config.train.collective_timeout_s + config.cluster.silence_s + START_S


def stop_s(config: PretrainConfig, submit: SubmitConfig) -> int:
    """From SIGTERM until Ray kills the driver, which has a checkpoint written."""
    return submit.stop_s if submit.stop_s is not None else ceil(config.checkpoint.timeout_s) + STOP_S


def head_pod(
    config: PretrainConfig, submit: SubmitConfig, image: str, labels: dict[str, str], owner: str = ""
) -> Fields:
    """Pod template of the head. It has no logical CPUs: ranks and data tasks go to the workers."""
    env = {
        **{f"RAY_{name}": str(value) for name, value in health_checks(submit.host_silence_s).items()},
        "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s(config, submit)),
        ENDS_WITH_JOB: "1",
        **({OWNER: owner} if owner else {}),
        **OPEN_FILES,
        **submit.env,
    }
    resources: Fields = {
        "cpu": decimal_quantity(ceil(submit.head_cpus * 1000)),
        "memory": _gib(round(submit.head_memory_gb * 1e9 / GIB)),
    }
    container = {
        **_container("ray-head", submit, image, env),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
            {"name": "metrics", "containerPort": 8080},
            {"name": "as-metrics", "containerPort": 44217},
            {"name": "dash-metrics", "containerPort": 44227},
        ],
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": _mounts(config, submit),
    }
    pod = {
        **_pod(submit),
        "terminationGracePeriodSeconds": 60,
        **_where_heads_are(submit),
        "securityContext": _pod_security(),
        "containers": [container],
        "volumes": _volumes(config, submit, HEAD_SHM_GIB),
    }
    metadata = {"labels": {**labels, "regrow/role": "head"}, "annotations": dict(NOT_MOVED)}
    return {"metadata": metadata, "spec": pod}


def worker_pod(config: PretrainConfig, submit: SubmitConfig, size: Sizes, image: str, labels: dict[str, str]) -> Fields:
    """Pod template of a worker node: as many ranks as it has GPUs, drained before it is ended.

    No annotation keeps it from being evicted: Karpenter, since v1, evicts no such pod when it drains a node whose
    interruption is announced (aws/karpenter-provider-aws#8276), and the node would die unannounced.
    """
    resources: Fields = {"cpu": str(size.cpus), "memory": _gib(size.memory_gib)}
    env = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(LEAVE_S), **OPEN_FILES}
    if size.gpus:
        resources[GPU] = str(size.gpus)
        env |= {
            "NCCL_DEBUG": "WARN",
            "NCCL_SOCKET_IFNAME": submit.socket_interfaces,
            "TORCH_FR_BUFFER_SIZE": "2000",
            **NETWORK_ENV[submit.network],
        }
    if submit.network is not Network.plain:
        devices = submit.network_devices or NETWORK_DEVICES[submit.network]
        resources[network_resource(submit)] = str(devices)
    if submit.network is Network.efa:
        resources |= HUGE_PAGES
    container = {
        **_container("ray-worker", submit, image, env | submit.env),
        **({"command": [LOCK_MEMORY]} if submit.network is not Network.plain else {}),
        "env": [
            *({"name": key, "value": value} for key, value in (env | submit.env).items()),
            {"name": NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},  # quarantine is by host
        ],
        "ports": [{"name": "metrics", "containerPort": 8080}],
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", drain_command(submit.drain_s)]}}},
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": _mounts(config, submit) + ([LABELS_MOUNT] if submit.rack_label else []),
    }
    tolerations = [Toleration(key=GPU, effect="NoSchedule")] if size.gpus else []
    if submit.network is not Network.plain:
        tolerations.append(Toleration(key=network_resource(submit), effect="NoSchedule"))
    tolerations += submit.tolerations
    pod = {
        **_pod(submit),
        "terminationGracePeriodSeconds": grace_s(submit),
        **({"nodeSelector": dict(submit.node_selector)} if submit.node_selector else {}),
        **({"tolerations": [_toleration(each) for each in tolerations]} if tolerations else {}),
        **({"affinity": _same(submit.topology_key, labels)} if submit.topology_key else {}),
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(),
        **({"initContainers": [_asks_for_rack(config, submit, image)]} if submit.rack_label else {}),
        "containers": [container],
        "volumes": _volumes(config, submit, size.shm_gib) + (RACK_VOLUMES if submit.rack_label else []),
    }
    return {"metadata": {"labels": {**labels, "regrow/role": "worker"}}, "spec": pod}


def submitter_pod(
    submit: SubmitConfig, image: str, labels: dict[str, str], entrypoint: str, metadata: Mapping[str, str]
) -> Fields:
    """Pod template of the Kubernetes Job that has Ray run the entrypoint and follows it.

    Kept in its place like the head: KubeRay counts its ends, whatever they are of.
    """
    resources = {"cpu": "1", "memory": "2Gi"}
    command = ["python", "-m", "regrow.submit.submitter", json.dumps(metadata), entrypoint]
    container = {
        **_container("ray-job-submitter", submit, image, {}, credentials=False),
        "command": [each.replace("$", "$$") for each in command],  # Kubernetes reads $(NAME), and $$ as $
        "resources": {"requests": resources, "limits": dict(resources)},
    }
    pod = {
        **_pod(submit),
        **_where_heads_are(submit),
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(),
        "containers": [container],
    }
    about = {"labels": {**labels, "regrow/role": "submitter"}, "annotations": dict(NOT_MOVED)}
    return {"metadata": about, "spec": pod}


def drain_command(drain_s: int) -> str:
    """What a worker pod runs when it is to end: tell Ray until when, then wait for the raylet, all within that time.

    The node's id is the one on its raylet's command line. To find it by itself, `ray drain-node` would become a driver,
    this raylet's first, for which it starts a Python worker a CPU and waits for them (ray-project/ray#40131).
    """
    return (
        "node=$(pgrep -ax raylet | grep -om1 -- '--node_id=[0-9a-f]*'); "
        f'timeout {drain_s} ray drain-node --address "$RAY_ADDRESS" --node-id "${{node#*=}}" '
        "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is being deleted' "
        f"--deadline-remaining-seconds {drain_s}; "
        f"while ((SECONDS < {drain_s})) && pgrep -x raylet >/dev/null; do sleep 1; done"
    )


def grace_s(submit: SubmitConfig) -> int:
    return submit.grace_s if submit.grace_s is not None else submit.drain_s + LEAVE_S + END_S


def network_resource(submit: SubmitConfig) -> str:
    return submit.network_resource or NETWORK_RESOURCE[submit.network]


def _container(name: str, submit: SubmitConfig, image: str, env: dict[str, str], *, credentials: bool = True) -> Fields:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": submit.image_pull_policy,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **({"env": [{"name": key, "value": value} for key, value in env.items()]} if env else {}),
        **({"envFrom": [{"secretRef": {"name": submit.env_secret}}]} if submit.env_secret and credentials else {}),
    }


def _asks_for_rack(config: PretrainConfig, submit: SubmitConfig, image: str) -> Fields:
    """Of the Kubernetes API, whose token no other container of the pod sees."""
    resources = {"cpu": "100m", "memory": "128Mi"}
    container = _container("rack", submit, image, {}, credentials=False)
    module = ["python", "-m", "regrow.submit.node_labels"]
    return {
        **container,
        "command": [*module, submit.rack_label, config.snapshot.domain_label, LABELS_FILE],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [dict(LABELS_MOUNT), dict(API_MOUNT)],
    }


def _pod(submit: SubmitConfig) -> Fields:
    return {
        "restartPolicy": "Never",
        "serviceAccountName": submit.service_account,
        **({"priorityClassName": submit.priority_class} if submit.priority_class else {}),
        **({"imagePullSecrets": [{"name": submit.image_pull_secret}]} if submit.image_pull_secret else {}),
    }


def _where_heads_are(submit: SubmitConfig) -> Fields:
    return {
        **({"nodeSelector": dict(submit.head_node_selector)} if submit.head_node_selector else {}),
        "tolerations": [
            {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
            | {"tolerationSeconds": DEAD_HOST_S}
            for why in ("not-ready", "unreachable")
        ],
    }


def _pod_security() -> Fields:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": GROUP,
        "fsGroup": GROUP,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _mounts(config: PretrainConfig, submit: SubmitConfig) -> list[Fields]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]
    if submit.volume_claim:
        mounts.append({"name": "storage", "mountPath": local_path(config.run.storage_path)})
    return mounts


def _volumes(config: PretrainConfig, submit: SubmitConfig, shm_gib: int) -> list[Fields]:
    volumes: list[Fields] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(shm_gib)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": decimal_quantity(submit.disk_gb * 10**12)}},
    ]
    if submit.volume_claim:
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": submit.volume_claim}})
    return volumes


def _same(topology_key: str, labels: dict[str, str]) -> Fields:
    selector = {"matchLabels": {**labels, "regrow/role": "worker"}}
    term = {"topologyKey": topology_key, "labelSelector": selector}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _toleration(toleration: Toleration) -> Fields:
    fields = {name: getattr(toleration, name) for name in ("key", "operator", "value", "effect")}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _gib(gibibytes: int) -> str:
    return binary_quantity(gibibytes * GIB)


def decimal_quantity(thousandths: int) -> str:
    """A Kubernetes quantity with decimal units, as KubeRay's typed decoding and encoding leaves it.

    >>> decimal_quantity(16_000), decimal_quantity(17_500), decimal_quantity(200 * 10**12)
    ('16', '17500m', '200G')
    """
    units = ["m", "", "k", "M", "G", "T", "P", "E"]
    while thousandths and thousandths % 1000 == 0 and len(units) > 1:
        thousandths //= 1000
        units.pop(0)
    return f"{thousandths}{units[0] if thousandths else ''}"


def binary_quantity(num_bytes: int) -> str:
    """The same with binary units.

    >>> binary_quantity(512 * 2**30), binary_quantity(2048 * 2**30), binary_quantity(1536 * 2**20)
    ('512Gi', '2Ti', '1536Mi')
    """
    units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    while num_bytes and num_bytes % 1024 == 0 and len(units) > 1:
        num_bytes //= 1024
        units.pop(0)
    return f"{num_bytes}{units[0]}"
