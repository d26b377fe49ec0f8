"""Folders of files, the same behaviour on local disk and behind pyarrow.fs (here: fsspec's memory store)."""

import errno
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from regrow.errors import GroupOver
from regrow.storage import LocalStorage, RemoteStorage, Storage, StorageError, StorageUnreachable, path_of


class ServerBusyError(Exception):
    """As clients that fsspec uses raise them: no OSErrors."""


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage.at(tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_files_come_back_whole_and_in_ranges(storage: Storage) -> None:
    assert (storage / "a").write_chunks("b/data", [b"abc", memoryview(b"defg")]) == 7
    assert storage.read_bytes("a/b/data") == b"abcdefg"
    assert storage.read_range("a/b/data", 2, 3) == b"cde"
    assert storage.read_range("a/b/data", 5, 100) == b"fg"
    storage.write_bytes("a/b/data", b"new")
    assert storage.read_bytes("a/b/data") == b"new"


def test_listing_and_deleting(storage: Storage) -> None:
    for name in ("x/2", "x/1", "y"):
        storage.write_bytes(name, b"1")
    assert storage.list() == ["x", "y"]
    assert storage.list("x") == ["1", "2"]
    assert storage.list("nowhere") == []
    assert storage.exists("x/1")
    storage.delete("x")
    storage.delete("y")
    storage.delete("nowhere")
    assert not storage.exists("x/1")
    assert storage.list() == []


def test_a_missing_file_is_told_apart_at_once(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("nothing")
    with pytest.raises(FileNotFoundError):
        storage.read_range("nothing", 0, 1)


def test_an_error_of_reading_names_the_file(tmp_path: Path) -> None:
    storage, file = Storage.at(tmp_path), tmp_path / "unreadable"
    file.symlink_to("/proc/self/mem")
    reads: list[Callable[[], object]] = [
        lambda: storage.read_bytes(file.name),
        lambda: storage.read_range(file.name, 3, 4),
        lambda: storage.read_into(file.name, 3, memoryview(bytearray(4))),
    ]
    for read in reads:
        with pytest.raises(OSError, match=f"Input/output error: '{file}'") as raised:
            read()
        assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(file))


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    storage.write_bytes("file", b"old")

    def chunks() -> object:
        yield b"half"
        raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        storage.write_chunks("file", chunks())  # type: ignore[arg-type]
    assert storage.read_bytes("file") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", [OSError, ServerBusyError])
def test_transient_errors_are_retried_and_lasting_ones_name_the_file(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    import regrow.storage as module

    storage = Storage.at(f"memory://{uuid.uuid4().hex}")
    storage.write_bytes("file", b"data")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    failures = iter([OSError("reset by peer"), kind("503")])
    real = storage.open_file  # type: ignore[attr-defined]

    def flaky(path: str) -> object:
        for error in failures:
            raise error
        return real(path)

    monkeypatch.setattr(storage, "open_file", flaky)
    assert storage.read_bytes("file") == b"data"

    monkeypatch.setattr(module, "RETRY_DEADLINE_S", 0.1)
    monkeypatch.setattr(storage, "open_file", lambda path: (_ for _ in ()).throw(kind("gone for good")))
    with pytest.raises(OSError, match=r"/file: still failing after 0 s: gone for good"):
        storage.read_bytes("file")


def test_what_takes_longer_than_the_deadline_is_tried_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 100 GB takes minutes: its write was given up at the first error, "still failing after 120 s"."""
    import regrow.storage as module

    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    storage, tries = Storage.at(f"memory://{uuid.uuid4().hex}"), list[float]()
    open_stream = storage.fs.open_output_stream  # type: ignore[attr-defined]

    def slow(num_failures: int) -> SimpleNamespace:
        def opened(path: str) -> object:
            tries.append(now[0])
            now[0] += 300.0
            if len(tries) <= num_failures:
                raise OSError("503 SlowDown")
            return open_stream(path)

        return SimpleNamespace(open_output_stream=opened, type_name="py::fsspec")

    storage.fs = slow(1)  # type: ignore[attr-defined]
    assert storage.write_chunks("file", [b"data"]) == 4
    assert len(tries) == 2
    tries.clear()
    storage.fs = slow(100)  # type: ignore[attr-defined]
    with pytest.raises(StorageUnreachable, match=r"/file: still failing after 120 s: 503 SlowDown"):
        storage.write_chunks("file", [b"data"])
    assert len(tries) == 2


def test_who_waits_for_a_store_that_fails_is_asked_whether_it_still_wants_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import regrow.storage as module

    storage = Storage.at(f"memory://{uuid.uuid4().hex}")
    slept_s, looks = list[float](), list[int]()
    monkeypatch.setattr(module.time, "sleep", slept_s.append)
    monkeypatch.setattr(storage, "open_file", lambda path: (_ for _ in ()).throw(OSError("reset by peer")))

    def look() -> None:
        looks.append(len(slept_s))
        if len(slept_s) == 20:
            raise GroupOver("it is over")

    storage.look = look
    with pytest.raises(GroupOver):
        storage.read_bytes("file")
    assert max(slept_s) <= 0.5
    assert set(looks) == set(range(21))
    with pytest.raises(GroupOver):
        (storage / "folder").read_bytes("file")


def test_a_google_store_that_is_away_is_not_asked_again_by_arrow_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 15 minutes, in which no deadline of ours was looked at."""
    import regrow.storage as module

    monkeypatch.setattr(module, "GCS_RETRY_S", 0.5)
    opened = Storage.at("gs://anonymous@b/x?scheme=http&endpoint_override=127.0.0.1%3A1")
    opened.retry_s = 1.0
    raised: SimpleQueue[Exception | None] = SimpleQueue()

    def ask(folder: Storage) -> None:
        try:
            folder.exists("y")
            raised.put(None)
        except Exception as error:  # carried over to the test's thread
            raised.put(error)

    for folder in (opened, pickle.loads(pickle.dumps(opened))):
        threading.Thread(target=ask, args=(folder,), daemon=True).start()
    for _ in range(2):
        error = raised.get(timeout=60.0)
        assert isinstance(error, StorageUnreachable)
        assert str(error).startswith(f"{opened / 'y'}: still failing after 1 s: ")


def test_a_google_store_is_asked_for_as_long_as_its_uri_says() -> None:
    plain, short, long = (
        RemoteStorage.from_uri(f"gs://b{options}").fs
        for options in ("", "?retry_limit_seconds=4", "?retry_limit_seconds=60")
    )
    assert plain.equals(short)
    assert not plain.equals(long)


def test_a_read_is_not_begun_where_none_wants_it_any_more(storage: Storage) -> None:
    storage.write_bytes("folder/file", b"data")

    def look() -> None:
        raise GroupOver("it is over")

    storage.look = look
    below = storage / "folder"
    reads: list[Callable[[], object]] = [
        lambda: below.read_bytes("file"),
        lambda: below.read_range("file", 1, 2),
        lambda: below.read_into("file", 1, memoryview(bytearray(2))),
    ]
    for read in reads:
        with pytest.raises(GroupOver):
            read()


def test_locations_are_paths_or_uris(tmp_path: Path) -> None:
    assert isinstance(Storage.at(f"file://{tmp_path}"), LocalStorage)
    assert Storage.at(tmp_path).join("a", "b").local_path == tmp_path / "a" / "b"
    with pytest.raises(StorageError, match="cannot open storage 'nope://x'"):
        Storage.at("nope://x")
    with pytest.raises(StorageError, match="not a local folder"):
        _ = Storage.at("memory://x").local_path


@pytest.mark.parametrize(
    "uri", ["s3://me:pw12345@b/x?region=us-east-1", "abfss://c@a.dfs.core.windows.net/x?sig=pw12345"]
)
def test_a_uri_with_credentials_opens_nothing_and_is_not_shown(uri: str) -> None:
    """jobs.evaluate wrote it into results.json."""
    with pytest.raises(StorageError, match="a storage URI has a user and a password, or a signature") as caught:
        Storage.at(uri)
    assert "pw12345" not in str(caught.value)
    with pytest.raises(StorageError, match=r"^a URI is no place of this machine's file system") as caught:
        path_of(uri)
    assert "pw12345" not in str(caught.value)


def test_a_tilde_is_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/x") == path_of(f"file://{tmp_path}/x") == Storage.at("~/x").local_path == tmp_path / "x"
    assert path_of("runs/~") == Path("runs/~")
    with pytest.raises(StorageError, match=r"^s3://b/x is no place of this machine.s file system; name a path$"):
        path_of("s3://b/x")  # jobs.simulate and jobs.report wrote into a folder called s3:
    with pytest.raises(StorageError, match=r"^~no-such-user/x is below a home that is not known .*; name it in full$"):
        Storage.at("~no-such-user/x")


def test_the_options_of_a_uri_stay_behind_what_is_joined_to_it() -> None:
    folder = RemoteStorage(None, "b/x", "s3://b/x/?region=us-east-1&scheme=http") / "y" / "z"
    assert (folder.root, str(folder)) == ("b/x/y/z", "s3://b/x/y/z?region=us-east-1&scheme=http")
    assert str(RemoteStorage(None, "b", "gs://b") / "y") == "gs://b/y"


def test_what_is_sent_again_is_made_again_and_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import regrow.storage as module

    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    storage = Storage.at(f"memory://{uuid.uuid4().hex}")
    made: list[int] = []

    class Pieces:
        def __iter__(self) -> Iterator[bytes]:
            for number in range(3):
                made.append(number)
                if made == [0, 1]:
                    raise OSError("the store is away")
                yield bytes([number]) * 3_000_000

    assert storage.write_chunks("file", Pieces()) == 9_000_000
    assert made == [0, 1, 0, 1, 2]
    assert storage.read_bytes("file") == b"".join(bytes([number]) * 3_000_000 for number in range(3))
