"""The shape of the device mesh at a world size. Pure arithmetic, the same on every rank."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """Ranks as a grid: `dp_replicate` copies of the model, each sharded over `dp_shard` ranks."""

    dp_replicate: int
    dp_shard: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes by name, outermost first; FSDP alone has one, HSDP two."""
        if self.dp_replicate == 1:
            return {"dp_shard": self.dp_shard}
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}


def plan_mesh(world_size: int, dp_replicate: int) -> MeshShape:
    """Shape the mesh for a world size: HSDP where the replicas divide it, FSDP over all ranks where they do not.

    Neighbouring ranks share a replica, so that the heavy traffic of sharding stays within nodes.

    >>> plan_mesh(world_size=8, dp_replicate=2)
    MeshShape(dp_replicate=2, dp_shard=4)
    >>> plan_mesh(world_size=7, dp_replicate=2)
    MeshShape(dp_replicate=1, dp_shard=7)
    """
    assert world_size >= 1, f"{world_size=}"
    assert dp_replicate >= 1, f"{dp_replicate=}"
    if world_size % dp_replicate:
        return MeshShape(1, world_size)
    return MeshShape(dp_replicate, world_size // dp_replicate)
