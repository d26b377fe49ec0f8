"""The tasks that come with regrow: lm_eval's files in `tasks/`; what they ask about is in `documents`. No network."""

from pathlib import Path

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"  # of an exported model
MOST_DOCUMENTS = 200  # of a corpus
TASKS_FOLDER = Path(__file__).with_name("tasks")
PYTHON_DOCS = {
    "python_docs_bits": "bits per byte of held-out documents of Python's standard library",
    "python_docs_continuation": "which of four continuations is the true one, in the same documents",
}
OF_A_CORPUS = {
    "corpus_bits": f"bits per byte of the first {MOST_DOCUMENTS} validation documents of the corpus",
    "corpus_continuation": "which of four continuations is the true one, in the same documents",
}
SHIPPED = PYTHON_DOCS | OF_A_CORPUS


def lines() -> list[str]:
    width = max(map(len, SHIPPED))
    return [f"{name:{width}}  {text}" for name, text in SHIPPED.items()]
