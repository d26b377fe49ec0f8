"""Byte-level BPE: trained on a corpus, kept as one `tokenizer.json` in the format of Hugging Face `tokenizers`.

Any text round-trips, for every byte is a token. `tokenizers` is imported when needed: trainers do without it.
"""

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
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


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


def encode(tokenizer: "BPE", texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """Token ids of each text, on all cores. A text that spells out a special token gets no special token."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)  # without offsets in the text
    return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings]  # quicker than np.array
