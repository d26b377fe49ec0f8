"""What to read from where: (spans that sources hold, spans that this rank wants) -> reads. Pure, no I/O.

Each wanted element is read exactly once, in pieces as long as the sources allow.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from regrow.errors import CheckpointError
from regrow.state.layout import Span

Copy = TypeVar("Copy")


@dataclass(frozen=True)
class Source:
    """A span and the file that holds it."""

    file: str
    span: Span


@dataclass(frozen=True)
class Read:
    """Copy elements [start, stop) of the tensor from `source` to the wanted span at index `want`."""

    source: Source
    want: int
    start: int
    stop: int


def plan_reads(have: Iterable[Source], want: Sequence[Span]) -> list[Read]:
    """Cover every wanted span from the sources, which do not overlap.

    Raises CheckpointError naming the tensor and the elements that no source holds.
    """
    by_name: dict[str, list[Source]] = defaultdict(list)
    for source in have:
        if source.span.num_elements:
            by_name[source.span.name].append(source)
    starts = {}
    for name, sources in by_name.items():
        sources.sort(key=lambda source: (source.span.start, -source.span.stop))
        starts[name] = [source.span.start for source in sources]

    reads = []
    for index, span in enumerate(want):
        sources, at = by_name.get(span.name, []), span.start
        # the last source that starts at or before `at`
        following = bisect_right(starts.get(span.name, []), at) - 1
        while at < span.stop:
            if not 0 <= following < len(sources) or not (
                sources[following].span.start <= at < sources[following].span.stop
            ):
                raise CheckpointError(
                    f"{span.name}: no file holds elements {at} and on (wanted {span.start}:{span.stop})"
                )
            stop = min(span.stop, sources[following].span.stop)
            reads.append(Read(sources[following], index, at, stop))
            at, following = stop, following + 1
    return reads


def nearest(copies: Sequence[tuple[int, Copy]], *, reader: int) -> Copy:
    """One of several (distance, copy), at least one: of the nearest, each `reader` takes another, to share them out.

    >>> [nearest([(1, "a"), (1, "b"), (2, "c")], reader=reader) for reader in range(3)]
    ['a', 'b', 'a']
    """
    least = min(distance for distance, _ in copies)
    near = [copy for distance, copy in copies if distance == least]
    return near[reader % len(near)]
