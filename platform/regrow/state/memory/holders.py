"""Which files of a snapshot there are, and on which nodes: what keepers answer, and what all ranks of a group are told.

Of 98,304 ranks with a copy each these are 196,608 files. They are asked for, passed on and searched as plain values and
arrays, and a Holder is made of one only where its file is read.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby

import numpy as np
from numpy.typing import NDArray

from regrow.control.values import Version
from regrow.plan import placement
from regrow.plan.mesh import ALONE, Coordinates, MeshShape
from regrow.state.memory.held import Held
from regrow.state.memory.ranges import Address

# a snapshot file: its name, the rank that wrote it, how many ranks of that node wrote one, the sha256 of its header
File = tuple[str, int, int, str]
Files = tuple[File, ...]


@dataclass(frozen=True)
class Holding:
    """What one node holds of one moment."""

    moment: Version
    mesh: MeshShape
    files: Files

    @staticmethod
    def all_of(held: Iterable[Held]) -> list["Holding"]:
        """By moment and mesh."""
        by_moment: dict[tuple[Version, MeshShape], list[File]] = {}
        for each in held:
            files = by_moment.setdefault((each.moment, each.coordinates.mesh), [])
            files.append((each.file, each.coordinates.rank, each.writers, each.header_sha256))
        return [Holding(*key, tuple(files)) for key, files in by_moment.items()]

    def __iter__(self) -> Iterator[Held]:
        return (held_of(file, self.moment, self.mesh) for file in self.files)


@dataclass(frozen=True)
class Holder:
    """A snapshot file, and where it is."""

    node: str
    address: Address  # of the node's keeper
    held: Held

    @property
    def name(self) -> str:
        return f"{self.node[:12]}/{self.held.file}"


@dataclass(frozen=True)
class Holders:
    """All files of one snapshot, by node."""

    moment: Version
    mesh: MeshShape = ALONE.mesh
    nodes: tuple[tuple[str, Address, Files], ...] = ()

    @staticmethod
    def by_moment(answers: Iterable[tuple[str, Address, Iterable[Holding]]]) -> dict[Version, "Holders"]:
        """Of what nodes answer, each with its keeper's address; ranks of one generation are on one mesh."""
        found: dict[Version, tuple[MeshShape, list[tuple[str, Address, Files]]]] = {}
        for node, address, holdings in answers:
            for each in holdings:
                found.setdefault(each.moment, (each.mesh, []))[1].append((node, address, each.files))
        return {moment: Holders(moment, mesh, tuple(nodes)) for moment, (mesh, nodes) in found.items()}

    @staticmethod
    def of(holders: Sequence[Holder]) -> "Holders":
        """Of files of one moment, at least one. Raises AssertionError where some are of another one."""
        nodes = groupby(holders, lambda each: (each.node, each.address))
        found = Holders.by_moment((*node, Holding.all_of(each.held for each in files)) for node, files in nodes)
        assert len(found) == 1, f"these are of {', '.join(map(str, found))}"
        return next(iter(found.values()))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, at: int) -> Holder:
        if not 0 <= at < len(self):
            raise IndexError(f"there are {len(self)} files")
        number = int(np.searchsorted(self._first, at, side="right")) - 1
        node, address, files = self.nodes[number]
        return Holder(node, address, held_of(files[at - self._first[number]], self.moment, self.mesh))

    def __iter__(self) -> Iterator[Holder]:
        for node, address, files in self.nodes:
            for file in files:
                yield Holder(node, address, held_of(file, self.moment, self.mesh))

    @property
    def is_whole(self) -> bool:
        """Whether they have every element of the state."""
        return placement.is_whole(self.mesh, self._ranks)

    def places(self, axes: Sequence[str]) -> NDArray[np.int64]:
        """Where each file's rank is along these axes of the mesh; see `placement.places`."""
        return placement.places(self.mesh, self._ranks, axes)

    def without(self, holder: Holder) -> "Holders":
        """All others."""
        nodes = [
            (node, address, tuple(each for each in files if (node, each[0]) != (holder.node, holder.held.file)))
            for node, address, files in self.nodes
        ]
        return Holders(self.moment, self.mesh, tuple(nodes))

    def to_json(self) -> str:
        """One text, which ranks pass on as it is."""
        nodes = [[node, *address, files] for node, address, files in self.nodes]
        moment = [self.moment.generation, self.moment.step]
        return json.dumps([moment, Coordinates(self.mesh).to_plain(), nodes], separators=(",", ":"))

    @staticmethod
    def of_json(text: str) -> "Holders":
        """What `to_json` gave."""
        moment, mesh, nodes = json.loads(text)
        return Holders(
            Version(*moment),
            Coordinates.of_plain(mesh).mesh,
            tuple((node, (host, port), tuple(map(tuple, files))) for node, host, port, files in nodes),
        )

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """The index of each node's first file, and how many there are in all."""
        return np.array([0, *accumulate(len(files) for _, _, files in self.nodes)])

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        return np.array([file[1] for file in chain.from_iterable(files for _, _, files in self.nodes)], np.int64)


def held_of(file: File, moment: Version, mesh: MeshShape) -> Held:
    """A file of a moment as a keeper has it."""
    name, rank, writers, header_sha256 = file
    return Held(name, moment, Coordinates(mesh, rank), writers, header_sha256)
