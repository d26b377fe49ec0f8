"""One command on a running cluster with nothing prepared: it looks at the corpus, prepares it as Ray tasks, trains.

The cluster file has the structure of conf/cluster/h100x64.yaml: raylets that others started, found by `auto`, documents
in parquet files, a tokenizer of others, rows of 8,192 tokens.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster

from regrow.config.schema import DataConfig
from regrow.data.prepare.tokenizer import train_tokenizer
from regrow.drill.processes import of_ray, send, wait_until_gone
from regrow.record.log import read_events, read_metrics
from regrow.storage import Storage
from support.corpus import WordRecipe

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
FILES, STEPS = 10, 4
CLUSTER_FILE = """\
# @package _global_
# Three raylets of one worker each in a running Ray cluster; goes on with two.
defaults:
  - override /model: debug
  - override /data: fineweb_edu
cluster:
  name: stand_in
  address: auto
  min_workers: 2
  max_workers: 3
model:
  dim: 64
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
  ffn_dim: 160
  vocab_size: 50304
data:
  source: {source}
  tokenizer: {tokenizer}
  vocab_size: 50304
  seq_len: 8192
optim:
  global_batch_seqs: 6
  num_slices: 6  # 2 and 3 ranks divide it
train:
  steps: {steps}
  validate_every_steps: 2
parallel:
  activation_checkpoint: selective
checkpoint:
  every_steps: 2
"""


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[str]:
    """The address of three raylets; whatever a job left in them ends with them."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2, wait=True)
        yield nodes.address
    finally:
        nodes.shutdown()
        wait_until_gone(send(signal.SIGKILL, of_ray(str(ray_folder.parent))), 20)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder of parquet files with 68 MB of text, so that tasks prepare it; tokenizer): real ones where there are."""
    folder, tokenizer = tmp_path_factory.mktemp("source"), SHARED / "tokenizers" / "gpt2" / "tokenizer.json"
    files = sorted((SHARED / "corpus").glob("000_00000.parquet"))
    if not files or not tokenizer.is_file():
        recipe, config = WordRecipe(num_documents=200), DataConfig()
        texts = [document.text for document in recipe.documents(config, *recipe.pieces(config))]
        tokenizer = folder / "bpe.json"
        tokenizer.write_text(train_tokenizer(texts, vocab_size=1000).to_str())
        files = [folder / "words"]
        # each is another one: which split a document is in, its hash says
        documents = [" ".join([str(number), *(texts[(number + k) % 200] for k in range(5))]) for number in range(2000)]
        pq.write_table(pa.table({"text": documents}), files[0], use_dictionary=False)
    for number in range(FILES):
        (folder / f"{number:03d}.parquet").symlink_to(files[number % len(files)])
    return folder, tokenizer


@pytest.mark.long
@pytest.mark.timeout(900)  # two jobs, of which the second tokenizes 68 MB on this machine's cores
def test_from_nothing_to_trained_steps_and_a_kill_costs_no_piece_that_was_done(
    cluster: str, documents: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    source, tokenizer = documents
    content = CLUSTER_FILE.format(source=source, tokenizer=tokenizer, steps=STEPS)
    (tmp_path / "cluster" / "stand_in.yaml").write_text(content)
    command = [sys.executable, "-m", "jobs.pretrain", "--config-dir", str(tmp_path), "+cluster=stand_in"]
    command += [f"run.storage_path={tmp_path / 'runs'}", "run.name=first"]
    environment = os.environ | {"RAY_ADDRESS": cluster}
    output = tmp_path / "output"
    with open(output, "wb") as file:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        give_up_at = time.monotonic() + 120
        while len(records(tmp_path)) < 3:
            assert job.poll() is None, output.read_text()
            assert time.monotonic() < give_up_at, output.read_text()
            time.sleep(0.02)
    finally:
        job.kill()
        job.wait()
    assert not list((tmp_path / "runs" / "data").glob("fineweb_edu-*/manifest.json"))
    kept = {path.name: path.stat().st_mtime_ns for path in records(tmp_path)}
    assert len(kept) < FILES, "it was quicker than the kill"

    with open(output, "ab") as file:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while job.poll() is None and len(now := records(tmp_path)) < FILES - 1:
            assert {path.name: path.stat().st_mtime_ns for path in now}.items() >= kept.items()
            time.sleep(0.02)
        job.wait(timeout=700)
    finally:
        job.kill()
        job.wait()
    printed = output.read_text()
    print(printed)
    assert job.returncode == 0, printed
    assert "estimated from parquet footers" in printed
    assert f"epochs of them in train.steps={STEPS}" in printed
    assert f"finished {STEPS} steps" in printed
    run = Storage.at(tmp_path / "runs" / "first")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert {row["world_size"] for row in read_metrics(run)} == {3}
    (group,) = [event for event in read_events(run) if event["event"] == "generation"]
    assert len({worker["node"] for worker in group["workers"]}) == 3


def records(folder: Path) -> list[Path]:
    """Of the corpus in the making, the pieces that are done."""
    return list((folder / "runs").glob("data/.*.building/spool/*.json"))
