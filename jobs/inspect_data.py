"""Look into a prepared corpus: `python -m jobs.inspect_data <folder> [--samples N] [--verify] [--diff FOLDER] ...`."""

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from regrow.data.read.batch import layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.read.inspect import decode_rows, differences, document_lengths, rows_of_batch
from regrow.data.read.manifest import MANIFEST, Manifest
from regrow.data.read.shards import ShardReader, verify
from regrow.errors import DataError, RegrowError
from regrow.progress import Task
from regrow.show.console import Console

BAR = 40  # characters of the longest bar
SHOWN_DOCUMENTS = 3  # of each row of a batch


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.inspect_data", description=__doc__)
    parser.add_argument("folder", help="a prepared corpus, as jobs.prepare_data names it, or its URI")
    parser.add_argument("--split", default="train", choices=("train", "validation"))
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show N rows of the split as text")
    parser.add_argument("--lengths", action="store_true", help="measure every document and show how long they are")
    parser.add_argument("--verify", action="store_true", help="check every file against its sha256")
    parser.add_argument("--diff", metavar="FOLDER", help="show what differs from another corpus")
    parser.add_argument("--batch", type=int, metavar="STEP", help="show the rows of this step's batch; needs --run")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run folder whose seed and batch --batch means")
    options = parser.parse_args()
    if options.batch is not None and (options.run is None or options.batch < 1):
        parser.error("--batch counts steps from 1 and needs --run, the folder of the run that it means")
    try:
        inspect(options)
    except (RegrowError, OSError) as error:
        sys.exit(f"error: {error}")


def inspect(options: argparse.Namespace) -> None:
    folder = options.folder.removesuffix(MANIFEST) or "."
    manifest = Manifest.load(folder)
    print(f"{manifest.recipe}, {manifest.num_tokens:,} tokens in rows of {manifest.seq_len} + 1; {manifest.sha256}")
    for name, split in manifest.splits.items():
        size = sum(shard.num_bytes for shard in split.shards)
        print(f"{name}: {split.num_rows:,} rows, shards: {len(split.shards)}, {size / 1e6:,.1f} MB")
    for name, count in manifest.counts.items():
        print(f"  {name}: {count:,}")
    for piece, why in manifest.damaged.items():
        print(f"  left out, cannot be read: {piece}: {why}")
    with Console(sys.stderr) as console:
        if options.verify:
            for done, total in verify(folder):
                console.progress(Task("verifying", "B"), done, total)
        if options.lengths:
            show_lengths(ShardReader(folder, options.split), console)
    if options.samples:
        rows = np.unique(np.linspace(0, manifest.splits[options.split].num_rows - 1, options.samples).astype(np.int64))
        for row, text in zip(rows.tolist(), decode_rows(ShardReader(folder, options.split), rows), strict=True):
            print(f"\n--- {options.split} row {row}\n{text}")
    if options.batch is not None:
        show_batch(folder, options.run, options.batch)
    if options.diff is not None:
        found = differences(manifest, Manifest.load(options.diff))
        print("\n".join(found) or "the same corpus")


def show_lengths(reader: ShardReader, console: Console) -> None:
    lengths = document_lengths(reader, progress=partial(console.progress, Task("measuring documents", "rows")))
    print(f"{lengths.documents:,} documents of {lengths.mean:,.0f} tokens on average, the longest {lengths.longest:,}")
    for (low, high), count in zip(itertools.pairwise(lengths.bounds), lengths.counts, strict=True):
        if count:
            print(f"  {low:>9,} to {high - 1:>9,}  {count:>9,}  {'#' * -(-BAR * count // max(lengths.counts))}")


def show_batch(folder: str, run: Path, step: int) -> None:
    from regrow.config.store import load_run_config

    config = load_run_config(run)
    corpora = Corpora.of(config.data.corpora, config.data) if config.data.corpora else Corpora.at(folder)
    if corpora.sha256 != json.loads((run / "run.json").read_bytes())["manifest_sha256"]:
        raise DataError(f"run {run} did not train on {' and '.join(corpora.folders)}; give the corpus that it did")
    for row in rows_of_batch(corpora, layout_of(config), order_of(config, corpora), step):
        more = len(row.documents) - SHOWN_DOCUMENTS
        documents = " + ".join(row.documents[:SHOWN_DOCUMENTS]) + (f" and {more} more" if more > 0 else "")
        place = f"{row.corpus} row {row.row:,}".strip()
        print(
            f"position {row.position:,} (slice {row.slice}): {place}, {row.shard} group {row.row_group}, of "
            f"{documents}: {' '.join(row.text.split())[:60]!r}"
        )


if __name__ == "__main__":
    main()
