"""Preparation, and the tokenizer alone; sides of `benchmarks/data.py`. Prints one JSON object.

    python benchmarks/data_prepare.py loop|prepare SOURCE TOKENIZER [--cpus N] [--storage FOLDER]

`loop` reads the files and calls `encode_batch`, no more: no hashes, no shuffle, no shards. `prepare` is the whole
preparation: the CPU time of all processes of its Ray counts, from the moment it is up, but for what a Ray uses that
is up and does nothing, which is measured just before (`with_idle_daemons_cpu_s` has that too).
"""

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks.measure import ROOT, family_cpu_s

BATCH_CHARS = 2_000_000
IDLE_S = 10.0  # of Ray without work


def loop(source: Path, tokenizer: Path) -> dict[str, float]:
    """Read and encode, on all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    bpe, tokens, began = Tokenizer.from_file(str(tokenizer)), 0, time.perf_counter()
    bpe.encode_special_tokens = True
    for path in sorted(source.glob("*.parquet")):
        batch: list[str] = []
        num_chars = 0
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            batch.append(text)
            num_chars += len(text)
            if num_chars >= BATCH_CHARS:
                tokens += sum(len(e.ids) for e in bpe.encode_batch(batch, add_special_tokens=False))
                batch, num_chars = [], 0
        tokens += sum(len(e.ids) for e in bpe.encode_batch(batch, add_special_tokens=False))
    return {"tokens": tokens, "cpu_s": time.process_time(), "wall_s": time.perf_counter() - began}


def prepare(source: Path, tokenizer: Path, storage: Path, cpus: int) -> dict[str, float]:
    """The preparation on a Ray of its own, with so many CPUs."""
    import ray

    from regrow.config.schema import DataConfig
    from regrow.data.prepare.distribute import on_ray
    from regrow.data.prepare.documents import load_recipe
    from regrow.data.prepare.prepare import prepare

    os.chdir(ROOT)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    time.sleep(3.0)  # its processes have started
    before, began = family_cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    idle = (family_cpu_s() - before) / (time.perf_counter() - began)
    config = DataConfig(
        recipe="fineweb_edu", source=str(source), tokenizer=str(tokenizer), vocab_size=200_000, seq_len=2048
    )
    before, began = family_cpu_s(), time.perf_counter()
    manifest = prepare(
        config,
        load_recipe("fineweb_edu"),
        storage / "corpus",
        progress=lambda *update: None,
        distribute=on_ray,
    )
    wall_s, cpu_s = time.perf_counter() - began, family_cpu_s() - before
    ray.shutdown()
    return {
        "tokens": manifest.num_tokens,
        "cpu_s": cpu_s - idle * wall_s,
        "wall_s": wall_s,
        "with_idle_daemons_cpu_s": cpu_s,
        "idle_daemons_cpus": idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("loop", "prepare"))
    parser.add_argument("source", type=Path, help="folder of parquet files")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--storage", type=Path, help="where the corpus is to go")
    options = parser.parse_args()
    if options.side == "loop":
        result = loop(options.source, options.tokenizer)
    else:
        result = prepare(options.source, options.tokenizer, options.storage, options.cpus)
    result["tokens_per_cpu_s"] = result["tokens"] / result["cpu_s"]
    result["tokens_per_s"] = result["tokens"] / result["wall_s"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
