"""Look into a prepared corpus: `python -m jobs.inspect_data <folder> [--samples N] [--verify] [--diff FOLDER] ...`."""

import argparse
import sys
from functools import partial

import numpy as np

from regrow.config.store import load_run_config
from regrow.data.read.batch import layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.read.inspect import (
    batch_lines,
    decode_rows,
    differences,
    document_lengths,
    length_lines,
    manifest_lines,
    rows_of_batch,
)
from regrow.data.read.manifest import MANIFEST, Manifest
from regrow.data.read.shards import ShardReader, verify
from regrow.errors import DataError
from regrow.program import program
from regrow.progress import Task
from regrow.record.run_folder import RUN_FILE, read_record
from regrow.show.console import Console
from regrow.storage import Storage


@program()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.inspect_data", description=__doc__)
    parser.add_argument("folder", help="a prepared corpus, as jobs.prepare_data names it, or its URI")
    parser.add_argument("--split", default="train", choices=("train", "validation"))
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show N rows of the split as text")
    parser.add_argument("--lengths", action="store_true", help="measure every document and show how long they are")
    parser.add_argument("--verify", action="store_true", help="check every file against its sha256")
    parser.add_argument("--diff", metavar="FOLDER", help="show what differs from another corpus")
    parser.add_argument("--batch", type=int, metavar="STEP", help="show the rows of this step's batch; needs --run")
    parser.add_argument("--run", metavar="FOLDER", help="run folder whose seed and batch --batch means, or its URI")
    options = parser.parse_args()
    if options.batch is not None and (options.run is None or options.batch < 1):
        parser.error("--batch counts steps from 1 and needs --run, the folder of the run that it means")
    if options.samples < 0:
        parser.error(f"--samples {options.samples} must be at least 0")
    inspect(options)


def inspect(options: argparse.Namespace) -> None:
    folder = options.folder.removesuffix(MANIFEST) or "."
    manifest = Manifest.load(folder)
    print("\n".join(manifest_lines(manifest)))
    with Console(sys.stderr) as console:
        if options.verify:
            for done, total in verify(folder):
                console.progress(Task("verifying", "B"), done, total)
        if options.lengths:
            measuring = partial(console.progress, Task("measuring documents", "rows"))
            lengths = document_lengths(ShardReader(folder, options.split), progress=measuring)
            print("\n".join(length_lines(lengths)))
    if options.samples:
        rows = np.unique(np.linspace(0, manifest.splits[options.split].num_rows - 1, options.samples).astype(np.int64))
        for row, text in zip(rows.tolist(), decode_rows(ShardReader(folder, options.split), rows), strict=True):
            print(f"\n--- {options.split} row {row}\n{text}")
    if options.batch is not None:
        config = load_run_config(options.run)
        corpora = Corpora.of(config.data.corpora, config.data) if config.data.corpora else Corpora.at(folder)
        record = read_record(Storage.at(options.run))
        if record is None:
            raise DataError(f"{options.run} has no {RUN_FILE}, so it is not known what it trained on")
        if corpora.sha256 != record["manifest_sha256"]:
            named = " and ".join(corpora.folders)
            raise DataError(f"run {options.run} did not train on {named}; give the corpus that it did")
        rows_of_step = rows_of_batch(corpora, layout_of(config), order_of(config, corpora), options.batch)
        print("\n".join(batch_lines(rows_of_step)))
    if options.diff is not None:
        found = differences(manifest, Manifest.load(options.diff))
        print("\n".join(found) or "the same corpus")


if __name__ == "__main__":
    main()
