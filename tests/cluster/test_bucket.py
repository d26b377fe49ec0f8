"""A run whose folder is in a bucket, and the second job of it: the newer one goes on, the older one ends in a line."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from regrow.record.log import read_events, read_metrics
from regrow.state.disk.catalog import committed_steps, open_checkpoint
from regrow.storage import Storage
from support.cluster import SMALL, Job
from support.corpus import write_corpus
from support.s3 import s3_server

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # tests/dist has two real jobs on one bucket, without Ray
VOCAB = 512


@pytest.fixture
def bucket() -> Iterator[str]:
    with s3_server() as uri:
        yield uri


def test_of_two_jobs_on_one_bucket_the_newer_one_goes_on_and_the_older_one_ends_in_a_line(
    tmp_path: Path, bucket: str
) -> None:
    """As a head behind a partition and the cluster that is started for it: each has a Ray of its own."""
    rows = np.random.default_rng(0).integers(0, VOCAB, (2000, 17), dtype=np.uint32)
    write_corpus(
        tmp_path / "corpus", rows, rows_per_group=8, rows_per_shard=512, vocab_size=VOCAB, validation=rows[:64]
    )
    run = Storage.at(f"{bucket}/runs/one")
    settings = [
        *(f"run.storage_path={bucket}/runs", "run.name=one", f"+data.corpora.rows={tmp_path}/corpus"),
        *(*SMALL, "data.seq_len=16", f"data.vocab_size={VOCAB}", f"model.vocab_size={VOCAB}"),
        *("train.steps=100000", "optim.global_batch_seqs=12", "checkpoint.every_steps=20", "checkpoint.keep=2"),
        *("cluster.min_workers=1", "cluster.max_workers=1"),
    ]
    with ExitStack() as jobs:
        old = jobs.enter_context(Job(tmp_path, "old", *settings))
        old.wait_for(lambda: len(committed_steps(run / "checkpoints")) > 0, 240.0)
        new = jobs.enter_context(Job(tmp_path, "new", *settings))
        assert old.wait(240.0) == 1
        assert "is written by another job now (process " in old.printed()
        assert "Traceback" not in old.printed()
        before = committed_steps(run / "checkpoints")[0]
        new.wait_for(lambda: committed_steps(run / "checkpoints")[0] > before, 240.0)
        new.interrupt()
        assert new.wait(120.0) == 130, new.printed()
    logged = read_metrics(run)
    assert [row["step"] for row in logged] == list(range(1, len(logged) + 1)), "one row a step, of whichever job"
    assert {row["generation"] for row in logged} == {1, 2}
    events = read_events(run)
    assert [each["reason"] for each in events if each["event"] == "stopped"] == ["interrupted"], "the newer one's"
    run_id = next(each["run_id"] for each in events if each["event"] == "submitted")
    for step in committed_steps(run / "checkpoints"):
        open_checkpoint(run / "checkpoints", step, run_id=run_id)
    assert run.list("writers") == ["000001.json", "000002.json"]
