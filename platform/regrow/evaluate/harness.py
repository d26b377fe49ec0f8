"""Running lm-evaluation-harness: tasks by name, a model in a folder, and what came out. It is imported when needed."""

import contextlib
import difflib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.config.schema import Dtype
from regrow.errors import EvaluationError, RegrowError, first_line
from regrow.evaluate.catalog import CONFIG, OF_A_CORPUS, PYTHON_DOCS, SHIPPED, TASKS_FOLDER, TOKENIZER_CONFIG
from regrow.evaluate.results import TaskResult, task_results
from regrow.record.provenance import git_sha, versions

if TYPE_CHECKING:
    from regrow.data.read.corpora import Corpora

PACKAGES = ("lm_eval", "transformers", "accelerate", "datasets")
BOOTSTRAP_ITERS = 1000  # for standard errors of metrics that have no formula
LOGITS_BYTES = 2**30  # of one batch, in float32, where no batch size was chosen
MOST_ROWS = 32
NOT_FOR_USERS = (  # loggers: advice to writers of tasks, missing kernels, documents that windows are for
    *("lm_eval.api.task", "lm_eval.tasks", "torchao", "torch.utils._pytree"),
    "transformers.tokenization_utils_base",
)
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
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of lm_eval's bootstrap, which would fork this process
    for name in NOT_FOR_USERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def usual_tasks(corpora: "Corpora | None") -> list[str]:
    """The shipped ones that can run, but for those that would ask the same twice."""
    if corpora is None:
        return list(PYTHON_DOCS)
    on_python_docs = all(manifest.recipe == "python_docs" for manifest in corpora.manifests)
    return list(OF_A_CORPUS if on_python_docs else SHIPPED)


def load_tasks(names: Sequence[str], corpora: "Corpora | None") -> list[Any]:
    """lm_eval's tasks and groups by name, pattern or YAML file, with their documents.

    Raises EvaluationError for an unknown one, and for one that cannot be loaded.
    """
    if corpora is None and (of_a_corpus := [name for name in names if name in OF_A_CORPUS]):
        raise EvaluationError(f"{of_a_corpus[0]} reads a prepared corpus; name its folder with --corpus")
    from lm_eval.tasks import TaskManager

    of = {} if corpora is None else {"corpora": dict(zip(corpora.names, corpora.folders, strict=True))}
    ours = TaskManager(include_path=TASKS_FOLDER, include_defaults=False, metadata=of)
    loaded = [each for name in names if name in SHIPPED for each in _load(ours, name)]
    if others := [name for name in names if name not in SHIPPED]:
        theirs = TaskManager()
        loaded += [each for name in _resolve(others, theirs) for each in _load(theirs, name)]
    return loaded


def evaluate(folder: Path, tasks: list[Any], settings: Settings) -> dict[str, TaskResult]:
    """Results by task. Raises EvaluationError for what the model or the device cannot do."""
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:  # lm_eval would take another one silently
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an assertion where torch was built without CUDA
        raise EvaluationError(f"--device {device} cannot be used: {first_line(error)}") from error
    began = time.time()
    with contextlib.redirect_stdout(sys.stderr):  # lm_eval prints here and there
        try:
            model = HFLM(
                str(folder),
                backend="causal",
                dtype="auto" if settings.dtype is None else settings.dtype.value,
                softmax_dtype="float32",
                device=device,
                batch_size=settings.batch_size or usual_batch_size(folder),
                add_bos_token=False if begins_with_end_of_text(folder) else None,
            )
        except (ValueError, OSError, KeyError) as error:
            raise EvaluationError(f"transformers cannot load the model of {folder}: {first_line(error)}") from error
        try:
            found = simple_evaluate(
                model,
                tasks=tasks,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
            )
        except torch.OutOfMemoryError as error:
            raise EvaluationError(
                f"{device} has not enough memory for a batch of {model.batch_size}; set a smaller --batch-size"
            ) from error
        except (ValueError, AssertionError) as error:  # a task that this model or this way cannot be asked
            raise EvaluationError(
                f"lm_eval: {type(error).__name__}: {first_line(error)}; leave the task out, or use lm_eval's own "
                "command on an exported checkpoint"
            ) from error
    conditions = {
        "limit": settings.limit,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "device": device,
        "batch_size": model.batch_size,
        "context": model.max_length,
        "time": began,
        "git": git_sha(),
        "versions": versions(*PACKAGES),
    }
    return task_results(found, conditions)


def usual_batch_size(folder: Path) -> int:
    """As many rows as keep a batch's logits within LOGITS_BYTES, at most MOST_ROWS; lm_eval's own default is one."""
    config = json.loads((folder / CONFIG).read_bytes())
    row_bytes = 4 * config.get("max_position_embeddings", 2048) * config["vocab_size"]
    return max(1, min(MOST_ROWS, LOGITS_BYTES // row_bytes))


def begins_with_end_of_text(folder: Path) -> bool:
    """Whether documents begin and end with the same token, as those that regrow trains on.

    Then no other token may be put before them. Some tokenizers would, as Llama 3's, and training never saw that one.
    """
    special = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
    is_llama = json.loads((folder / CONFIG).read_bytes()).get("model_type") == "llama"
    return bool(is_llama and special.get("bos_token") and special.get("bos_token") == special.get("eos_token"))


def _resolve(names: Sequence[str], manager: Any) -> Iterator[str]:
    """Patterns as the names that they match; raises EvaluationError for what is unknown."""
    for name in names:
        matching = manager.match_tasks([name])
        if not matching and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            close = difflib.get_close_matches(name, [*manager.all_tasks, *SHIPPED], n=1)
            raise EvaluationError(
                f"unknown task {name!r}{f', did you mean {close[0]}?' if close else ''}; --list names those that come "
                "with regrow, `lm-eval ls tasks` those of lm_eval"
            )
        yield from matching or [name]


def _load(manager: Any, name: str) -> list[Any]:
    """A task, a group, or the tasks of a tag."""
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
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
