"""The peer: torch.distributed.checkpoint with everything that makes it faster on CPU, from one rank's side.

State dicts are flat, tensors by name, so that nothing is walked. Staging copies into shared memory that is reused
(nothing is pinned without CUDA), plans are cached, and saves run either in DCP's own process beside each rank, or in a
thread over a process group of its own.
"""

import io
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

VARIANTS = {  # (does staging block, where does the save run)
    "dcp_async_process": (False, AsyncCheckpointerType.PROCESS),
    "dcp_async_thread": (False, AsyncCheckpointerType.THREAD),
    "dcp_blocking_process": (True, AsyncCheckpointerType.PROCESS),
}
ENV = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}  # of ranks: their savers are spawned with it


class DcpSaver:
    """Saves by `async_save`, again and again. Every method but `wait` is collective."""

    def __init__(self, variant: str, tensors: dict[str, Tensor], folder: Path, *, sync_files: bool) -> None:
        blocking, self.kind = VARIANTS[variant]
        self.tensors, self.folder, self.sync_files = tensors, folder, sync_files
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=not blocking,
                use_non_blocking_copy=False,
            )
        )
        # collectives of a thread must not meet those of training
        self.group = dist.new_group(backend="gloo") if self.kind is AsyncCheckpointerType.THREAD else None
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        logging.getLogger().setLevel(logging.WARNING)
        self._staged: Future[None] | None = None
        self._saved: Future[Any] | None = None

    def begin(self, step: int) -> None:
        self.finish()  # one save at a time
        writer = FileSystemWriter(self.folder / f"dcp-{step % 2}", sync_files=self.sync_files)
        response = dcp.async_save(
            self.tensors,
            storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged, self._saved = response.staging_completion, response.upload_completion
        else:
            self._staged, self._saved = None, response

    def wait(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def finish(self) -> None:
        """Until the last save is whole: each rank's future resolves once rank 0 has written the metadata."""
        if self._saved is not None:
            self._saved.result()
            self._saved = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way."""
        return self._saved is not None and not self._saved.done()

    num_skipped = 0  # it waits instead

    def close(self) -> None:
        self.finish()
        self.stager.close()


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """A checkpoint to restore from."""
    dcp.save(tensors, storage_writer=FileSystemWriter(folder))


def load(tensors: dict[str, Tensor], folder: Path) -> None:
    dcp.load(cast(dict[str, Any], tensors), storage_reader=FileSystemReader(folder))


def load_counted(tensors: dict[str, Tensor], folder: Path) -> int:
    """Load, and return the bytes that this rank asked the operating system for, the metadata's among them."""
    reader, counting = FileSystemReader(folder), CountingFileSystem()
    reader.fs = counting
    dcp.load(cast(dict[str, Any], tensors), storage_reader=reader)
    return counting.num_bytes


class CountingFileSystem(FileSystem):
    """Counts what its streams read from files, below their buffers."""

    num_bytes = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb", mode
        with io.BufferedReader(_CountingFile(path, self)) as stream:
            yield stream


class _CountingFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], counting: CountingFileSystem) -> None:
        super().__init__(path, "rb")
        self._counting = counting

    def readinto(self, buffer: Any) -> int | None:
        got = super().readinto(buffer)
        self._counting.num_bytes += got or 0
        return got

    def readall(self) -> bytes:
        data = super().readall()
        self._counting.num_bytes += len(data)
        return data
