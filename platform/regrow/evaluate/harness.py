"""Running lm-evaluation-harness: tasks by name, a model in a folder, and what came out. It is imported when needed."""

import contextlib
import difflib
import fnmatch
import logging
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.config.schema import Dtype
from regrow.errors import EvaluationError, RegrowError, first_line
from regrow.evaluate.catalog import OF_A_CORPUS, PYTHON_DOCS, SHIPPED, TASKS_FOLDER
from regrow.evaluate.results import TaskResult, task_results
from regrow.record.provenance import git_sha, versions

if TYPE_CHECKING:
    from regrow.data.corpora import Corpora
    from regrow.evaluate.scorer import Counter

PACKAGES = ("lm_eval", "transformers", "accelerate", "datasets")
BOOTSTRAP_ITERS = 1000  # for standard errors of metrics that have no formula
INSTALL = "pip install 'regrow[evaluate]', in a checkout .venv/bin/pip install -c constraints.txt -e '.[evaluate]'"


@dataclass(frozen=True)
class Settings:
    """How to evaluate."""

    limit: int | None = None  # examples of each task
    num_fewshot: int | None = None  # None: as each task says
    batch_size: str | None = None  # a number or `auto`; None: by the size of the logits
    device: str | None = None  # None: CUDA where there is any
    dtype: Dtype | None = None  # of the weights; None: as they are exported


def set_up(names: Sequence[str]) -> None:
    """To be called before torch and Hugging Face's libraries are imported.

    Where all tasks are shipped, nothing in this process asks a network from now on. Raises EvaluationError where the
    extra is missing.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise EvaluationError(f"{', '.join(missing)} missing; {INSTALL}")
    if all(name in SHIPPED for name in names):
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of lm_eval's bootstrap, which would fork this process
    _log_briefly()


def usual_tasks(corpora: "Corpora | None") -> list[str]:
    """The shipped ones that can run, but for those that would ask the same twice."""
    if corpora is None:
        return list(PYTHON_DOCS)
    on_python_docs = all(manifest.recipe == "python_docs" for manifest in corpora.manifests)
    return list(OF_A_CORPUS if on_python_docs else SHIPPED)


def load_tasks(names: Sequence[str], corpora: "Corpora | None") -> dict[str, Any]:
    """Tasks by name, pattern or YAML file, with their documents.

    Raises EvaluationError for an unknown one, and for one that cannot be loaded.
    """
    shipped = [name for name in names if name in SHIPPED]
    others = [name for name in names if name not in SHIPPED]
    if corpora is None and set(shipped) & OF_A_CORPUS.keys():
        name = next(name for name in shipped if name in OF_A_CORPUS)
        raise EvaluationError(f"{name} reads a prepared corpus; name its folder with --corpus")
    from lm_eval.tasks import TaskManager

    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    of = {} if corpora is None else {"corpora": dict(zip(corpora.names, corpora.folders, strict=True))}
    ours = TaskManager(include_path=TASKS_FOLDER, include_defaults=False, metadata=of)
    for name in shipped:
        _load(ours, name, loaded)
    if others:
        theirs = TaskManager()
        for name in _resolve(others, theirs.all_tasks):
            _load(theirs, name, loaded)
    return loaded


def evaluate(folder: Path, tasks: dict[str, Any], settings: Settings, counter: "Counter") -> dict[str, TaskResult]:
    """Results by task. Raises EvaluationError for what the model or the device cannot do."""
    import numpy as np
    import torch
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate as run

    from regrow.evaluate.scorer import Scorer, check_device, usual_device

    device = settings.device or usual_device()
    check_device(device)
    if settings.batch_size == "auto" and device == "cpu":
        raise EvaluationError(
            "--batch-size auto finds what a GPU's memory holds; give a number on cpu, or leave it out"
        )
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # as lm_eval's own command does
    torch.manual_seed(DEFAULT_OTHER_SEED)
    with contextlib.redirect_stdout(sys.stderr):  # lm_eval prints here and there
        try:
            model = Scorer(folder, dtype=settings.dtype, device=device, batch_size=settings.batch_size, counter=counter)
        except (ValueError, OSError, KeyError) as error:
            raise EvaluationError(f"transformers cannot load the model of {folder}: {first_line(error)}") from error
        for name, task in tasks["tasks"].items():
            _configure(name, task, settings.num_fewshot, DEFAULT_OTHER_SEED, context=model.max_length)
        began = time.time()
        try:
            found = run(
                lm=model, task_dict=tasks, limit=settings.limit, bootstrap_iters=BOOTSTRAP_ITERS, log_samples=False
            )
        except torch.OutOfMemoryError as error:
            raise EvaluationError(
                f"{device} has not enough memory for a batch of {model.batch_size}; set a smaller --batch-size"
            ) from error
    conditions = {
        "limit": settings.limit,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "device": device,
        "batch_size": model.batch_size,
        "context": model.max_length,
        "time": began,
        "git": git_sha(),
        "versions": {**versions(), **{package: version(package) for package in PACKAGES}},
    }
    return task_results(found, conditions)


def _configure(name: str, task: Any, num_fewshot: int | None, seed: int, *, context: int) -> None:
    """Set a task up as lm_eval's command does. Raises EvaluationError for one that the model cannot be asked."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        why = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "shows more than text"
        raise EvaluationError(f"{name} {why}; use lm_eval's own command on an exported checkpoint")
    if task.get_config("output_type") == "generate_until":
        asked = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 256)
        if asked >= context:
            raise EvaluationError(f"{name} generates up to {asked} tokens; this model's context has {context}")
    usual = task.get_config("num_fewshot")
    if num_fewshot is not None and usual != 0:  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif usual is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)


def _resolve(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Patterns as the names that they match; raises EvaluationError for what is unknown."""
    found = []
    for name in names:
        matching = fnmatch.filter(known, name)
        if not matching and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            close = difflib.get_close_matches(name, [*known, *SHIPPED], n=1)
            raise EvaluationError(
                f"unknown task {name!r}{f', did you mean {close[0]}?' if close else ''}; --list names those that come "
                "with regrow, `lm-eval ls tasks` those of lm_eval"
            )
        found += matching or [name]
    return found


def _load(manager: Any, name: str, into: dict[str, Any]) -> None:
    try:
        loaded = manager.load([name])
    except RegrowError:
        raise
    except ImportError as error:
        raise EvaluationError(f"task {name} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:  # a task is code of others, and so is what fetches its data
        raise EvaluationError(
            f"task {name} cannot be loaded ({type(error).__name__}: {first_line(error)}); its data come over the "
            f"network, unless Hugging Face's cache holds them. These need none: {', '.join(SHIPPED)}"
        ) from error
    for kind in into:
        into[kind].update(loaded.get(kind, {}))


def _log_briefly() -> None:
    """What lm_eval warns of as plain lines on stderr, each kind once; without what is not for its users."""
    seen: set[tuple[str, int]] = set()

    def once(record: logging.LogRecord) -> bool:
        key = (record.pathname, record.lineno)
        new = key not in seen
        seen.add(key)
        return new

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(once)
    logger = logging.getLogger("lm_eval")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    for name in (
        "lm_eval.api.task",  # advice to writers of tasks
        "torchao",  # kernels that it comes without
        "torch.utils._pytree",
        "transformers.tokenization_utils_base",  # documents are longer than the context, which windows are for
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
