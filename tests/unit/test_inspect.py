"""Looking into a prepared corpus tells what is in it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jobs import inspect_data

from regrow.config.plain import to_yaml
from regrow.config.schema import DataConfig, MixtureStage, PretrainConfig
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import encode, load_tokenizer
from regrow.data.read.batch import BatchLayout, direct_batches
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.read.inspect import decode_rows, differences, document_lengths, rows_of_batch
from regrow.data.read.manifest import Manifest
from regrow.data.read.shards import ShardReader, read_index
from regrow.plan.order import Order
from regrow.record.run_folder import write_record
from regrow.storage import Storage
from support.away import TRIES, Away
from support.corpus import WordRecipe

ROOT = Path(__file__).parents[2]
CONFIG = DataConfig(vocab_size=512, seq_len=16, validation_fraction=0.2, rows_per_group=8, rows_per_shard=64)
RECIPE = WordRecipe()


def quiet(stage: str, done: float, total: float) -> None:
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "words"
    prepare(CONFIG, RECIPE, folder, progress=quiet)
    return folder


def test_lengths_are_those_of_the_documents(corpus: Path) -> None:
    seen: list[tuple[float, float]] = []
    lengths = document_lengths(ShardReader(corpus, "train"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (ShardReader(corpus, "train").num_rows,) * 2
    manifest = Manifest.load(corpus)
    texts = [document.text for document in RECIPE.documents(CONFIG, *RECIPE.pieces(CONFIG))]
    ids = encode(load_tokenizer(corpus / "tokenizer.json"), texts)
    assert lengths.documents >= manifest.counts["train_documents"] - 1
    assert lengths.longest in {len(part) for part in ids}
    assert sum(lengths.counts) == lengths.documents
    assert lengths.bounds[-1] > lengths.longest >= lengths.bounds[-2]


def test_rows_of_a_batch_are_those_that_training_gets(corpus: Path) -> None:
    reader, layout = ShardReader(corpus, "train"), BatchLayout(12, 6, 4)
    order = Order.of_one(
        num_rows=reader.num_rows, rows_per_group=CONFIG.rows_per_group, window_rows=layout.window_rows, seed=3
    )
    for step in (1, 5, 30):
        rows = rows_of_batch(Corpora.at(corpus), layout, order, step)
        (batch,) = direct_batches(order, reader, layout, slices=range(6), start_step=step - 1, stop_step=step)
        assert [row.position for row in rows] == batch.positions.tolist()
        assert np.array_equal(reader.read([row.row for row in rows]), batch.rows)
        assert [row.slice for row in rows] == [k // 2 for k in range(12)]
        for row in rows:
            assert row.shard == f"train-{row.row // 64:05d}.parquet"
            assert row.row_group == row.row % 64 // 8
            assert row.documents == documents_by_tokens(corpus, row.row)


@pytest.mark.slow
def test_the_command_shows_a_batch_of_a_run_that_mixes_corpora(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = replace(CONFIG, tokenizer=str(corpus / "tokenizer.json"))
    prepare(config, WordRecipe(num_documents=80, seed=1), other, progress=quiet)
    weights = {"words": 1.0, "more": 3.0}
    data = replace(CONFIG, corpora={"words": str(corpus), "more": str(other)}, mixture=[MixtureStage(0, weights)])
    run = PretrainConfig(data=data)
    corpora = Corpora.of(data.corpora, data)
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    (tmp_path / "run.json").write_text(json.dumps({"manifest_sha256": corpora.sha256}))
    command = [sys.executable, "-m", "jobs.inspect_data", str(corpus), "--batch", "3", "--run", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("position")]
    assert [int(line.split()[1]) for line in lines] == list(range(24, 36))
    rows = order_of(run, corpora).locate(np.arange(24, 36))
    first = ShardReader(corpus, "train").num_rows
    expected = [f"words row {row:,}," if row < first else f"more row {row - first:,}," for row in rows.tolist()]
    for line, place in zip(lines, expected, strict=True):
        assert place in line
        assert "words/" in line.partition("group")[2]  # ids of documents
    (tmp_path / "run.json").write_text(json.dumps({"manifest_sha256": "another"}))
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "did not train on" in refused.stderr


def documents_by_tokens(corpus: Path, row: int) -> list[str]:
    """The ids of the documents that a row's targets are of, found by decoding the stream up to the end of the last."""
    manifest, reader = Manifest.load(corpus), ShardReader(corpus, "train")
    rows = reader.read(np.arange(min(row + 100, reader.num_rows)))
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    stream = rows[:, :-1].ravel()
    last_of_each = np.append(np.flatnonzero(stream == manifest.tokenizer.eot_id), len(stream))
    found = np.searchsorted(last_of_each, [row * CONFIG.seq_len + 1, (row + 1) * CONFIG.seq_len])
    names = []
    for k in range(found[0], found[1] + 1):
        text = tokenizer.decode(stream[last_of_each[k - 1] + 1 : last_of_each[k]].tolist())
        names.append("words/" + text.split(maxsplit=2)[1])
    return names


