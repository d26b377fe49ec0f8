"""Which tokens of a row each rank of context parallelism has. Pure.

A row is cut in 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r (arXiv:2407.21783, 3.3.2): a token attends to
those before it, so a chunk from the head and one from the tail are the same work for all.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Of rank `rank` of `cp` that have the same rows."""

    rank: int = 0
    cp: int = 1

    def chunks(self, seq_len: int) -> tuple[range, ...]:
        """Positions of its tokens, in order. Rows of `seq_len` tokens, a multiple of 2 * cp; alone it has all.

        >>> Share(rank=1, cp=2).chunks(16)
        (range(4, 8), range(8, 12))
        """
        if self.cp == 1:
            return (range(seq_len),)
        assert seq_len % (2 * self.cp) == 0, f"{seq_len=} {self.cp=}"
        size = seq_len // (2 * self.cp)
        return tuple(range(each * size, (each + 1) * size) for each in (self.rank, 2 * self.cp - 1 - self.rank))

    def num_pairs(self, seq_len: int) -> int:
        """Of a token of its own and one that it sees, itself among them.

        >>> [Share(rank, cp=4).num_pairs(64) for rank in range(4)]
        [520, 520, 520, 520]
        """
        return sum(sum(each) + len(each) for each in self.chunks(seq_len))


WHOLE = Share()
