"""Rows and events of hand-made runs, as they stand in their files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from regrow.record.log import encode

T0 = 1_700_000_000.0


def make_row(step: int, time: float, step_s: float, generation: int = 1, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "tokens_seen": step * 100,
        "loss": 8.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 100 / max(step_s, 1e-9),
        "mfu": 0.4,
        "step_s": step_s,
        "data_wait_s": 0.0,
        "snapshot_s": 0.0,
        "world_size": 4,
        "generation": generation,
        "batch_digest": f"{step:016x}",
        "time": time,
    }
    return row | changes


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": T0 + at, "event": name, **fields}


def generation(number: int, at: float, world_size: int, start_step: int, cause: str, **fields: Any) -> dict[str, Any]:
    source = "checkpoint" if start_step else "seed"
    return event(
        "generation",
        at,
        generation=number,
        world_size=world_size,
        start_step=start_step,
        cause=cause,
        **({"source": source, "init_s": 3.0, "restore_s": 1.0} | fields),
    )


def workers(*nodes: str) -> list[dict[str, Any]]:
    return [{"node": node, "host": node, "pid": 1} for node in nodes]


def write(folder: Path, rows: list[Any], events: list[Any]) -> str:
    """A run folder as a local run leaves it."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode, rows)))
    (folder / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    config = {"cluster": {"min_workers": 2, "max_workers": 4}, "optim": {"num_slices": 12}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


def run_with_losses(
    folder: Path,
    losses: int = 3,
    detect_s: float = 2.5,
    new: bool = True,
    *,
    steps: int = 10,
    back: int = 0,
    every_steps: int | str = 1,
    more: Sequence[dict[str, Any]] = (),
) -> str:
    """4 ranks, steps of 1 s. Each loss: ten `steps`, a process of node b gone; `detect_s` after the last step it is
    noticed, 3 s later 3 ranks are ready, of which the model took 0.5 and restoring 1; the newest `back` steps are taken
    back; their first step takes 2 s, the others 1.2; after six steps in all the process is back, ready 8 s after its
    end was noticed; growing costs 1 s. `every_steps` lie between snapshots. `more`: events.
    """
    rows, now, step, number = [], 10.0, 0, 1
    events = [
        *more,
        event("submitted", 0, min_workers=2, max_workers=4),
        generation(1, now, 4, 0, "start", workers=workers(*"abcd")),
    ]
    for _ in range(losses):
        for _ in range(steps):
            step, now = step + 1, now + 1.0
            rows.append(make_row(step, T0 + now, 1.0, number))
        now += detect_s
        failure = event("failure", now, cause="worker_died", detail="", generation=number, ranks=[1])
        events.append(failure | ({"nodes": ["b"], "kind": "software"} if new else {}))
        ready, now, number = now + 8.0, now + 3.0, number + 1
        details = {"init_s": 2.0, "restore_s": 1.0, "source": "snapshot", "recomputed_steps": back}
        details |= {"startup_s": {"model": 0.5}}
        if back:
            taken, rows = rows[-back:], rows[:-back]
            span = {"first_time": taken[0]["time"] - 1.0, "first_step_end": taken[0]["time"]}
            span |= {"last_time": taken[-1]["time"], "from_step": step, "to_step": step - back, "steps": back}
            events.append(event("rollback", now, generation=number, seconds=float(back), **span))
            step -= back
        events.append(generation(number, now, 3, step, "worker_died", workers=workers(*"acd"), **details))
        for first in (True, *[False] * 5):
            step, now = step + 1, now + (2.0 if first else 1.2)
            rows.append(make_row(step, T0 + now, 2.0 if first else 1.2, number, world_size=3))
        if new:
            events.append(event("ready", ready, node="b", host="b", ranks=1, start_s=8.0, generation=number))
        now, number = now + 1.0, number + 1
        events.append(generation(number, now, 4, step, "grow", init_s=0.5, restore_s=0.5, workers=workers(*"abcd")))
    events.sort(key=lambda each: each["time"])
    for _ in range(10):
        step, now = step + 1, now + 1.0
        rows.append(make_row(step, T0 + now, 1.0, number))
    events.append(event("stopped", now, step=step, reason="finished"))
    run = write(folder, rows, events)
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"snapshot": {"every_steps": every_steps}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return run