def test_a_document_is_in_the_index_of_every_shard_that_has_targets_of_it(corpus: Path) -> None:
    manifest = Manifest.load(corpus)
    shards = manifest.splits["train"].shards
    indexes = [read_index(Storage.at(corpus), shard) for shard in shards]
    begins = dict(pair for index in indexes for pair in zip(index.ids, index.begins.tolist(), strict=True))
    assert len(begins) == manifest.counts["train_documents"]
    ends = dict(zip(begins, [*list(begins.values())[1:], manifest.counts["train_tokens"]], strict=True))
    first_target = 1
    for shard, index in zip(shards, indexes, strict=True):
        next_target = first_target + shard.num_rows * manifest.seq_len
        assert index.ids == [name for name in begins if begins[name] < next_target and ends[name] > first_target]
        first_target = next_target


def test_rows_decode_with_their_ends_of_text(corpus: Path) -> None:
    texts = decode_rows(ShardReader(corpus, "train"), np.arange(20))
    assert texts[0].startswith("<|endoftext|>document ")


def test_a_store_that_is_away_for_a_while_is_waited_for(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second of it ended the command."""
    monkeypatch.setattr("regrow.storage.time.sleep", lambda seconds: None)
    layout = BatchLayout(12, 6, 4)

    def seen(location: Path | str) -> list[object]:
        """Of each, whatever has to be read for it."""
        corpora = Corpora.at(location, replace(CONFIG, cache_dir=str(tmp_path / "cache")))
        num_rows = ShardReader(location, "train").num_rows
        order = Order.of_one(
            num_rows=num_rows, rows_per_group=CONFIG.rows_per_group, window_rows=layout.window_rows, seed=3
        )
        found: list[object] = []
        for look in (
            lambda: document_lengths(ShardReader(location, "train"), progress=lambda done, total: None),
            lambda: decode_rows(ShardReader(location, "train"), np.arange(20)),
            lambda: rows_of_batch(corpora, layout, order, 1),
        ):
            Away.refused.clear()
            found.append(look())
        return found

    monkeypatch.setattr(Away, "of_each", TRIES + 1)
    assert seen(f"away://{corpus}") == seen(corpus)


def test_differences_name_what_differs_and_nothing_else(corpus: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(corpus)
    assert differences(manifest, manifest) == []
    assert differences(manifest, replace(manifest, seq_len=17)) == ["seq_len: 16 -> 17"]
    other = prepare(CONFIG, WordRecipe(seed=1), tmp_path / "other", progress=quiet)
    found = differences(manifest, other)
    assert "source/seed: 0 -> 1" in found
    assert any(line.startswith("splits/train/shards/train-00000.parquet/sha256: ") for line in found)


def test_differences_of_a_source_that_lists_objects(corpus: Path) -> None:
    manifest = Manifest.load(corpus)
    old, new = ({**manifest.source, "parts": [{"url": "a", "rows": rows}, "b"]} for rows in (1, 2))
    assert differences(replace(manifest, source=old), replace(manifest, source=new)) == ["source/parts/0/rows: 1 -> 2"]


def test_a_run_in_an_object_store_is_read_there(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Storage.at(f"memory://{tmp_path.name}-{os.getpid()}/mine")
    monkeypatch.setattr("sys.argv", ["inspect_data", str(corpus), "--batch", "3", "--run", str(run)])
    with pytest.raises(SystemExit, match=rf"{run} holds no config\.yaml of a run"):
        inspect_data.main()
    run.write_bytes("config.yaml", to_yaml(PretrainConfig(data=CONFIG)).encode())
    with pytest.raises(SystemExit, match=rf"{run} has no run\.json"):
        inspect_data.main()
    write_record(run, run_id="mine", identity={}, manifest_sha256=Manifest.load(corpus).sha256)
    inspect_data.main()
    assert capsys.readouterr().out.count("position ") == 12


def test_a_number_of_samples_below_none_is_a_usage_error(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["inspect_data", str(corpus), "--samples", "-1"])
    with pytest.raises(SystemExit):
        inspect_data.main()
    assert "--samples -1 must be at least 0" in capsys.readouterr().err


def test_the_command_shows_all_of_it_and_names_a_damaged_shard(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.inspect_data"]
    options = ["--lengths", "--verify", "--samples", "3", "--diff", str(corpus)]
    done = subprocess.run([*command, str(corpus), *options], cwd=ROOT, capture_output=True, text=True, check=True)
    for words in ("train: ", "documents of", "--- train row 0", "the same corpus", "####"):
        assert words in done.stdout
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in corpus.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    victim = damaged / "train-00001.parquet"
    victim.write_bytes(victim.read_bytes()[:-1])
    refused = subprocess.run([*command, str(damaged), "--verify"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "train-00001.parquet is not what its manifest says" in refused.stderr
    assert refused.stderr.count("\n") <= 2
