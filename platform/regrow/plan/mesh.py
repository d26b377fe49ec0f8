"""The shape of the device mesh at a world size. Pure arithmetic, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class MeshShape:
    """Ranks as a grid: `dp_replicate` copies of the model, each sharded over `dp_shard` units of `pp` x `tp` ranks."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    pp: int = 1
    blocks: tuple[int, ...] = ()  # with pp: how many of the model's each stage has; stage s is on rank s % pp

    @property
    def num_units(self) -> int:
        """Data-parallel ranks: those that train on different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.num_units * self.tp * self.pp

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes by name, outermost first; FSDP alone has one, the others theirs where there are several ranks."""
        return {name: size for name, size in self.sizes.items() if size > 1 or name == "dp_shard"}

    @property
    def sizes(self) -> dict[str, int]:
        """Of all axes, also those of one rank."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    def unit_of(self, rank: int) -> int:
        """The data-parallel rank that a rank belongs to.

        >>> [MeshShape(dp_replicate=1, dp_shard=2, tp=2, pp=2).unit_of(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return rank // self.tp % self.num_units


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
        axes = list(self.mesh.axes.items())
        at = next((number for number, (name, _) in enumerate(axes) if name == axis), None)
        if at is None:
            return 0, 1
        size = axes[at][1]
        return self.rank // prod(size for _, size in axes[at + 1 :]) % size, size

    def to_plain(self) -> list[Any]:
        """What JSON can hold."""
        return [*vars(self.mesh).values(), self.rank]

    @staticmethod
    def of_plain(plain: Sequence[Any]) -> "Coordinates":
        """What `to_plain` gave, or an earlier version's, which knew fewer axes."""
        *mesh, rank = plain
        if isinstance(mesh[-1], list):
            mesh[-1] = tuple(mesh[-1])
        return Coordinates(MeshShape(*mesh), rank)


ALONE = Coordinates(MeshShape(1, 1))


def plan_mesh(world_size: int, dp_replicate: int, tp: int = 1, pp: int = 1, blocks: tuple[int, ...] = ()) -> MeshShape:
    """Shape the mesh for a world size, whole units of `tp` x `pp` ranks: HSDP where the replicas divide the number of
    units, FSDP over all of them where they do not.

    Neighbouring ranks share the arithmetic of a block, then a replica, then a stage, so that the heavy traffic stays
    within nodes: it is messages between stages that cross them.

    >>> plan_mesh(world_size=8, dp_replicate=2)
    MeshShape(dp_replicate=2, dp_shard=4, tp=1, pp=1, blocks=())
    >>> plan_mesh(world_size=14, dp_replicate=2, tp=2)
    MeshShape(dp_replicate=1, dp_shard=7, tp=2, pp=1, blocks=())
    """
    assert world_size >= 1, f"{world_size=}"
    assert dp_replicate >= 1, f"{dp_replicate=}"
    assert world_size % (tp * pp) == 0, f"{world_size=} {tp=} {pp=}"
    num_units = world_size // (tp * pp)
    replicas = dp_replicate if num_units % dp_replicate == 0 else 1
    return MeshShape(replicas, num_units // replicas, tp, pp, blocks)
