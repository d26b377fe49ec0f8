"""A host that several users share: a keeper takes no folder that another user made or may write to."""

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from regrow.config.schema import PretrainConfig
from regrow.errors import CheckpointError
from regrow.record.log import METRIC_KEYS, RunLog
from regrow.runtime.keeper import delete_abandoned
from regrow.state.disk import store
from regrow.state.memory.node import LOCK, KeeperNode, delete_run
from support.keepers import RUN, SECRET, cluster, entries_of, snapshot, state
from support.opened import open_run
from support.unprivileged import NOBODY


def keeper(folder: Path) -> None:
    node = KeeperNode(folder, node="n", host="127.0.0.1", secret=SECRET, run_id=RUN, report=lambda sealed: None)
    node.close(delete=True)


def of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    os.chown(folder, NOBODY, NOBODY)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(
            of_another_user,
            rf"belongs to user {NOBODY}, keepers here are user {os.geteuid()}: have it deleted",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user"),
        ),
        (open_to_all, r"is drwxrwxrwx, and a keeper's folder is its user's alone \(drwx------\): delete it"),
        (a_link, r"is lrwxrwxrwx, and a keeper's folder is its user's alone"),
    ],
)
def test_a_keepers_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "memory")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=said):
        keeper(tmp_path / "memory")
    assert set(tmp_path.rglob("*")) == before


def test_what_a_keeper_makes_is_its_users_alone(tmp_path: Path) -> None:
    keeper(tmp_path / "memory")  # and one that an earlier keeper left is taken again
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 1, 2)
        for node in nodes:
            assert stat.S_IMODE(node.keeper.folder.stat().st_mode) == 0o700
            keeper_again = node.keeper.folder
            node.keeper.close(delete=False)
            keeper(keeper_again)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_another_users_leftovers_are_let_be_whatever_they_are(tmp_path: Path) -> None:
    theirs, ours, mine = (tmp_path / f"regrow-{run * 16}-{'0' * 12}" for run in "abc")
    for folder in (theirs, ours):
        folder.mkdir()
        os.mkfifo(folder / "unread")
        os.utime(folder, (0, 0))
    os.mkfifo(theirs / LOCK)  # to open it would wait for ever
    os.utime(theirs / LOCK, (0, 0))
    os.utime(theirs, (0, 0))
    os.chown(theirs, NOBODY, NOBODY)
    (ours / LOCK).touch()
    (ours / "unread").unlink()
    for path in (ours / LOCK, ours):
        os.utime(path, (0, 0))
    begun = time.monotonic()
    delete_abandoned(mine, 60.0)
    assert time.monotonic() - begun < 10
    assert theirs.exists()
    assert not ours.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_at_the_end_of_a_run_another_users_folders_of_its_id_are_let_be(tmp_path: Path) -> None:
    theirs, ours, mine = (tmp_path / f"regrow-{'a' * 16}-{node * 12}" for node in "012")
    for folder in (theirs, ours, mine):
        folder.mkdir()
    os.mkfifo(theirs / LOCK)  # to open it would wait for ever
    os.chown(theirs, NOBODY, NOBODY)
    (ours / LOCK).touch()
    deleting = threading.Thread(target=delete_run, args=(mine, f"regrow-{'a' * 16}-*"), daemon=True)
    deleting.start()
    deleting.join(30.0)
    assert not deleting.is_alive()
    assert [theirs.exists(), ours.exists(), mine.exists()] == [True, False, False]


def test_nothing_that_no_keeper_has_made_is_deleted_where_snapshots_are_kept(tmp_path: Path) -> None:
    """`snapshot.folder=/tmp`, with a checkout, the shard cache, a model that is evaluated, and a storage path in it."""
    names = ["regrow-main/platform", "regrow-shards-0/ab", "regrow-evaluate-x1/model", "regrow-runs/debug/checkpoints"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))
        os.utime(tmp_path / name.partition("/")[0], (0, 0))
    delete_abandoned(tmp_path / f"regrow-{'c' * 16}-{'0' * 12}", 60.0)
    assert all((tmp_path / name).exists() for name in names)


def test_no_file_of_a_run_is_written_by_other_users(tmp_path: Path) -> None:
    before = os.umask(0o022)  # as systems have it
    try:
        config = PretrainConfig()
        config.run.storage_path, config.run.name = str(tmp_path), "shared"
        run = open_run(config, manifest_sha256="ab" * 32)
        log = RunLog(run.folder)
        log.begin(1, 0)
        log.row(dict.fromkeys(METRIC_KEYS, 0) | {"step": 1, "generation": 1})
        log.close()
        scalars = {"step": 1, "cursor": 12, "tokens_seen": 768}
        store.save(run.folder / "checkpoints", entries_of(0, 1, state(1)), scalars=scalars, run_id=RUN, generation=1)
    finally:
        os.umask(before)
    found = [tmp_path / "shared", *(tmp_path / "shared").rglob("*")]
    assert len(found) >= 7
    assert [path for path in found if path.stat().st_mode & 0o022] == []
