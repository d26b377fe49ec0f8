"""The tensors of a committed checkpoint, read in pieces: none of them has to fit in memory. Every byte is checked."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regrow.state.disk.catalog import step_folder
from regrow.state.disk.format import Index
from regrow.state.disk.inspect import PIECE_BYTES, Advance, pieces, whole_span
from regrow.state.disk.read import read_elements, read_headers
from regrow.state.layout import ITEM_BYTES, Span
from regrow.state.reshard import Source, plan_reads
from regrow.storage import Storage


class CheckpointTensors:
    """An opened checkpoint. `advance` is told of the bytes of every piece that is read."""

    def __init__(self, checkpoints: Storage, index: Index, advance: Advance) -> None:
        """Raises CheckpointError where a data file is missing or its header is damaged."""
        self.index, self._advance = index, advance
        self._source = checkpoints / step_folder(index.step)
        self._stored = read_headers(self._source, index)
        self._by_name: dict[str, list[Source]] = defaultdict(list)
        for source in self._stored:
            self._by_name[source.span.name].append(source)

    def __str__(self) -> str:
        return str(self._source)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor, flat, piece after piece. Raises CheckpointError where its data is damaged."""
        blocks = self.index.column_blocks.get(name, 1)
        if blocks > 1:
            yield from self._rows(name, blocks)
            return
        for span in pieces(whole_span(self.index, name)):
            piece = self._read(span)
            self._advance(piece.nbytes)
            yield piece

    def _rows(self, name: str, blocks: int) -> Iterator[Tensor]:
        """The same of a tensor that is stored as blocks of columns, some whole rows at a time."""
        dtype, (num_rows, num_columns) = self.index.tensors[name]
        width, rows_at_once = num_columns // blocks, max(1, PIECE_BYTES // ITEM_BYTES[dtype] // num_columns)
        for first in range(0, num_rows, rows_at_once):
            last = min(first + rows_at_once, num_rows)
            begins = [(block * num_rows + first) * width for block in range(blocks)]
            spans = [replace(whole_span(self.index, name), start=b, stop=b + (last - first) * width) for b in begins]
            columns = [self._read(span).view(last - first, width) for span in spans]
            piece = torch.cat(columns, dim=1).flatten()
            self._advance(piece.nbytes)
            yield piece

    def _read(self, span: Span) -> Tensor:
        """Elements in the order in which they are stored."""
        elements = torch.empty(span.num_elements, dtype=getattr(torch, span.dtype))
        for read in plan_reads(self._by_name[span.name], [span]):
            data = read_elements(self._source, read, self._stored[read.source])
            target = elements[read.start - span.start : read.stop - span.start]
            target.copy_(torch.frombuffer(bytearray(data), dtype=elements.dtype))
        return elements

    def whole(self, name: str) -> Tensor:
        """The tensor in its shape."""
        dtype, shape = self.index.tensors[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        flat, at = tensor.view(-1), 0
        for piece in self.pieces(name):
            flat[at : at + len(piece)] = piece
            at += len(piece)
        return tensor


@dataclass(frozen=True)
class Statistics:
    """Of one tensor, computed in float64."""

    norm: float  # square root of the sum of squares
    largest: float  # absolute value
    not_finite: int  # elements that are infinite or not a number


@dataclass(frozen=True)
class Difference:
    """Between two tensors of one shape whose bits differ, computed in float64."""

    largest: float  # absolute difference of two elements
    relative: float  # norm of the difference over the norm of the first


def statistics(tensors: CheckpointTensors) -> dict[str, Statistics]:
    """Of every tensor."""
    return {name: _statistics(tensors.pieces(name)) for name in tensors.index.tensors}


def differences(first: CheckpointTensors, second: CheckpointTensors) -> dict[str, Difference]:
    """Of every tensor that both have in one dtype and shape, and whose bits are not all equal."""
    held = first.index.tensors
    common = sorted(name for name in held if second.index.tensors.get(name) == held[name])
    compared = {name: _difference(first.pieces(name), second.pieces(name)) for name in common}
    return {name: difference for name, difference in compared.items() if difference is not None}


def _statistics(pieces: Iterable[Tensor]) -> Statistics:
    squares, largest, not_finite = 0.0, torch.zeros((), dtype=torch.float64), 0
    for piece in pieces:
        values = piece.double()
        squares += values.square().sum().item()
        largest = torch.maximum(largest, values.abs().max())  # unlike Python's max, keeps what is not a number
        not_finite += int((~values.isfinite()).sum())
    return Statistics(squares**0.5, largest.item(), not_finite)


def _difference(first: Iterable[Tensor], second: Iterable[Tensor]) -> Difference | None:
    equal, largest, squares, norm_squares = True, torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for a, b in zip(first, second, strict=True):
        equal = equal and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        apart = a.double() - b.double()
        largest = torch.maximum(largest, apart.abs().max())
        squares += apart.square().sum().item()
        norm_squares += a.double().square().sum().item()
    if equal:
        return None
    return Difference(largest.item(), (squares / norm_squares) ** 0.5 if norm_squares else float("inf"))
