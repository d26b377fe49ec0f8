"""The tensors of a committed checkpoint, read in pieces: none of them has to fit in memory. Every byte is checked."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regrow.plan.boxes import Piece
from regrow.state.disk.catalog import PIECE_BYTES, Advance, read_chunks, read_headers, step_folder, whole_box
from regrow.state.disk.format import Index, Stored
from regrow.state.disk.reading import Reader
from regrow.state.disk.stacks import num_rows, rows_of
from regrow.state.entries import fill
from regrow.state.reshard import Source, plan_reads, windows
from regrow.storage import Storage

GROUP_BYTES = 1 << 30  # of tensors of one stack that are read together


class CheckpointTensors:
    """An opened checkpoint. `advance` is told of the bytes of every piece that is read."""

    def __init__(self, checkpoints: Storage, index: Index, advance: Advance) -> None:
        """Raises CheckpointError where a data file is missing or its header is damaged."""
        self.index, self._advance = index, advance
        self._source = checkpoints / step_folder(index.step)
        self._reader = None if index.layout is None else Reader(self._source, index)
        self._held: dict[str, Tensor] = {}  # that were read with another one
        self._stored = read_headers(self._source, index) if self._reader is None else {}
        self._by_name: dict[str, list[Source]] = defaultdict(list)
        for source in self._stored:
            self._by_name[source.piece.box.name].append(source)

    def __str__(self) -> str:
        return str(self._source)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor, flat, piece after piece. Raises CheckpointError where its data is damaged."""
        whole = whole_box(self.index, name)
        if self._reader is not None and name not in self._held and 0 < whole.num_bytes <= GROUP_BYTES:
            self._read_with_neighbours(self._reader, name)
        held = self._held.pop(name, None)
        width = whole.num_elements // max(1, num_rows(whole.shape))
        for box in whole.slabs(PIECE_BYTES):
            if held is not None:
                rows = rows_of(box)
                self._advance(box.num_bytes)
                yield held[rows.start * width : rows.stop * width]
                continue
            piece = torch.empty(box.num_elements, dtype=getattr(torch, box.dtype))
            want = [(Piece.all_of(box), piece)]
            if self._reader is not None:
                self._reader.read(want)
            else:
                read_pieces(self._source, self._stored, self._by_name[name], want)
            self._advance(piece.nbytes)
            yield piece

    def _read_with_neighbours(self, reader: Reader, name: str) -> None:
        """A tensor's rows lie apart, with those of its stack between them, which are often wanted next."""
        boxes = [whole_box(self.index, each) for each in reader.neighbours(name, GROUP_BYTES)]
        tensors = [torch.empty(box.num_elements, dtype=getattr(torch, box.dtype)) for box in boxes]
        stack = reader.stack_of(name)
        self._held = {each: tensor for each, tensor in self._held.items() if reader.stack_of(each) != stack}
        reader.read([(Piece.all_of(box), tensor) for box, tensor in zip(boxes, tensors, strict=True)])
        self._held |= {box.name: tensor for box, tensor in zip(boxes, tensors, strict=True)}

    def whole(self, name: str) -> Tensor:
        """The tensor in its shape."""
        dtype, shape = self.index.tensors[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        flat, at = tensor.view(-1), 0
        for piece in self.pieces(name):
            flat[at : at + len(piece)] = piece
            at += len(piece)
        return tensor


def read_pieces(
    source: Storage, stored: Mapping[Source, Stored], have: Iterable[Source], want: Sequence[tuple[Piece, Tensor]]
) -> int:
    """Fill pieces of (piece, memory of its whole box) from a step's folder; the bytes read. Raises CheckpointError."""
    num_bytes = 0
    for read in plan_reads(have, [piece for piece, _ in want]):
        for window in windows(read, PIECE_BYTES):
            data = read_chunks(source, read.source.file, stored[read.source], window.begin, window.end)
            fill(want[read.want][1], window.runs, data)
            num_bytes += len(data)
    return num_bytes


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
