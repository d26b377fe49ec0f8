"""The documents of the tasks that come with regrow, as lm_eval's files in `tasks/` ask for them.

Texts that training did not see, and questions about how they go on. Deterministic in the texts.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Recipe, content_hash, load_recipe
from regrow.data.prepare.tokenizer import parse_tokenizer
from regrow.data.read.corpora import Corpora
from regrow.data.read.shards import ShardReader
from regrow.errors import DataError
from regrow.evaluate.catalog import MOST_DOCUMENTS
from regrow.state.exchange.runs import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BPE
if TYPE_CHECKING:
    from datasets import Dataset


PYTHON_DOCS_FRACTION = 0.03  # that conf/data/python_docs.yaml keeps for validation
DOCUMENT_CHARS = 20_000  # of a document are read: a book must not outweigh all others, nor take for ever
MOST_QUESTIONS = 200
CONTEXT_CHARS, CONTINUATION_CHARS = 200, 80  # at least; together they fit in a context of 128 tokens
NUM_CHOICES = 4
ROWS_AT_A_TIME = 256

# Between two words on one line: there every byte-level BPE begins a token, in any context.
_CUT = re.compile(r"(?<=\w) (?=\w)")


@dataclass(frozen=True)
class Question:
    """How does a text go on? The true continuation stands among those of other documents."""

    context: str
    choices: tuple[str, ...]  # each begins with its blank
    answer: int


@dataclass(frozen=True)
class _Passage:
    document: int
    context: str
    continuation: str


def held_out(text: str, fraction: float) -> bool:
    """Whether preparation sends a document to validation, whatever else its corpus holds."""
    return int.from_bytes(content_hash(text)[:8], "big") < int(fraction * 2**64)


def python_docs(recipe: Recipe | None = None) -> list[str]:
    """The validation documents of the default corpus, as `data=python_docs` has them, cut to DOCUMENT_CHARS."""
    recipe, config = recipe or load_recipe("python_docs"), DataConfig()
    texts = (
        document.text
        for piece in recipe.pieces(config)
        for document in recipe.documents(config, piece)
        if isinstance(document, Document)
    )
    return [text[:DOCUMENT_CHARS] for text in texts if held_out(text, PYTHON_DOCS_FRACTION)]


def validation_documents(reader: ShardReader, tokenizer: "BPE", most: int = MOST_DOCUMENTS) -> list[str]:
    """The first documents of a prepared split, as text, cut to DOCUMENT_CHARS.

    The last one of the split is left out, for the end of its last row may have cut it.
    """
    eot_id = reader.manifest.tokenizer.eot_id
    stream, ends = np.empty(0, np.uint32), np.empty(0, np.int64)
    for begin in range(0, reader.num_rows, ROWS_AT_A_TIME):
        rows = reader.read(np.arange(begin, min(begin + ROWS_AT_A_TIME, reader.num_rows)))
        stream = np.concatenate([stream, rows[:, :-1].ravel()])  # a row's last token is the next one's first
        ends = np.flatnonzero(stream == eot_id)
        if len(ends) > most:
            break
    else:
        stream = np.append(stream, rows[-1, -1:]) if reader.num_rows else stream
        ends = np.flatnonzero(stream == eot_id)
    documents = [stream[a + 1 : b].tolist() for a, b in itertools.pairwise(ends) if b > a + 1][:most]
    return [text[:DOCUMENT_CHARS] for text in tokenizer.decode_batch(documents, skip_special_tokens=False)]


def questions(texts: Sequence[str], most: int = MOST_QUESTIONS) -> list[Question]:
    """At most so many questions, spread over the texts; none where fewer than NUM_CHOICES are long enough."""
    passages = [passage for number, text in enumerate(texts) for passage in _passages(number, text)]
    passages.sort(key=lambda passage: content_hash(passage.context))
    found = []
    for k, passage in enumerate(passages[:most]):
        choices, documents = [passage.continuation], {passage.document}
        for other in passages[k + 1 :] + passages[:k]:
            if other.document not in documents and other.continuation not in choices:
                choices.append(other.continuation)
                documents.add(other.document)
            if len(choices) == NUM_CHOICES:
                answer = content_hash(passage.context)[-1] % NUM_CHOICES
                choices[0], choices[answer] = choices[answer], choices[0]
                found.append(Question(passage.context, tuple(choices), answer))
                break
    return found


def _passages(document: int, text: str) -> Iterator[_Passage]:
    at = 0
    while (cut := _CUT.search(text, at + CONTEXT_CHARS)) and (end := _CUT.search(text, cut.end() + CONTINUATION_CHARS)):
        context, continuation = text[at : cut.start()], text[cut.start() : end.start()]
        if len(context) <= 2 * CONTEXT_CHARS and len(continuation) <= 2 * CONTINUATION_CHARS:
            yield _Passage(document, context, continuation)
        at = end.end()


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
    return python_docs()


@cache
def _validation(corpora: Corpora) -> list[str]:
    """The first validation documents of every corpus, of each as many where it has them."""
    tokenizer = parse_tokenizer(read_tokenizer(corpora), corpora.folders[0])
    readers = corpora.reader("validation", retry_s=None).readers
    most = -(-MOST_DOCUMENTS // len(readers))
    texts = [text for reader in readers for text in validation_documents(reader, tokenizer, most)]
    if not texts:
        raise DataError(f"the validation rows of {' and '.join(corpora.folders)} hold no whole document")
    return texts


def _as_texts(texts: Sequence[str]) -> Splits:
    return _splits([{"text": text} for text in texts])


def _as_questions(texts: Sequence[str], of: str) -> Splits:
    found = questions(texts)
    if not found:
        raise DataError(
            f"{len(texts)} documents of {of} are too few or too short to ask about; leave the continuation task out"
        )
    return _splits([{"context": q.context, "choices": list(q.choices), "answer": q.answer} for q in found])


def _splits(rows: list[dict[str, Any]]) -> Splits:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}
