"""A program that stands in for kubectl: writes down how it was called, and answers from a small cluster of its own.

The cluster is a folder: `calls.jsonl` (arguments and input of each call), `objects/<kind>.<name>.json`, and
`script.json`, the statuses that a RayJob goes through, one a look, from its first apply on.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

STATE = "STAND_IN_KUBECTL"  # names the folder


def main() -> int:
    folder = Path(os.environ[STATE])
    arguments = sys.argv[1:]
    reads = any(each == "--filename=-" for each in arguments)
    text = sys.stdin.read() if reads else ""
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"arguments": arguments, "input": text}) + "\n")
    words = [each for each in arguments if not each.startswith("--")]
    while words and words[0] not in COMMANDS:  # values of --context and --namespace
        words.pop(0)
    return COMMANDS[words[0]](folder, words[1:], arguments, text)


def apply(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    if (folder / "refusal").exists():
        print((folder / "refusal").read_text(), file=sys.stderr)
        return 1
    for each in documents(text):
        store(folder, "rayjobs.ray.io", each["metadata"]["name"], each | {"status": {}})
        print(f"rayjob.ray.io/{each['metadata']['name']} serverside-applied")
    return 0


def diff(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    for each in documents(text):
        found = load(folder, "rayjobs.ray.io", each["metadata"]["name"])
        if found is None or found["spec"] != each["spec"]:
            print(f"+  entrypoint: {each['spec']['entrypoint']}")
            return 1
    return 0


def get(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    if len(words) == 1:
        kind = words[0]
        items = [json.loads(path.read_text()) for path in sorted((folder / "objects").glob(f"{kind}.*.json"))]
        print(json.dumps({"items": items}))
        return 0
    kind, name = words
    found = load(folder, kind, name)
    if found is None:
        return 0
    script = folder / "script.json"
    statuses: list[Any] = json.loads(script.read_text()) if script.exists() else []
    if kind == "rayjobs.ray.io" and statuses:
        found["status"] = statuses[0]
        store(folder, kind, name, found)
        script.write_text(json.dumps(statuses[1:]))
    print(json.dumps(found))
    return 0


def logs(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    print(f"logs of {words[0]}")
    return 0


def delete(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    path(folder, *words).unlink(missing_ok=True)
    return 0


def run(folder: Path, words: list[str], arguments: list[str], text: str) -> int:
    return 0


COMMANDS = {"apply": apply, "diff": diff, "get": get, "logs": logs, "delete": delete, "exec": run}


def documents(text: str) -> list[dict[str, Any]]:
    import yaml  # most calls need none

    return list(yaml.safe_load_all(text))


def path(folder: Path, kind: str, name: str) -> Path:
    return folder / "objects" / f"{kind}.{name}.json"


def store(folder: Path, kind: str, name: str, content: dict[str, Any]) -> None:
    path(folder, kind, name).parent.mkdir(exist_ok=True)
    path(folder, kind, name).write_text(json.dumps(content))


def load(folder: Path, kind: str, name: str) -> dict[str, Any] | None:
    where = path(folder, kind, name)
    return json.loads(where.read_text()) if where.exists() else None


if __name__ == "__main__":
    sys.exit(main())
