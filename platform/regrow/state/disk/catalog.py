"""Which checkpoints a folder holds: listed, opened and verified, retired. No torch, so that every process can.

`folder`, `checkpoints`: a run folder's folder of that name; `run_id`: the run's own, or None to take any run's.
`<folder>/step-00000100/` holds `g<generation>-<token>.safetensors`, `g<generation>-<token>.metadata` and `COMMIT`;
`DAMAGED` beside it where a run could not read what that COMMIT leads to, `KEEP` where retention never deletes it.
"""

import contextlib
import errno
import hashlib
import json
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from regrow.control.values import COMPUTED_WRONG
from regrow.errors import CheckpointError, ForeignCheckpointError, first_line
from regrow.plan.boxes import ITEM_BYTES, Box, Piece
from regrow.state.checksums import CHUNK_BYTES, hold
from regrow.state.disk.format import (
    COMMIT,
    DAMAGED,
    KEEP,
    STORED_CHUNK_BYTES,
    DataFile,
    Index,
    Layout,
    Stored,
    decode_header,
)
from regrow.state.disk.gather import check_header, read_checked
from regrow.state.disk.metadata import Metadata
from regrow.state.reshard import Source, plan_reads
from regrow.storage import Item, Result, Storage, in_threads

SAYS_SO = COMPUTED_WRONG.partition(";")[0]  # so begins what an older note says
PIECE_BYTES = 1024 * CHUNK_BYTES  # read and checked at a time

Advance = Callable[[int], None]  # is told of bytes as they are done
Start = Callable[[int], Advance]  # is told beforehand how many there will be


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(folder: Storage) -> list[int]:
    """Steps whose COMMIT exists, newest first, without those that are noted to be damaged.

    What it points to may still be damaged: `open_checkpoint` tells.
    """
    return committed_and_damaged(folder)[0]


def committed_and_damaged(folder: Storage) -> tuple[list[int], list[int]]:
    """`committed_steps`, and those that are noted to be damaged, newest first: where there is no other, as it may have
    been the reader that was wrong; but for those that a rank `computed_wrong`."""
    return _sorted_out(folder, _with_commit(folder))


def computed_wrong(folder: Storage, damaged: Sequence[int]) -> list[int]:
    """Of those that are noted to be damaged the ones that no reader may restore, however sound their files are."""
    return _those(folder, damaged, lambda step: _is_computed_wrong(_note_of(folder, step)))


def _is_computed_wrong(note: Mapping[str, Any] | None) -> bool:
    """An older note says so in words alone."""
    note = note or {}
    return bool(note.get("computed_wrong", str(note.get("detail")).startswith(SAYS_SO)))


def note_damaged(folder: Storage, step: int, detail: str, *, computed_wrong: bool = False) -> None:
    """What this step's COMMIT leads to cannot be read, or a rank computed it wrong: it counts no more, until another
    COMMIT takes its place.

    Raises OSError.
    """
    commit = hashlib.sha256(folder.read_bytes(f"{step_folder(step)}/{COMMIT}")).hexdigest()
    computed_wrong = computed_wrong or _is_computed_wrong(_note_of(folder, step))
    note = {"commit": commit, "detail": detail, "time": time.time(), "computed_wrong": computed_wrong}
    folder.write_bytes(f"{step_folder(step)}/{DAMAGED}", json.dumps(note).encode())


def damage_of(folder: Storage, step: int) -> str:
    """What a run found wrong with the COMMIT that is there, or empty."""
    note = _note_of(folder, step)
    return str(note["detail"] or "damaged") if note is not None else ""


def _note_of(folder: Storage, step: int) -> dict[str, Any] | None:
    """That of the COMMIT that is there."""
    try:
        note = json.loads(folder.read_bytes(f"{step_folder(step)}/{DAMAGED}"))
        commit = folder.read_bytes(f"{step_folder(step)}/{COMMIT}")
        is_its = note["commit"] == hashlib.sha256(commit).hexdigest() and "detail" in note
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return cast("dict[str, Any]", note) if is_its else None


