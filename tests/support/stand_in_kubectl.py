"""A program that stands in for kubectl and an API server: notes how it was called, answers from a cluster of its own.

The cluster is a folder:

- `calls.jsonl`: arguments and input of each call;
- `objects/<kind>.<name>.json`, with labels, finalizers and owners of fields as an API server keeps them;
- `script.json`: what a RayJob goes through, a step a look, from its first apply on: its status, and under `do` what
  else happens then: `first_write` (KubeRay's), `admit` (Kueue's), `release` (the finalizer), `vanish`;
- `away.json`: [message, calls]: so many calls are answered by this message alone;
- `refusal`: what apply and create are refused with;
- `kinds.json`: what kinds there are; without it, all; `no_namespace`: there is no such namespace;
- `logs.json`: what each call of logs that follows prints, its lines and then its error;
- `last_lines`: what one that does not prints.

What it does was compared with a real API server (docs/decisions/0021-a-real-api-server.md).
"""

import difflib
import io
import json
import os
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

Object = dict[str, Any]

STATE = "STAND_IN_KUBECTL"  # names the folder
KINDS = {"RayJob": "rayjobs.ray.io", "NetworkPolicy": "networkpolicies.networking.k8s.io"}
FINALIZER = "ray.io/rayjob-finalizer"
OPERATOR, KUEUE = "ray-operator", "kueue"
TEXT_MAPS = ("labels", "annotations", "nodeSelector", "rayStartParams")
TEXTS = ("value", "entrypoint", "image", "name", "serviceAccountName", "priorityClassName", "rayVersion")


_streams: ContextVar[tuple[TextIO, TextIO] | None] = ContextVar("streams", default=None)  # else the process's own


def main() -> int:
    arguments = sys.argv[1:]
    reads = any(each == "--filename=-" for each in arguments)
    return answer(Path(os.environ[STATE]), arguments, sys.stdin.read() if reads else "")


def answered(folder: Path, arguments: list[str], text: str) -> tuple[int, str, str]:
    """The same without a process: its exit status, and what it prints."""
    streams = io.StringIO(), io.StringIO()
    token = _streams.set(streams)
    try:
        status = answer(folder, arguments, text)
    finally:
        _streams.reset(token)
    out, err = (each.getvalue() for each in streams)
    return status, out, err


def answer(folder: Path, arguments: list[str], text: str) -> int:
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"arguments": arguments, "input": text}) + "\n")
    away: list[Any] = _read(folder / "away.json", ["", 0])
    if away[1]:
        (folder / "away.json").write_text(json.dumps([away[0], away[1] - 1]))
        return refuse(away[0])
    words = [each for each in arguments if not each.startswith("--")]
    while words and words[0] not in COMMANDS:  # values of --context and --namespace
        words.pop(0)
    return COMMANDS[words[0]](folder, words[1:], arguments, text)


def refuse(text: str) -> int:
    (_streams.get() or (sys.stdout, sys.stderr))[1].write(text + "\n")
    return 1


def say(text: str) -> None:
    (_streams.get() or (sys.stdout, sys.stderr))[0].write(text)


