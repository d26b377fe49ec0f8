"""What an evaluation came to: `results.json`, and the table that a person reads. Pure; no lm_eval, no torch."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from regrow.errors import EvaluationError, first_line
from regrow.storage import Storage

RESULTS, PROBE = "results.json", ".writable"
FORMAT, VERSION = "regrow-evaluation", 1
BETTER = {True: "higher is better", False: "lower is better", None: ""}

TaskResult = dict[str, Any]  # docs/evaluating.md has its keys


def task_results(found: Mapping[str, Any], conditions: Mapping[str, Any]) -> dict[str, TaskResult]:
    """The results of lm_eval's `evaluate`, by task or group, with the conditions that all of them share."""
    return {name: _task_result(name, entry, found) | {**conditions} for name, entry in found["results"].items()}


def _task_result(name: str, entry: Mapping[str, Any], found: Mapping[str, Any]) -> TaskResult:
    metrics = {}
    for key, value in entry.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        metrics[metric if chosen == "none" else key] = {
            "value": _number(value),
            "stderr": _number(entry.get(f"{metric}_stderr,{chosen}")),
            "higher_is_better": found["higher_is_better"].get(name, {}).get(metric),
        }
    examples = found["n-samples"].get(name, {})
    return {
        "metrics": metrics,
        "num_examples": examples.get("effective", entry.get("sample_len")),
        "num_examples_there": examples.get("original"),
        "num_fewshot": found["n-shot"].get(name),
        "task_version": found["versions"].get(name),
    }


def earlier_results(folder: Storage, model: Mapping[str, Any]) -> dict[str, TaskResult]:
    """The results that a folder has of the same model, by task.

    Raises EvaluationError where they are another model's, or no results.
    """
    try:
        content = json.loads(folder.read_bytes(RESULTS))
        kind, theirs = (content["format"], content["version"]), dict(content["model"])
        tasks = dict(content["tasks"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{folder / RESULTS} is no file of results; name another --out") from error
    if kind != (FORMAT, VERSION) or _which(theirs) != _which(model):
        step = theirs.get("step")
        of = theirs.get("folder") if step is None else f"{theirs.get('folder')}, step {step}"
        raise EvaluationError(f"{folder / RESULTS} has results of {of}; name another --out")
    return tasks


def _which(model: Mapping[str, Any]) -> tuple[Any, ...]:
    """A checkpoint is the same wherever its run lies; a model whose run is not known is where it lies."""
    run_id = model.get("run_id")
    return (model.get("folder"),) if run_id is None else (run_id, model.get("step"))


def check_writable(folder: Storage) -> None:
    """Raises EvaluationError, before anything slow happens, where nothing can be written."""
    try:
        folder.write_bytes(PROBE, b"")
        folder.delete(PROBE)
    except OSError as error:
        raise EvaluationError(
            f"{folder}: results cannot be written ({first_line(error)}); name another --out"
        ) from error


def write_results(folder: Storage, model: Mapping[str, Any], tasks: Mapping[str, TaskResult]) -> None:
    """Write `results.json` with these tasks, and those that an earlier evaluation of the same model left there."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": {**model},
        "tasks": earlier_results(folder, model) | {**tasks},
    }
    folder.write_bytes(RESULTS, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def table(tasks: Mapping[str, TaskResult]) -> Iterator[str]:
    """A line for each metric."""
    rows = [("task", "examples", "shots", "metric", "value", "stderr", "")]
    for name, result in tasks.items():
        examples = f"{result['num_examples'] or 0:,}"
        if result["num_examples_there"] not in (None, result["num_examples"]):
            examples += f" of {result['num_examples_there']:,}"
        first = (name, examples, str(result["num_fewshot"] if result["num_fewshot"] is not None else ""))
        for metric, of in result["metrics"].items():
            value, stderr = _text(of["value"]), _text(of["stderr"])
            rows.append((*first, metric, value, stderr, BETTER[of["higher_is_better"]]))
            first = ("", "", "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{'>' if k in (1, 2, 4, 5) else '<'}{widths[k]}}" for k, cell in enumerate(row)]
        yield "  ".join(cells).rstrip()


def _number(value: Any) -> float | None:
    """None for what lm_eval could not compute, and for what JSON has no number for."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"
