"""Events of `events.jsonl` as sentences for a person. Pure."""

from collections.abc import Mapping
from typing import Any

CAUSES = {
    "start": "started",
    "resume": "resumed",
    "worker_died": "a worker died",
    "worker_failed": "a worker failed",
    "worker_hung": "a worker hung",
    "node_silent": "a node fell silent",
    "controller_died": "Ray Train's controller died",
    "nonfinite": "gradients are not finite",
    "grow": "larger",
    "drain": "nodes are to be taken away",
    "end_of_float8": "on in bfloat16",
}


def narrate(event: Mapping[str, Any]) -> str | None:
    """One line about an event; None for those that nobody needs to see live."""
    match event["event"]:
        case "generation":
            ranks = event["world_size"]
            return (
                f"generation {event['generation']}: {ranks} rank{'s' if ranks != 1 else ''} from step "
                f"{event['start_step']} ({CAUSES.get(event['cause'], event['cause'])}, state from {event['source']}); "
                f"MFU: 6N + 12LHQT FLOPs a token over {event['peak_flops'] / 1e12:,.3g} TFLOP/s a rank "
                f"({event['peak_source']})"
            )
        case "checkpoint":
            return (
                f"checkpoint of step {event['step']} committed: {megabytes(event['bytes'])} in {event['seconds']:.2f} s"
            )
        case "checkpoint_failed":
            return f"checkpoint of step {event['step']} was not written, training goes on: {event['detail']}"
        case "snapshot_failed":
            return str(event["detail"])
        case "checkpoint_damaged":
            return f"checkpoint of step {event['step']} cannot be used, trying the one before: {event['detail']}"
        case "snapshot_damaged":
            return f"a copy of the snapshot of step {event['step']} cannot be used, another one was: {event['detail']}"
        case "snapshot_unreadable":
            return f"the snapshot of step {event['step']} cannot be used, going back to storage: {event['detail']}"
        case "failure":
            return f"{CAUSES.get(event['cause'], event['cause'])}: {event['detail']}"
        case "drain":
            return f"node {event['node'][:12]} is to be taken away; the group leaves it in time"
        case "straggler":
            return (
                f"process {event['pid']} on node {event['node'][:12]} computes {event['factor']:.1f} times as long as "
                "the others: everyone waits for it"
            )
        case "unfit":
            return f"process {event['pid']} on node {event['node'][:12]} was ended: {event['detail']}"
        case "gpu_error":
            known = f" ({event['meaning']})" if event["meaning"] else ""
            return f"node {event['node'][:12]}, {event['gpu']}: Xid {event['xid']}{known}"
        case "link_failed":
            return f"node {event['node'][:12]} did not reach node {event['to'][:12]}: {event['detail']}"
        case "quarantine":
            return (
                f"node {event['node'][:12]} failed again and again: it is left alone for {event['seconds']:.0f} s "
                "(cluster.quarantine_failures, cluster.quarantine_s)"
            )
        case "coordinator_restarted":
            return f"the coordinator died and is back, training went on; generation {event['generation']}"
        case "stalled":
            return f"no step for {event['seconds']:.1f} s; what every worker was doing: {event['stacks']}"
        case "rollback":
            return f"rolled back from step {event['from_step']} to {event['to_step']}"
        case "data_fallback":
            return (
                f"the token stream did not deliver window {event['window']} to rank {event['rank']} "
                f"({event['reason']}); it reads the same rows directly"
            )
        case "profile":
            return f"profile of the steps up to {event['step']}: {event['folder']}/summary.md"
        case "note":
            return str(event["text"])
    return None


def startup_line(startup_s: Mapping[str, float], first_step_s: float) -> str:
    """Where the time from the command to the first step went."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in startup_s.items() if seconds >= 0.05]
    total = sum(startup_s.values()) + first_step_s
    return f"first step after {total:.1f} s: {', '.join(parts)}, step with its data {first_step_s:.1f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
