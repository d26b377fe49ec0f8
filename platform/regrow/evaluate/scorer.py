"""lm-evaluation-harness' model of transformers, with our progress, and choices that suit what regrow exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from regrow.config.schema import Dtype
from regrow.errors import EvaluationError
from regrow.evaluate.source import CONFIG, TOKENIZER_CONFIG
from regrow.progress import Task
from regrow.state.disk.inspect import Advance

Counter = Callable[[Task, float], Advance]

LOGITS_BYTES = 2**30  # of one batch, in float32, with a batch size that nobody chose
MOST_ROWS = 32


class Scorer(HFLM):
    """A model that is asked for log-likelihoods. What is summed up is float32, whatever the weights are."""

    def __init__(self, folder: Path, *, dtype: Dtype | None, device: str, batch_size: str | None, counter: Counter):
        super().__init__(
            str(folder),
            backend="causal",
            dtype="auto" if dtype is None else dtype.value,
            softmax_dtype="float32",
            device=device,
            batch_size=batch_size or 1,
            add_bos_token=False if begins_with_end_of_text(folder) else None,
        )
        if batch_size is None:
            self.batch_size_per_gpu = usual_batch_size(self.max_length, self.model.config.vocab_size)
        self._counter, self._advance = counter, _ignore

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._counted("choosing", "answers", len(requests), super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows = sum(-(-len(self.tok_encode(request.args[0])) // self.max_length) for request in requests)
        return self._counted("reading", "windows", windows, super().loglikelihood_rolling, requests)

    def _counted(
        self, name: str, unit: str, total: int, score: Callable[..., list[Any]], requests: list[Any]
    ) -> list[Any]:
        show, left = self._counter(Task(name, unit), total), total

        def advance(rows: int) -> None:  # answers of one token share a row, so the end may come early
            nonlocal left
            rows = min(rows, left)
            left -= rows
            if rows:
                show(rows)

        self._advance = advance
        scores = score(requests, disable_tqdm=True)
        advance(left)
        self._advance = _ignore
        return scores

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        for texts, _, answer in requests:
            if len(answer) > self.max_length:
                raise EvaluationError(
                    f"the answer {texts[1][:40]!r} has {len(answer)} tokens, this model's context {self.max_length}; "
                    "leave its task out"
                )
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> Any:
        counting, self._advance = self._advance, _ignore  # these rows are trials
        try:
            return super()._detect_batch_size(requests, pos)
        finally:
            self._advance = counting

    def _model_call(self, inps: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        logits: torch.Tensor = super()._model_call(inps, *arguments, **more)
        self._advance(len(inps))
        return logits


def usual_batch_size(context: int, vocab_size: int) -> int:
    """As many rows as keep a batch's logits within LOGITS_BYTES; at most MOST_ROWS.

    >>> usual_batch_size(128, 4096), usual_batch_size(8192, 128256)
    (32, 1)
    """
    return max(1, min(MOST_ROWS, LOGITS_BYTES // (4 * context * vocab_size)))


def usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises EvaluationError for one that is not here: lm_eval would take another one silently."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an assertion where torch was built without CUDA
        raise EvaluationError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error


def begins_with_end_of_text(folder: Path) -> bool:
    """Whether documents begin and end with the same token, as those that regrow trains on.

    Then no other token may be put before them. Some tokenizers would, as Llama 3's, and training never saw that one.
    """
    special = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
    is_llama = json.loads((folder / CONFIG).read_bytes()).get("model_type") == "llama"
    return bool(is_llama and special.get("bos_token") and special.get("bos_token") == special.get("eos_token"))


def _ignore(rows: int) -> None:
    pass
