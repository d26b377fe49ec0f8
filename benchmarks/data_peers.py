"""Peers of the token stream on the same rows, each in a process of its own; a side of `benchmarks/data.py`.

    python benchmarks/data_peers.py SIDE ROWS.npy [--mds FOLDER]

Needs torch and, for `mosaicml`, mosaicml-streaming, neither Ray nor regrow, so that it may run in another environment.
Both shuffle, use two worker processes and hand out int64 tensors, as a trainer takes them. Prints one JSON object.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

BATCH_SEQS = 64
WORKERS = 2


class Rows(Dataset[torch.Tensor]):
    """Rows of a memory-mapped array: the least that a loader can do."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))


def dataloader(rows: Path) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    yield from DataLoader(Rows(rows), BATCH_SEQS, shuffle=True, num_workers=WORKERS, generator=generator)


def streaming() -> Any:
    """The package; its computer vision needs torchvision, which text does without."""
    try:
        import streaming
    except (ImportError, RuntimeError):
        for name in (
            "torchvision",
            "torchvision.datasets",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ):
            sys.modules[name] = ModuleType(name)
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
        import streaming
    return streaming


def write_mds(rows: Path, folder: Path) -> None:
    """The rows as MosaicML's shards, not compressed: its fastest."""
    values = np.load(rows, mmap_mode="r")
    with streaming().MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint32:{values.shape[1]}"}) as writer:
        for row in values:
            writer.write({"tokens": np.array(row)})


def mosaicml(folder: Path) -> Iterator[torch.Tensor]:
    dataset = streaming().StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=0, batch_size=BATCH_SEQS)

    def collate(samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    yield from DataLoader(dataset, BATCH_SEQS, num_workers=WORKERS, collate_fn=collate)


def cpu_s() -> float:
    """Of this process and the workers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("dataloader", "mosaicml", "write_mds"))
    parser.add_argument("rows", type=Path)
    parser.add_argument("--mds", type=Path, help="folder of MosaicML's shards")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side == "write_mds":
        write_mds(options.rows, options.mds)
        print(json.dumps({"bytes": sum(path.stat().st_size for path in options.mds.iterdir())}))
        return
    if options.side == "mosaicml":
        streaming()  # imported before the clock runs, as ours is
    began, cpu_began, tokens, first_s = time.perf_counter(), cpu_s(), 0, 0.0
    for batch in mosaicml(options.mds) if options.side == "mosaicml" else dataloader(options.rows):
        first_s = first_s or time.perf_counter() - began
        tokens += batch.shape[0] * (batch.shape[1] - 1)
    wall_s = time.perf_counter() - began
    result = {"tokens": tokens, "first_batch_s": first_s, "wall_s": wall_s, "cpu_s": cpu_s() - cpu_began}
    print(json.dumps(result), flush=True)
    with contextlib.suppress(Exception):
        os._exit(0)  # MosaicML's shared memory complains while Python ends


if __name__ == "__main__":
    main()