def _sorted_out(folder: Storage, steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those that are not noted to be damaged, and those that are."""
    noted = set(_those(folder, steps, lambda step: bool(damage_of(folder, step))))
    return [step for step in steps if step not in noted], [step for step in steps if step in noted]


def _with_commit(folder: Storage) -> list[int]:
    return _those(folder, _steps(folder), lambda step: folder.exists(f"{step_folder(step)}/{COMMIT}"))


def _those(folder: Storage, steps: Sequence[int], is_one: Callable[[int], bool]) -> list[int]:
    return [step for step, is_it in zip(steps, _of_each(folder, is_one, steps), strict=True) if is_it]


def _of_each(folder: Storage, look: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Many at a time where each look is a request: a run may keep hundreds of checkpoints, of many thousand files."""
    return [look(item) for item in items] if folder.is_local else in_threads(look, items)


def _steps(folder: Storage) -> list[int]:
    """Of all folders, newest first."""
    names = (name for name in folder.list() if name.startswith("step-") and name[5:].isdigit())
    return sorted((int(name[5:]) for name in names), reverse=True)


def open_checkpoint(folder: Storage, step: int, *, run_id: str | None = None, with_files: bool = True) -> Index:
    """The verified index of a committed step.

    Raises CheckpointError if it is damaged, or another step's; ForeignCheckpointError if it is sound and another run's,
    or of a version that this code does not read.

    A restore does without the list of all files, which grows with the ranks that wrote them.
    """
    source = folder / step_folder(step)
    try:
        pointer = json.loads(source.read_bytes(COMMIT))
        name, sha256, size = pointer["index"], pointer["sha256"], pointer.get("bytes")  # before version 5: all of it
        content = source.read_bytes(name) if size is None else source.read_range(name, 0, size)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise CheckpointError(f"{source / COMMIT} does not lead to an index: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{source / name}: its sha256 is not the one in {COMMIT}; the file is damaged or swapped")
    index = Index.from_json(content, str(source / name), name)
    if run_id is not None and index.run_id != run_id:
        raise ForeignCheckpointError(f"{source} belongs to run {index.run_id}, not to {run_id}; move it away")
    if index.step != step:
        raise CheckpointError(f"{source} holds a checkpoint of step {index.step}")
    return _with_files(source, index) if with_files else index


def _with_files(source: Storage, index: Index) -> Index:
    return index if index.layout is None else replace(index, files=Metadata(source, index).files())


def is_unreadable(folder: Storage, error: OSError) -> bool:
    """Whether it is one file that cannot be read, as with a bad sector: storage itself answers."""
    try:
        return error.errno == errno.EIO and bool(folder.list())
    except OSError:
        return False


def problem_of(error: CheckpointError | OSError) -> str:
    """What is wrong with a checkpoint, and with which file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _multiples(steps: Sequence[int], keep_every_steps: int) -> list[int]:
    return [step for step in steps if keep_every_steps and step % keep_every_steps == 0]


def is_kept(folder: Storage, step: int) -> bool:
    """Whether retention never deletes this step's checkpoint."""
    return folder.exists(f"{step_folder(step)}/{KEEP}")


def retain(
    folder: Storage, *, keep: int, keep_every_steps: int = 0, apart: Container[int] = (), run_id: str | None = None
) -> list[int]:
    """Delete what is older than the newest `keep` checkpoints that are whole, uncommitted leftovers included.

    Those at multiples of `keep_every_steps` are marked, and what is marked stays for good, whatever is asked for later.
    Steps `apart` are just being written: they neither count nor go. Nor do those of another run than `run_id`, and of
    versions that this code does not read.

    The newest in time: where a run went back to an earlier step, what it had written past that counts no more, and
    goes once the run has passed it. COMMIT goes first, so that a deletion cut short leaves nothing that looks whole.
    Returns the steps deleted. Raises OSError where something could not be deleted; the rest is. Where storage does not
    answer, nothing is.
    """
    committed = _with_commit(folder)
    kept = _those(folder, committed, lambda step: is_kept(folder, step))
    for step in _multiples(committed, keep_every_steps):
        if step not in kept:
            folder.write_bytes(f"{step_folder(step)}/{KEEP}", json.dumps({"multiple_of": keep_every_steps}).encode())
            kept.append(step)
    passed_over = set(sorted(kept)[:-keep])  # not looked at: there may be many of them
    counting = [step for step in committed if step not in passed_over and step not in apart]
    sound = _sound(folder, _sorted_out(folder, counting)[0], keep, run_id)
    if len(sound) < keep:
        return []
    deleted, problems = [], []
    for step in reversed(_steps(folder)):
        if step < sound[-1] and step not in kept and step not in apart:
            try:
                if _is_foreign(folder, step, run_id):
                    continue
                folder.delete(f"{step_folder(step)}/{COMMIT}")
                folder.delete(step_folder(step))
                deleted.append(step)
            except OSError as error:
                problems.append(error)
    if problems:
        raise problems[0]
    return deleted


_whole: set[tuple[str, str]] = set()  # folders of steps and their metadata files that this process found whole


def _is_foreign(folder: Storage, step: int, run_id: str | None) -> bool:
    """Whether a step is another run's, or of a version that this code does not read.

    Raises OSError as `_passing_over_damage`.
    """
    with _passing_over_damage(folder):
        try:
            open_checkpoint(folder, step, run_id=run_id, with_files=False)
        except ForeignCheckpointError:
            return True
    return False


def _sound(folder: Storage, steps: Sequence[int], most: int, run_id: str | None) -> list[int]:
    """The first checkpoints that are whole, as far as a quick look tells, newest in time first, each older in steps.

    One that was found whole before is not looked at again: a large one has many thousand files.
    """
    found, sound = [], list[int]()
    for step in steps:
        with _passing_over_damage(folder):
            found.append((open_checkpoint(folder, step, run_id=run_id, with_files=False), step))
    for index, step in sorted(found, key=lambda each: (each[0].generation, each[1]), reverse=True):
        if len(sound) == most or (sound and step >= sound[-1]):
            continue
        source = folder / step_folder(step)
        name = (str(source), index.layout.name if index.layout is not None else "")  # before version 5: not remembered
        with _passing_over_damage(folder):
            if name not in _whole:
                check_sizes(folder, _with_files(source, index))
            if index.layout is not None:
                _whole.add(name)
            sound.append(step)
    return sound


@contextlib.contextmanager
def _passing_over_damage(folder: Storage) -> Iterator[None]:
    """Raises OSError where storage does not answer: what is there may be sound, and the newest in time."""
    try:
        yield
    except CheckpointError:
        pass
    except OSError as error:
        if not is_unreadable(folder, error):
            raise


def has_old(folder: Storage, *, keep: int, keep_every_steps: int = 0, apart: Container[int] = ()) -> bool:
    """Whether `retain` may find something to delete, by the names of what is there alone. Raises OSError."""
    committed = committed_steps(folder)
    newest = [step for step in committed if step not in apart][:keep]
    if len(newest) < keep:
        return False
    stay = _multiples(committed, keep_every_steps)
    old = [step for step in _steps(folder) if step < newest[-1] and step not in apart and step not in stay]
    return any(not is_kept(folder, step) for step in old)


def try_retain(
    folder: Storage, *, keep: int, keep_every_steps: int = 0, apart: Container[int] = (), run_id: str | None = None
) -> str:
    """`retain`, which training does not depend on: what to tell the user, or nothing."""
    try:
        retain(folder, keep=keep, keep_every_steps=keep_every_steps, apart=apart, run_id=run_id)
    except OSError as error:
        return f"old checkpoints were not all deleted, the next one tries again: {first_line(error)}"
    return ""


def read_headers(source: Storage, index: Index) -> dict[Source, Stored]:
    """What every data file in the step's folder `source` holds, and where. Raises CheckpointError as `read_header`."""
    return {
        Source(file.name, stored.piece): stored for file in index.files for stored in read_header(source, file, index)
    }


def read_header(source: Storage, file: DataFile, index: Index) -> list[Stored]:
    """What one data file holds. Raises CheckpointError where it is missing, or not the one that the index means."""
    try:
        data = source.read_range(file.name, 0, file.header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source / file.name}: named by the index but not there") from error
    return decode_header(data, file, index, str(source / file.name))


def read_chunks(source: Storage, file: str, stored: Stored, begin: int, end: int) -> memoryview:
    """Bytes [begin, end) of what is stored, whole chunks whose checksums hold. Raises CheckpointError where one does
    not."""
    try:
        data = memoryview(source.read_range(file, stored.offset + begin, end - begin))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source / file}: it was there, and is not any more") from error
    first = begin // CHUNK_BYTES
    if data.nbytes != end - begin or not hold(data, stored.crc[first : first - (begin - end) // CHUNK_BYTES]):
        raise CheckpointError(f"{source / file}: {stored.piece.box.name} fails its checksum; the file is damaged")
    return data


def check_sizes(folder: Storage, index: Index) -> None:
    """Raises CheckpointError where a file is not there or does not have the bytes that the index says."""
    source, sizes = folder / step_folder(index.step), [(file.name, file.num_bytes) for file in index.files]
    if index.layout is not None:
        sizes.append((index.layout.name, index.layout.num_bytes))

    def check_size(file: tuple[str, int]) -> None:
        name, num_bytes = file
        try:
            end = source.read_range(name, num_bytes - 1, 2)
        except FileNotFoundError as error:
            raise CheckpointError(f"{source / name}: named by the index but not there") from error
        if len(end) != 1:
            size = "more" if end else "fewer"
            raise CheckpointError(f"{source / name}: has {size} than its {num_bytes:,} bytes; the file is damaged")

    _of_each(source, check_size, sizes)


@dataclass(frozen=True)
class Found:
    """A step's folder, and what a look at it says."""

    step: int
    index: Index | None  # None where there is none that can be read
    problem: str  # why it cannot be restored; empty if nothing was found
    committed: bool = True
    is_kept: bool = False  # for good


def survey(checkpoints: Storage, run_id: str | None, step: int | None = None) -> list[Found]:
    """Every step's folder, or that of one, newest first, after a quick look: the index, and the size of every file.

    Raises CheckpointError where there is none.
    """
    return list(_looks(checkpoints, run_id, step))


def _looks(checkpoints: Storage, run_id: str | None, step: int | None) -> Iterator[Found]:
    steps = _steps(checkpoints)
    if not steps:
        raise CheckpointError(
            f"{checkpoints} holds no checkpoints; name the folder of a run, <run.storage_path>/<run.name>, that has one"
        )
    if step is not None and step not in steps:
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return (_look(checkpoints, each, run_id) for each in steps if step in (None, each))


def choose(checkpoints: Storage, run_id: str | None, step: int | None = None) -> tuple[Storage, Index]:
    """The folder again, and the index of a step, or of the newest one that a quick look finds sound.

    Raises CheckpointError where there is none.
    """
    newest = None
    for each in _looks(checkpoints, run_id, step):
        if each.index is not None and not each.problem:
            return checkpoints, each.index
        newest = newest or each
    assert newest is not None, "else there is none, which raises"
    raise CheckpointError(f"{checkpoints}/{step_folder(newest.step)} cannot be used: {newest.problem}")


def examine(checkpoints: Storage, run_id: str | None, step: int | None, start: Start) -> Iterator[Found]:
    """As `survey`, but what a quick look finds sound is read whole and checked."""
    for found in survey(checkpoints, run_id, step):
        if found.index is not None and not found.problem:
            try:
                verify(checkpoints, found.index, start(found.index.tensor_bytes))
            except (CheckpointError, OSError) as error:
                yield _wrong(checkpoints, found.step, found.index, error)
                continue
        yield found


def verify(checkpoints: Storage, index: Index, advance: Advance) -> None:
    """Read every byte and check it, and that the files hold every element.

    Raises CheckpointError naming the first file that is missing or damaged.
    """
    source = checkpoints / step_folder(index.step)
    check_sizes(checkpoints, index)
    if index.layout is not None:
        _verify_stacks(source, index, index.layout, advance)
        return
    sources = []
    for file in index.files:
        for stored in read_header(source, file, index):
            sources.append(Source(file.name, stored.piece))
            for begin in range(0, stored.piece.num_bytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, stored.piece.num_bytes)
                read_chunks(source, file.name, stored, begin, end)
                advance(end - begin)
    plan_reads(sources, [Piece.all_of(whole_box(index, name)) for name in index.tensors])


def _verify_stacks(source: Storage, index: Index, layout: Layout, advance: Advance) -> None:
    """Of version 5 and newer."""
    metadata = Metadata(source, index)
    for file in index.files:
        check_header(source, file)
    records = metadata.spans([(each, 0, each.stack.num_elements) for each in layout.stacks])
    found = []
    for each, placed in zip(layout.stacks, records, strict=True):
        for (first, offset, crc, file), last in zip(placed.tolist(), placed["first"][1:].tolist(), strict=False):
            found.append((file.decode(), offset, (last - first) * ITEM_BYTES[each.stack.dtype], crc, each.stack))
    for name, offset, num_bytes, crc, stack in sorted(found, key=lambda each: each[:2]):
        (checks,) = metadata.crc([(crc, crc - (-num_bytes // STORED_CHUNK_BYTES))])
        for begin in range(0, num_bytes, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, num_bytes)
            some = checks[begin // STORED_CHUNK_BYTES :]
            read_checked(source, name, offset + begin, offset + end, some, str(stack))
            advance(end - begin)


def whole_box(index: Index, name: str) -> Box:
    """All of a tensor, as the index describes it."""
    dtype, shape = index.tensors[name]
    return Box.whole(name, shape, dtype)


def _wrong(checkpoints: Storage, step: int, index: Index | None, error: CheckpointError | OSError) -> Found:
    """What an error says of a checkpoint. A run that trains may have deleted it meanwhile, COMMIT first: no damage."""
    if not checkpoints.exists(f"{step_folder(step)}/{COMMIT}"):
        return Found(step, index, "deleted meanwhile", committed=False)
    return Found(step, index, _of_one(checkpoints, error))


@contextlib.contextmanager
def may_be_deleted(checkpoints: Storage, *steps: int) -> Iterator[None]:
    """While these are read. Raises CheckpointError that says so where a run that trains deleted one meanwhile."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        for step in steps:
            if not checkpoints.exists(f"{step_folder(step)}/{COMMIT}"):
                raise CheckpointError(
                    f"{checkpoints / step_folder(step)} was deleted meanwhile, by its run (checkpoint.keep); choose a "
                    f"newer one, or put a file {KEEP} beside its {COMMIT} first"
                ) from error
        raise


def _of_one(checkpoints: Storage, error: CheckpointError | OSError) -> str:
    """What is wrong with one checkpoint. Raises the error where it is storage that does not answer: an older one must
    not take the newest one's place for that."""
    if isinstance(error, OSError) and not is_unreadable(checkpoints, error):
        raise error
    return problem_of(error)


def _look(checkpoints: Storage, step: int, run_id: str | None) -> Found:
    index = None
    try:
        if not checkpoints.exists(f"{step_folder(step)}/{COMMIT}"):
            return Found(step, None, f"not committed: it has no {COMMIT}", committed=False)
        index = open_checkpoint(checkpoints, step, run_id=run_id)
        check_sizes(checkpoints, index)
        noted, kept = damage_of(checkpoints, step), is_kept(checkpoints, step)
    except (CheckpointError, OSError) as error:
        return _wrong(checkpoints, step, index, error)
    if noted:
        return Found(step, index, f"a run could not read it ({noted}); delete {DAMAGED} there if it is sound after all")
    return Found(step, index, "", is_kept=kept)
