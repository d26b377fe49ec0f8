"""Rows and events of hand-made runs, as they stand in their files."""

from typing import Any

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
