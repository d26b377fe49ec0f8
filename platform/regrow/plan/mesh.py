"""The shape of the device mesh at a world size. Pure arithmetic, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

from regrow.plan.share import Share


@dataclass(frozen=True)
class MeshShape:
    """Ranks as a grid: `dp_replicate` copies of the model, each sharded over `dp_shard` ranks, times `pp` x `tp`. `cp`
    neighbours along `dp_shard` have the same rows, and different tokens of them: a unit is `pp` x `cp` x `tp` ranks.
    """

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    pp: int = 1
    blocks: tuple[int, ...] = ()  # with pp: how many of the model's each stage has; stage s is on rank s % pp
    cp: int = 1  # divides dp_shard

    @property
    def num_units(self) -> int:
        """Data-parallel ranks: those that train on different rows."""
        return self.dp_replicate * self.dp_shard // self.cp

    @property
    def num_stages(self) -> int:
        """Of a unit's pipeline."""
        return len(self.blocks) or 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes by name, outermost first; FSDP alone has one, the others theirs where there are several ranks.

        To what holds and moves parameters `cp` is a part of `dp_shard`.
        """
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}

    @property
    def sizes(self) -> dict[str, int]:
        """Of all axes, also those of one rank, for people: `dp_shard` without `cp`, so that they multiply to all ranks.

        >>> list(MeshShape(dp_replicate=1, dp_shard=4, cp=2).sizes.items())
        [('pp', 1), ('dp_replicate', 1), ('dp_shard', 2), ('cp', 2), ('tp', 1)]
        """
        shard = self.dp_shard // self.cp
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": shard, "cp": self.cp, "tp": self.tp}

    def unit_of(self, rank: int) -> int:
        """The data-parallel rank that a rank belongs to.

        >>> [MeshShape(dp_replicate=1, dp_shard=2, tp=2, pp=2).unit_of(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return rank // (self.tp * self.cp) % self.num_units

    def part_of(self, rank: int) -> int:
        """Of its unit the ranks of one pipeline rank, numbered unit x pp + pipeline rank.

        >>> [MeshShape(dp_replicate=1, dp_shard=2, tp=2, pp=2).part_of(rank) for rank in range(8)]
        [0, 0, 2, 2, 1, 1, 3, 3]
        """
        pipeline_rank, unit = divmod(rank // (self.tp * self.cp), self.num_units)
        return unit * self.pp + pipeline_rank

    def stride(self, axis: str) -> tuple[int, int]:
        """How far apart the ranks are that are next to each other along an axis, and its size; (1, 1) for none of its.

        >>> MeshShape(dp_replicate=2, dp_shard=3, tp=2).stride("dp_shard")
        (2, 3)
        """
        return _stride(self, axis)

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from one along an axis alone, itself included, in their order; `cp` is none of the
        mesh's, and part of `dp_shard`.

        >>> mesh = MeshShape(dp_replicate=1, dp_shard=4, tp=2, pp=2, cp=2)
        >>> [mesh.ranks_along(axis, 13) for axis in ("pp", "dp_shard", "cp", "tp")]
        [[5, 13], [9, 11, 13, 15], [13, 15], [12, 13]]
        """
        inner, size = (self.tp, self.cp) if axis == "cp" else self.stride(axis)
        first = rank - rank // inner % size * inner
        return list(range(first, first + size * inner, inner))

    def share_of(self, rank: int) -> Share:
        """Which tokens of its unit's rows a rank has."""
        return Share(rank // self.tp % self.cp, self.cp)


@lru_cache(maxsize=1024)  # of each tensor of each rank the same
def _stride(mesh: MeshShape, axis: str) -> tuple[int, int]:
    axes = mesh.axes
    if axis not in axes:
        return 1, 1
    names = list(axes)
    return prod(axes[name] for name in names[names.index(axis) + 1 :]), axes[axis]


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on a mesh, whose ranks are numbered along the innermost axis first."""

    mesh: MeshShape
    rank: int = 0

    def along(self, axis: str) -> tuple[int, int]:
        """The rank's coordinate along an axis, and the axis' size.

        >>> Coordinates(MeshShape(dp_replicate=2, dp_shard=3, tp=2), rank=8).along("dp_shard")
        (1, 3)
        """
        inner, size = self.mesh.stride(axis)
        return self.rank // inner % size, size

    def to_plain(self) -> list[Any]:
        """What JSON can hold."""
        return [*vars(self.mesh).values(), self.rank]

    @staticmethod
    def of_plain(plain: Sequence[Any]) -> "Coordinates":
        """What `to_plain` gave, or an earlier version's, which knew fewer axes."""
        *mesh, rank = plain
        return Coordinates(_mesh_of(tuple(tuple(each) if isinstance(each, list) else each for each in mesh)), rank)


@cache
def _mesh_of(sizes: tuple[Any, ...]) -> MeshShape:
    """One for all ranks of it: thousands of them are pickled together."""
    return MeshShape(*sizes)


ALONE = Coordinates(MeshShape(1, 1))


def plan_mesh(
    world_size: int, dp_replicate: int, tp: int = 1, pp: int = 1, blocks: tuple[int, ...] = (), cp: int = 1
) -> MeshShape:
    """Shape the mesh for a world size, whole units of `tp` x `cp` x `pp` ranks: HSDP where the replicas divide the
    number of units, FSDP over all of them where they do not.

    Neighbouring ranks share the arithmetic of a block, then the tokens of rows, then a replica, then a stage, so that
    the heavy traffic stays within nodes: it is messages between stages that cross them.

    >>> plan_mesh(world_size=8, dp_replicate=2)
    MeshShape(dp_replicate=2, dp_shard=4, tp=1, pp=1, blocks=(), cp=1)
    >>> plan_mesh(world_size=14, dp_replicate=2, tp=2)
    MeshShape(dp_replicate=1, dp_shard=7, tp=2, pp=1, blocks=(), cp=1)
    """
    assert world_size >= 1, f"{world_size=}"
    assert dp_replicate >= 1, f"{dp_replicate=}"
    assert world_size % (tp * cp * pp) == 0, f"{world_size=} {tp=} {cp=} {pp=}"
    num_units = world_size // (tp * cp * pp)
    replicas = dp_replicate if num_units % dp_replicate == 0 else 1
    return MeshShape(replicas, num_units // replicas * cp, tp, pp, blocks, cp)
