"""Server-side apply as an API server does it for RayJobs: who owns which field, what conflicts, what an update takes.

Objects are mappings, fields own themselves one by one; a list is one field as a whole (atomic), unless it is one of
named things that pods have (LIST_KEYS). Pure. Source: Kubernetes' structured-merge-diff, and KubeRay's schema.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Object = dict[str, Any]
Path = tuple[str, ...]
Owners = dict[str, list[Path]]  # of a manager: its fields

LIST_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
}
ATOMIC = (
    "nodeSelector",
    "labelSelector",
    "secretKeyRef",
    "secretRef",
    "workerGroupSpecs",
    "tolerations",
    "podSelector",
)
DEFAULTS = {"protocol": "TCP"}
NOBODYS = (
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "generation"),
    ("status",),
)


class ConflictError(Exception):
    """Fields that others own and that would get other values."""

    def __init__(self, conflicts: Mapping[Path, str]) -> None:
        self.conflicts = dict(sorted(conflicts.items()))
        super().__init__(f"{len(conflicts)} conflicts")


def fields(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The fields that can be owned, with their values."""
    name = path[-1] if path else ""
    if path in NOBODYS:
        return
    if isinstance(value, dict) and value and name not in ATOMIC:
        for key, below in value.items():
            yield from fields(below, (*path, key))
    elif isinstance(value, list) and value and name in LIST_KEYS:
        for item in value:
            yield from fields(item, (*path, _key(item, LIST_KEYS[name])))
    elif path:
        yield path, value


def apply(live: Object | None, given: Object, owners: Owners, manager: str, *, force: bool) -> tuple[Object, Owners]:
    """The object and its owners after a manager applied what it wants. Raises ConflictError."""
    had = dict(fields(live or {}))
    wants = dict(fields(given))
    others = {path: who for who, paths in owners.items() if who != manager for path in paths}
    conflicts = {path: others[path] for path, value in wants.items() if path in others and had.get(path) != value}
    if conflicts and not force:
        raise ConflictError(conflicts)
    merged = _merge(deepcopy(live or {}), deepcopy(given))
    for path in owners.get(manager, []):
        if path not in wants and path not in others:
            merged = _without(merged, path)
    left = {who: [path for path in paths if path not in conflicts] for who, paths in owners.items() if who != manager}
    return merged, {who: paths for who, paths in left.items() if paths} | {manager: list(wants)}


def update(live: Object, new: Object, owners: Owners, manager: str) -> Owners:
    """The owners after a manager put a whole object in place of another: it owns what it changed."""
    had, has = dict(fields(live)), dict(fields(new))
    changed = [path for path, value in has.items() if path not in had or had[path] != value]
    left = {who: [path for path in paths if path in has and path not in changed] for who, paths in owners.items()}
    left[manager] = [*left.get(manager, []), *changed]
    return {who: paths for who, paths in left.items() if paths}


def written(path: Path) -> str:
    """As kubectl writes a field: `.spec.rayClusterSpec.workerGroupSpecs`."""
    return "".join(step if step.startswith("[") else f".{step}" for step in path)


def _key(item: Any, keys: tuple[str, ...]) -> str:
    content = item if isinstance(item, dict) else {}
    return "[" + ",".join(f"{key}={content.get(key, DEFAULTS.get(key))!r}" for key in keys) + "]"


def _merge(live: Any, given: Any, name: str = "") -> Any:
    if isinstance(live, dict) and isinstance(given, dict) and name not in ATOMIC:
        return live | {key: _merge(live.get(key), value, key) for key, value in given.items()}
    if isinstance(live, list) and isinstance(given, list) and name in LIST_KEYS:
        keys = LIST_KEYS[name]
        items = {_key(item, keys): item for item in live}
        for item in given:
            items[_key(item, keys)] = _merge(items.get(_key(item, keys)), item)
        return list(items.values())
    return given


def _without(value: Any, path: Path, name: str = "") -> Any:
    """The value without a field; a named thing goes with its name."""
    head, *rest = path
    if isinstance(value, dict) and head in value:
        if not rest:
            return {key: below for key, below in value.items() if key != head}
        return value | {head: _without(value[head], tuple(rest), head)}
    if isinstance(value, list) and name in LIST_KEYS:
        keys = LIST_KEYS[name]
        items = [_without(item, tuple(rest)) if _key(item, keys) == head else item for item in value]
        return [item for item in items if keys[0] in item]
    return value
