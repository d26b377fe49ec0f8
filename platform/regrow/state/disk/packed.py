"""Data files of many nodes as a few arrays: a checkpoint of a large group has 100,000 of them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.state.checksums import Crc
from regrow.state.disk.format import SPAN, Content, DataFile
from regrow.state.disk.stacks import Stack

NAME_BYTES = 48  # at most, of a data file's name

Records = NDArray[Any]
FILE = np.dtype([("name", f"S{NAME_BYTES}"), ("num_bytes", "<i8"), ("header_bytes", "<i8"), ("sha256", "V32")])
PACKED = np.dtype([*FILE.descr, ("origin", "<i8"), ("num_spans", "<i8"), ("num_chunks", "<i8")])


@dataclass(frozen=True)
class PackedFiles:
    """Files with their contents, origin by origin."""

    origins: tuple[str, ...]  # nodes whose ranks held what is in the files
    files: Records  # of PACKED; `origin` is a place in `origins`
    spans: Records  # of SPAN, file by file
    crc: Crc  # of each chunk of each span, file by file
    stacks: tuple[Stack, ...]  # those whose first element is in one of the files

    @staticmethod
    def of(files: Mapping[str, Sequence[DataFile]]) -> "PackedFiles":
        """Files that were just written, by origin."""
        rows, contents = [], list[Content]()
        for number, of_origin in enumerate(files.values()):
            for each in of_origin:
                assert each.content is not None, "written by this code"
                assert len(each.name) <= NAME_BYTES, "likewise"
                counts = len(each.content.spans) // SPAN.itemsize, len(each.content.crc) // 4
                sha256 = bytes.fromhex(each.header_sha256)
                rows.append((each.name, each.num_bytes, each.header_bytes, sha256, number, *counts))
                contents.append(each.content)
        return PackedFiles(
            tuple(files),
            np.array(rows, PACKED),
            np.frombuffer(b"".join(content.spans for content in contents), SPAN),
            np.frombuffer(b"".join(content.crc for content in contents), "<u4"),
            tuple(stack for content in contents for stack in content.stacks),
        )

    @staticmethod
    def joined(some: Sequence["PackedFiles"]) -> "PackedFiles":
        """All of these; no origin is in two of them."""
        if len(some) == 1:
            return some[0]
        files, before = np.concatenate([np.empty(0, PACKED), *(each.files for each in some)]), 0
        at = 0
        for each in some:
            files["origin"][at : at + len(each.files)] += before
            at, before = at + len(each.files), before + len(each.origins)
        return PackedFiles(
            tuple(origin for each in some for origin in each.origins),
            files,
            np.concatenate([np.empty(0, SPAN), *(each.spans for each in some)]),
            np.concatenate([np.empty(0, "<u4"), *(each.crc for each in some)]),
            tuple(stack for each in some for stack in each.stacks),
        )

    def of_origin(self, origin: str) -> tuple[DataFile, ...]:
        """One origin's files, with contents but for their stacks."""
        number = self.origins.index(origin)
        spans, chunks = (np.cumsum([0, *self.files[name]]) for name in ("num_spans", "num_chunks"))
        found = []
        for at in np.flatnonzero(self.files["origin"] == number).tolist():
            name, num_bytes, header_bytes, sha256, *_ = self.files[at].tolist()
            content = Content(
                self.spans[spans[at] : spans[at + 1]].tobytes(), self.crc[chunks[at] : chunks[at + 1]].tobytes(), ()
            )
            found.append(DataFile(name.decode(), num_bytes, header_bytes, sha256.hex(), content))
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return int(self.files["num_bytes"].sum())

    @property
    def tensor_bytes(self) -> int:
        """The same without their headers."""
        return self.num_bytes - int(self.files["header_bytes"].sum())
