"""Which block of a parameter a rank holds where tensor parallelism cuts it, before FSDP shards its rows. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Block `block` of `num_blocks` equal ones, of rows or of columns."""

    num_blocks: int = 1
    block: int = 0
    by_rows: bool = True

    @property
    def blocks(self) -> tuple[int, int]:
        """How many (blocks of rows, blocks of columns) there are."""
        return (self.num_blocks, 1) if self.by_rows else (1, self.num_blocks)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the parameter, from a block's.

        >>> Cut(2, 1, by_rows=False).whole_shape((4, 3))
        (4, 6)
        """
        if self.num_blocks == 1:
            return shape
        rows, columns = shape
        return (rows * self.blocks[0], columns * self.blocks[1])


WHOLE = Cut()
