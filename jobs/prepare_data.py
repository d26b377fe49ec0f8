"""Prepare a corpus for training: `python -m jobs.prepare_data [data=NAME] [data.seq_len=N] [run.storage_path=PATH]`."""

import sys

from regrow.config.schema import PretrainConfig
from regrow.config.store import run_job


def main(config: PretrainConfig) -> None:
    from regrow.config.check import check
    from regrow.data.prepare import find_or_prepare
    from regrow.observe.console import Console

    check(config)
    with Console(sys.stderr) as console:
        folder, manifest = find_or_prepare(config.data, config.run.storage_path, progress=console.progress)
    print(folder)
    for name, split in manifest.splits.items():
        print(f"{name}: {split.num_rows:,} rows of {manifest.seq_len} tokens in {len(split.shards)} shards")


if __name__ == "__main__":
    run_job(main, name="prepare_data")