def apply(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    if (folder / "refusal").exists():
        return refuse((folder / "refusal").read_text())
    return _apply(folder, arguments, text, dry=False)


def create(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    """A dry run: existing objects are looked at last."""
    from support.kubectl_yaml import documents

    assert "--dry-run=server" in arguments
    if (folder / "refusal").exists():
        return refuse((folder / "refusal").read_text())
    for given in documents(text):
        name = given["metadata"]["name"]
        if refusal := _untyped(given):
            return refuse(refusal)
        kind = KINDS[given["kind"]]
        if load(folder, kind, name) is not None:
            where = f'error when creating "STDIN": {kind} "{name}" already exists'
            return refuse(f"Error from server (AlreadyExists): {where}")
        say(f"{_singular(given)}/{name} created (server dry run)\n")
    return 0


def diff(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    return _apply(folder, arguments, text, dry=True)


def _apply(folder: Path, arguments: list[str], text: str, *, dry: bool) -> int:
    import yaml  # most calls need none of these

    from support import field_ownership as ownership
    from support.kubectl_yaml import documents

    differs = False
    for given in documents(text):
        refusal = _untyped(given)
        if refusal:
            return refuse(refusal)
        name, kind = given["metadata"]["name"], KINDS[given["kind"]]
        live = load(folder, kind, name)
        owners = _owners(live)
        clean = {key: value for key, value in (live or {}).items() if key != "managedFields"}
        try:
            merged, owners = ownership.apply(
                clean or None, given, owners, "regrow", force="--force-conflicts" in arguments
            )
        except ownership.ConflictError as error:
            return refuse(_conflict(error, name, dry))
        if (live or {}).get("spec") != merged["spec"]:
            merged["metadata"] = {
                **merged["metadata"],
                "generation": clean.get("metadata", {}).get("generation", 0) + 1,
            }
        if dry:
            before, after = (yaml.safe_dump(each).splitlines(True) if each else [] for each in (clean, merged))
            change = list(difflib.unified_diff(before, after, "LIVE", "MERGED"))
            say("".join(change))
            differs = differs or bool(change)
        else:
            if live is None:
                merged["metadata"] |= {"uid": f"uid-{time.time_ns()}", "creationTimestamp": _now()}
            store(folder, kind, name, merged | {"managedFields": _listed(owners)})
            say(f"{_singular(given)}/{name} serverside-applied\n")
    if not dry:
        collect(folder)
    return 1 if differs else 0


def _singular(given: Object) -> str:
    return f"{given['kind'].lower()}.{given['apiVersion'].partition('/')[0]}"


def _conflict(error: Any, name: str, dry: bool) -> str:
    """As kubectl 1.32 prints it."""
    from support.field_ownership import written

    listed = [f'conflict with "{who}" using ray.io/v1: {written(path)}' for path, who in error.conflicts.items()]
    count = len(listed)
    if dry:
        log = f"W1123 11:33:04.014265   13729 diff.go:723] Object (RayJob: {name}) keeps changing, diffing without lock"
        headline = f"Apply failed with {count} conflict{'s' if count > 1 else ''}: "
        return f"{log}\nError from server (Conflict): {headline}" + (
            listed[0] if count == 1 else "conflicts " + "\n".join(f"- {each}" for each in listed)
        )
    return (
        "error: Apply failed with " + "\n- ".join([f"{count} conflicts:", *listed]) + "\nPlease review the fields above"
    )


def _untyped(given: Object) -> str:
    """What typed decoding refuses: text that YAML reads as something else."""
    metadata = given.get("metadata", {})
    for key in ("labels", "annotations"):
        for value in (metadata.get(key) or {}).values():
            if not isinstance(value, str):
                kind = {bool: "bool", type(None): "null"}.get(type(value), "number")
                where = f"Go struct field ObjectMeta.metadata.{key} of type string"
                return f'error: unable to decode "STDIN": json: cannot unmarshal {kind} into {where}'
    found = _not_text(given.get("spec", {}), ".spec")
    return f"Error from server: failed to create typed patch object (ray.io/v1, Kind=RayJob): {found}" if found else ""


def _not_text(value: Any, where: str, key: str = "", above: str = "") -> str:
    if isinstance(value, dict):
        return next(filter(None, (_not_text(below, f"{where}.{name}", name, key) for name, below in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_not_text(below, f"{where}[{n}]", "", key) for n, below in enumerate(value))), "")
    if (above in TEXT_MAPS or key in TEXTS) and not isinstance(value, str):
        return f"{where}: expected string, got &value.valueUnstructured{{Value:{json.dumps(value)}}}"
    return ""


def get(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    kind = words[0]
    if kind not in _read(folder / "kinds.json", [kind]):
        return refuse(f'error: the server doesn\'t have a resource type "{kind.partition(".")[0]}"')
    if kind == "namespaces":
        if not (folder / "no_namespace").exists():
            say(json.dumps({"metadata": {"name": words[1]}}))
        return 0
    if len(words) == 1:
        wanted = next((each.partition("=")[2] for each in arguments if each.startswith("--selector=")), "")
        found = [json.loads(path.read_text()) for path in sorted((folder / "objects").glob(f"{kind}.*.json"))]
        items = [each for each in found if _has(each["metadata"].get("labels") or {}, wanted)]
        say(json.dumps({"items": items}))
        return 0
    name = words[1]
    if "--output=jsonpath={.metadata.uid}" in arguments:
        say((load(folder, kind, name) or {"metadata": {"uid": ""}})["metadata"]["uid"])
        return 0
    if kind == "rayjobs.ray.io":
        _act(folder, name)
    found_one = load(folder, kind, name)
    if found_one is not None:
        say(json.dumps(found_one))
    return 0


def _has(labels: dict[str, str], selector: str) -> bool:
    """Whether labels fit a selector of `key=value` and `key!=value`."""
    for each in filter(None, selector.split(",")):
        key, sign, value = each.partition("!=") if "!=" in each else each.partition("=")
        if (labels.get(key) == value) is not (sign == "="):
            return False
    return True


def _act(folder: Path, name: str) -> None:
    """What others do to the job before this look at it."""
    job = load(folder, "rayjobs.ray.io", name)
    script = folder / "script.json"
    steps: list[Object] = _read(script, [])
    if job is None or not steps:
        return
    step = steps[0]
    script.write_text(json.dumps(steps[1:]))
    for deed in step.get("do", []):
        job = DEEDS[deed](job)
    job["status"] = {key: value for key, value in step.items() if key != "do"} or job.get("status") or {}
    if job["metadata"].get("deletionTimestamp") and not job["metadata"].get("finalizers"):
        path(folder, "rayjobs.ray.io", name).unlink()
    else:
        store(folder, "rayjobs.ray.io", name, job)


def _first_write(job: Object) -> Object:
    """KubeRay's: a finalizer, by an update of the object that it decoded into its types and encoded again."""
    new = json.loads(json.dumps(job))
    new["metadata"].setdefault("finalizers", []).append(FINALIZER)
    cluster = new["spec"]["rayClusterSpec"]
    for group in cluster["workerGroupSpecs"]:
        group.setdefault("scaleStrategy", {})
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            for amounts in container["resources"].values():
                amounts |= {key: canonical(value) for key, value in amounts.items()}
        for volume in group["template"]["spec"]["volumes"]:
            limits = volume.get("emptyDir", {})
            if "sizeLimit" in limits:
                limits["sizeLimit"] = canonical(limits["sizeLimit"])
    return _updated(job, new, OPERATOR)


def canonical(text: str) -> str:
    """A quantity as Kubernetes' types encode it: the largest unit that leaves a whole number.

    >>> [canonical(each) for each in ("17.5", "1024Gi", "5120Mi", "16", "1000G")]
    ['17500m', '1Ti', '5Gi', '16', '1T']
    """
    digits = text.rstrip("kKMGTPEim")
    unit = text[len(digits) :]
    base, units = (
        (1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi"]) if "i" in unit else (1000, ["m", "", "k", "M", "G", "T", "P"])
    )
    whole, _, part = digits.partition(".")
    place = units.index(unit)
    while part and place:
        number = int(whole + part) * base
        assert number % 10 ** len(part) == 0, text
        whole, part, place = str(number // 10 ** len(part)), "", place - 1
    amount = int(whole)
    while amount and amount % base == 0:
        amount, place = amount // base, place + 1
    return f"{amount}{units[place]}"


def _admit(job: Object) -> Object:
    """Kueue's."""
    return _updated(job, job | {"spec": job["spec"] | {"suspend": False}}, KUEUE)


def _release(job: Object) -> Object:
    """KubeRay's, of a job that is being deleted."""
    return job | {"metadata": {key: value for key, value in job["metadata"].items() if key != "finalizers"}}


def _vanish(job: Object) -> Object:
    """Somebody else's deletion."""
    return _release(job) | {"metadata": _release(job)["metadata"] | {"deletionTimestamp": _now()}}


DEEDS = {"first_write": _first_write, "admit": _admit, "release": _release, "vanish": _vanish}


def _updated(job: Object, new: Object, manager: str) -> Object:
    from support import field_ownership as ownership

    clean, put = ({key: value for key, value in each.items() if key != "managedFields"} for each in (job, new))
    return new | {"managedFields": _listed(ownership.update(clean, put, _owners(job), manager))}


def logs(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    if "--follow" not in arguments:
        say((folder / "last_lines").read_text())
        return 0
    calls = _read(folder / "logs.json", [[[f"2026-01-01T00:00:00.5Z logs of {words[0]}"], ""]])
    lines, error = calls[0]
    (folder / "logs.json").write_text(json.dumps(calls[1:] or [[[], ""]]))
    for line in lines:
        say(line if line.endswith("\r") else line + "\n")
    return refuse(error) if error else 0


def delete(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    job = load(folder, *words)
    if job is not None and job["metadata"].get("finalizers"):
        job["metadata"].setdefault("deletionTimestamp", _now())
        store(folder, words[0], words[1], job)
        while "--wait=true" in arguments and path(folder, *words).exists():
            time.sleep(0.05)
        return 0
    path(folder, *words).unlink(missing_ok=True)
    return 0


def patch(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    """A merge of `metadata`, by a manager of its own."""
    given = next(each.partition("=")[2] for each in arguments if each.startswith("--patch="))
    found = load(folder, *words)
    if found is None:
        return refuse(f'Error from server (NotFound): {words[0]} "{words[1]}" not found')
    new = found | {"metadata": found["metadata"] | json.loads(given)["metadata"]}
    store(folder, words[0], words[1], _updated(found, new, "kubectl-patch"))
    return 0


def collect(folder: Path) -> None:
    """The garbage collector's: what belongs to an object that is no more goes, some time after it."""
    files = list((folder / "objects").glob("*.json"))
    metadata = {file: json.loads(file.read_text())["metadata"] for file in files}
    there = {each.get("uid") for each in metadata.values()}
    for file, each in metadata.items():
        owners = each.get("ownerReferences", [])
        if owners and not any(owner["uid"] in there for owner in owners):
            file.unlink()


def run(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    return 0


COMMANDS = {
    "apply": apply,
    "create": create,
    "diff": diff,
    "get": get,
    "logs": logs,
    "delete": delete,
    "patch": patch,
    "exec": run,
}


def path(folder: Path, kind: str, name: str) -> Path:
    return folder / "objects" / f"{kind}.{name}.json"


def store(folder: Path, kind: str, name: str, content: Object) -> None:
    path(folder, kind, name).parent.mkdir(exist_ok=True)
    path(folder, kind, name).write_text(json.dumps(content))


def load(folder: Path, kind: str, name: str) -> Object | None:
    where = path(folder, kind, name)
    return json.loads(where.read_text()) if where.exists() else None


def _read(file: Path, default: Any) -> Any:
    return json.loads(file.read_text()) if file.exists() else default


def _owners(live: Object | None) -> dict[str, list[tuple[str, ...]]]:
    return {each["manager"]: [tuple(way) for way in each["fields"]] for each in (live or {}).get("managedFields", [])}


def _listed(owners: dict[str, list[tuple[str, ...]]]) -> list[Object]:
    return [{"manager": who, "fields": [list(way) for way in ways]} for who, ways in owners.items()]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
