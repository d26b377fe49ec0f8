"""What to read from where: (spans that sources hold, spans that this rank wants) -> reads. Pure, no I/O.

Each wanted element is read exactly once, in pieces as long as the sources allow.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regrow.checkpoint.layout import Span
from regrow.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """A span and the file that holds it; several may hold the same one."""

    file: str
    span: Span
    distance: int = 0  # from the reader: 0 its own node, 1 another, 2 storage


@dataclass(frozen=True)
class Read:
    """Copy elements [start, stop) of the tensor from `source` to the wanted span at index `want`."""

    source: Source
    want: int
    start: int
    stop: int


def plan_reads(have: Iterable[Source], want: Sequence[Span], *, reader: int = 0) -> list[Read]:
    """Cover every wanted span from the sources, the nearest ones.

    Of equally near copies each `reader` begins with another one, so that readers share them out. Sources overlap only
    where they hold equal spans. Raises CheckpointError naming the tensor and the elements that no source holds.
    """
    by_name: dict[str, list[Source]] = defaultdict(list)
    for source in _one_of_each(have, reader):
        by_name[source.span.name].append(source)
    starts = {}
    for name, sources in by_name.items():
        sources.sort(key=lambda source: (source.span.start, -source.span.stop))
        starts[name] = [source.span.start for source in sources]

    reads = []
    for index, span in enumerate(want):
        sources, at = by_name.get(span.name, []), span.start
        # the last source that starts at or before `at`; sources of one tensor do not nest
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


def _one_of_each(have: Iterable[Source], reader: int) -> list[Source]:
    """The copy of each span that this reader takes."""
    copies: dict[tuple[str, int, int], list[Source]] = defaultdict(list)
    for source in have:
        if source.span.num_elements:
            copies[source.span.name, source.span.start, source.span.stop].append(source)
    chosen = []
    for number, same in enumerate(copies.values()):
        near = min(source.distance for source in same)
        nearest = sorted((source for source in same if source.distance == near), key=lambda source: source.file)
        chosen.append(nearest[(reader + number) % len(nearest)])
    return chosen
