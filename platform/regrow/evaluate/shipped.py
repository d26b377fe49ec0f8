"""The documents of the tasks that come with regrow, as lm_eval's files in `tasks/` ask for them."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.tokenizer import parse_tokenizer
from regrow.data.read.corpora import Corpora
from regrow.errors import DataError
from regrow.evaluate import documents
from regrow.evaluate.catalog import MOST_DOCUMENTS
from regrow.state.exchange.runs import read_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

Splits = dict[str, "Dataset"]


def python_docs_bits(**_: Any) -> Splits:
    return _as_texts(_python_docs())


def python_docs_continuation(**_: Any) -> Splits:
    return _as_questions(_python_docs(), "Python's standard library")


def corpus_bits(*, corpora: dict[str, str], **_: Any) -> Splits:
    """`corpora` are folders by name, as in `data.corpora`."""
    return _as_texts(_validation(Corpora.of(corpora, DataConfig())))


def corpus_continuation(*, corpora: dict[str, str], **_: Any) -> Splits:
    return _as_questions(_validation(Corpora.of(corpora, DataConfig())), " and ".join(corpora.values()))


@cache
def _python_docs() -> list[str]:
    return documents.python_docs()


@cache
def _validation(corpora: Corpora) -> list[str]:
    """The first validation documents of every corpus, of each as many where it has them."""
    tokenizer = parse_tokenizer(read_tokenizer(corpora), corpora.folders[0])
    readers = corpora.reader("validation").readers
    most = -(-MOST_DOCUMENTS // len(readers))
    texts = [text for reader in readers for text in documents.validation_documents(reader, tokenizer, most)]
    if not texts:
        raise DataError(f"the validation rows of {' and '.join(corpora.folders)} hold no whole document")
    return texts


def _as_texts(texts: Sequence[str]) -> Splits:
    return _splits([{"text": text} for text in texts])


def _as_questions(texts: Sequence[str], of: str) -> Splits:
    found = documents.questions(texts)
    if not found:
        raise DataError(
            f"{len(texts)} documents of {of} are too few or too short to ask about; leave the continuation task out"
        )
    return _splits([{"context": q.context, "choices": list(q.choices), "answer": q.answer} for q in found])


def _splits(rows: list[dict[str, Any]]) -> Splits:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}
