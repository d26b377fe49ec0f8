"""Lists with an entry for each rank, in events: written as what has changed since the event of the same kind before.

Of 16,384 ranks such a list has some 3 MB, and a node that dies takes eight entries. So a writer that has written one
writes of the next, where it has at least 128 entries, which ranges of the earlier one are in it again:

    "members": {"since": 41, "entries": [[0, 8000], [8008, 16384], {"id": ...}]}

These are the entries 0 to 7,999 and 8,008 to 16,383 of what generation 41's event of the same kind has, and a new one.
"""

from typing import Any

from regrow.record.events import Forming, Generation, Row

LISTS = {Forming.name: "members", Generation.name: "workers"}
OF_ALL_RANKS = {Forming.name: ("members", "ports"), Generation.name: ("workers",)}  # fields
FEWEST = 128  # entries; shorter lists are written whole, for people


class RelativeLists:
    """What the newest events had, of a writer or a reader of one log."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, list[Row]]] = {}  # by event: the generation and its whole list

    def shorten(self, row: Row) -> Row:
        """What is to be written of a row. It counts as written once `keep` is told."""
        entries = _list_of(row)
        if entries is None or len(entries) < FEWEST or row["event"] not in self._newest:
            return row
        since, before = self._newest[row["event"]]
        return row | {LISTS[row["event"]]: {"since": since, "entries": _changes(before, entries)}}

    def keep(self, row: Row) -> None:
        """A whole row was written, or read."""
        entries = _list_of(row)
        if entries is not None and row["generation"] >= self._newest.get(row["event"], (-1, []))[0]:
            self._newest[row["event"]] = row["generation"], entries

    def whole(self, row: Row) -> Row:
        """A row as it was before it was shortened; no entry is known where the line that it goes on from is damaged."""
        name = LISTS.get(row["event"], "")
        if isinstance(relative := row.get(name), dict):
            since, before = self._newest.get(row["event"], (None, []))
            if since != relative["since"]:
                return row | {name: []}
            entries: list[Row] = []
            for each in relative["entries"]:
                entries += before[each[0] : each[1]] if isinstance(each, list) else [each]
            row = row | {name: entries}
        self.keep(row)
        return row


def without_lists(row: Row) -> Row:
    """What a console shows of an event."""
    return {key: value for key, value in row.items() if key not in OF_ALL_RANKS.get(row["event"], ())}


def _list_of(row: Row) -> list[Row] | None:
    entries = row.get(LISTS.get(row["event"], ""))
    return entries if isinstance(entries, list) else None


def _changes(before: list[Row], entries: list[Row]) -> list[Any]:
    """Ranges [begin, end) of the earlier list, and what is not in it."""
    places = {(each.get("node"), each.get("pid")): number for number, each in enumerate(before)}
    found: list[Any] = []
    for each in entries:
        last = found[-1] if found and isinstance(found[-1], list) else None
        at = last[1] if last else len(before)
        if at >= len(before) or before[at] != each:
            at, last = places.get((each.get("node"), each.get("pid")), len(before)), None
        if at >= len(before) or before[at] != each:
            found.append(each)
        elif last:
            last[1] += 1
        else:
            found.append([at, at + 1])
    return found
