"""Byte-level BPE: trained on a corpus, kept as one `tokenizer.json` in the format of Hugging Face `tokenizers`.

Any text round-trips, for every byte is a token. `tokenizers` is imported when needed: trainers do without it.
"""

import contextlib
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regrow.errors import DataError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BPE

END_OF_TEXT = "<|endoftext|>"
USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # GPT-2 and OLMo, Llama 3, Llama 2

# Llama 3's split into words (Meta's llama3/tokenizer.py): contractions, words with one leading mark or blank, up to
# three digits, punctuation, line ends with what indents them away. Merges never cross these borders.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MOST_BLANKS = 9_000_000  # in a row: at ten million the regex gives up, and panics


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> "BPE":
    """A byte-level BPE of at most `vocab_size` ids: end-of-text, the 256 bytes, merges.

    Deterministic in the texts. A corpus too small for so many merges gives fewer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    assert vocab_size > 256 + 1, vocab_size
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(filter(_can_be_cut, texts), trainer)
    return tokenizer


def _can_be_cut(text: str) -> bool:
    """Whether the split into words gets through a text's blanks."""
    return len(text) < MOST_BLANKS or all(len(match[0]) < MOST_BLANKS for match in re.finditer(r"\s+", text))


def load_tokenizer(path: Path) -> "BPE":
    """Raises DataError for a missing or damaged file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path} ({error}); delete {path.parent} and run python -m jobs.prepare_data"
        ) from error
    return parse_tokenizer(data, str(path))


def parse_tokenizer(data: bytes, place: str) -> "BPE":
    """Without the truncation and padding of its last use, which a file keeps and documents must not have.

    Raises DataError, naming the place it is from, for a damaged one.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"{place} is no tokenizer that can be read ({first_line(error)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text_id(tokenizer: "BPE", token: str | None) -> int:
    """The id of the token that stands between documents; with None, the usual names are tried."""
    for name in [token] if token else USUAL_END_OF_TEXT:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise DataError(
        f"the tokenizer has no {token or ' or '.join(USUAL_END_OF_TEXT)}; "
        "name its end-of-text token with data.end_of_text"
    )


def num_ids(tokenizer: "BPE") -> int:
    """The highest id + 1: some between may be no token's."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode(tokenizer: "BPE", texts: Sequence[str], *, eot_id: int | None = None) -> list[NDArray[np.uint32] | None]:
    """Token ids of each text, on all cores; None for one that the tokenizer fails on.

    A text that spells out a special token, or the end-of-text, gets the ids of its characters instead.
    """
    tokenizer.encode_special_tokens = True
    try:
        special = _special_ids(tokenizer, eot_id)
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)  # without offsets in the text
        found = [encoding.ids for encoding in encodings]
        found = [ids if special.isdisjoint(ids) else _spelled(tokenizer, ids, special) for ids in found]
        return [np.frombuffer(array("I", ids), np.uint32) for ids in found]  # quicker than np.array
    except BaseException as error:  # tokenizers raises plain Exception, and what it panics with is none
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
    return [None] if len(texts) == 1 else [encode(tokenizer, [text], eot_id=eot_id)[0] for text in texts]


def _special_ids(tokenizer: "BPE", eot_id: int | None) -> set[int]:
    """Those that stand for no text: a model may have them in its vocabulary, where Unigram prefers them to others."""
    unknown = set[int]()
    with contextlib.suppress(Exception):  # a model without one
        unknown = {token.id for token in tokenizer.model.tokenize("\U0010ffff")}
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return (special - unknown) | ({eot_id} if eot_id is not None else set())


def _spelled(tokenizer: "BPE", ids: Sequence[int], special: set[int]) -> list[int]:
    """The ids with those of its characters in the place of each special one."""
    found: list[int] = []
    for number in ids:
        if number not in special:
            found.append(number)
            continue
        for character in tokenizer.id_to_token(number) or "":
            tokens = [token.id for token in tokenizer.model.tokenize(character)]
            tokens = tokens or tokenizer.encode(character, add_special_tokens=False).ids  # bytes have other names there
            found += [token for token in tokens if token not in special]
    return found
