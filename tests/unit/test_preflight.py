"""A corpus that cannot do is one line before anything is joined or rendered."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem
from tokenizers import Tokenizer

from regrow.config.check import check
from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig, RunConfig
from regrow.config.store import pretrain_config
from regrow.data import preflight
from regrow.data.preflight import MARGIN, Outlook, check_corpus
from regrow.data.prepare.documents import load_recipe
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import train_tokenizer
from regrow.data.read import corpora as corpora_module
from regrow.data.read.corpora import begun_with, find_corpora
from regrow.data.read.manifest import Manifest
from regrow.errors import DataError, ResumeError, UnavailableError, UnseenError
from regrow.record.run_folder import read_record, run_folder, write_record
from regrow.runtime.run_folder import find_or_create, write_config
from regrow.storage import RemoteStorage, Storage
from regrow.submit.submit import look_at_corpus
from support.hub import hub

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
CORPUS, DOLMA2 = SHARED / "corpus", SHARED / "tokenizers" / "dolma2" / "tokenizer.json"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def config_of(folder: Path, batch: int = 12, **data: Any) -> PretrainConfig:
    return PretrainConfig(
        run=RunConfig(storage_path=str(folder)),
        data=DataConfig(recipe="fineweb_edu", vocab_size=512, seq_len=64, validation_fraction=0.2, **data),
        optim=OptimConfig(global_batch_seqs=batch, num_slices=batch),
    )


def texts(count: int, words: int = 60) -> list[str]:
    random = Random(count)
    return [" ".join(random.choices(WORDS, k=words)) for _ in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "source0"  # a hub serves what it is in: nothing of other tests
    folder.mkdir()
    for number in range(3):
        pq.write_table(
            pa.table({"text": texts(200 + number)[:200], "score": [float(n % 4) for n in range(200)]}),
            folder / f"{number}.parquet",
        )
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(texts(50), vocab_size=512).to_str().encode())
    return path


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def quiet(stage: str, done: float, total: float) -> None:
    pass


def test_a_run_goes_on_with_the_corpus_that_it_began_with_whatever_became_of_its_source(
    tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    own = shutil.copytree(source, tmp_path / "own")
    config = config_of(tmp_path, source=str(own), tokenizer=str(tokenizer))
    begun = find_corpora(config, progress=quiet)
    write_config(find_or_create(config, manifest_sha256=begun.sha256), config)
    shutil.copy(own / "0.parquet", own / "more.parquet")
    assert find_corpora(config, progress=quiet) == begun
    shutil.rmtree(own)
    assert check_corpus(config).num_rows == begun.manifests[0].splits["train"].num_rows
    assert find_corpora(config, progress=quiet) == begun
    another = replace(config, run=replace(config.run, name="another"))
    other_documents = replace(config, data=replace(config.data, max_document_chars=1000))
    for each in (another, other_documents):
        with pytest.raises(DataError, match="own"):
            find_corpora(each, progress=quiet)


@pytest.mark.parametrize("how", ["moved", "imported", "its first job wrote no settings"])
def test_a_run_goes_on_with_its_corpus_from_another_storage_and_without_settings(
    how: str, tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    """Before, its source was prepared anew, as it was by then, and the run refused for that."""
    own = shutil.copytree(source, tmp_path / "own")
    config = config_of(tmp_path / "first", source=str(own), tokenizer=str(tokenizer))
    begun = find_corpora(config, progress=quiet)
    run = find_or_create(config, manifest_sha256=begun.sha256)
    if how == "moved":
        write_config(run, config)
        shutil.copytree(tmp_path / "first" / config.run.name, tmp_path / "second" / config.run.name)
        config = replace(config, run=replace(config.run, storage_path=str(tmp_path / "second")))
    elif how == "imported":
        config = replace(config, run=replace(config.run, name="imported"))
        identity, sha256 = read_record(run.folder)["identity"], begun.sha256  # type: ignore[index]
        write_record(run_folder(config), run_id="ab", identity=identity, manifest_sha256=sha256)
    shutil.copy(own / "0.parquet", own / "more.parquet")
    assert find_corpora(config, progress=quiet) == begun
    assert check_corpus(config).num_rows == begun.manifests[0].splits["train"].num_rows
    other = replace(config, data=replace(config.data, rows_per_group=32))
    assert begun_with(other) is None


def test_a_run_without_settings_is_given_its_corpus_for_the_settings_that_made_it_alone(
    tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    """Before, others were ignored without a word, then written to config.yaml, by which the right ones were refused."""
    own = shutil.copytree(source, tmp_path / "own")
    config = config_of(tmp_path, source=str(own), tokenizer=str(tokenizer), min_score=1.0)
    begun = find_corpora(config, progress=quiet)
    find_or_create(config, manifest_sha256=begun.sha256)
    another, apart = tmp_path / "another.json", tmp_path / "apart"
    another.write_bytes(train_tokenizer(texts(60), vocab_size=512).to_str().encode())
    apart.mkdir()
    shutil.copy(own / "0.parquet", apart / "other.parquet")
    for change in (
        {"min_score": 2.0},
        {"min_score": None},
        {"max_document_chars": 1000},
        {"rows_per_shard": 64},
        {"tokenizer": str(another)},
        {"source": str(apart)},
    ):
        assert begun_with(replace(config, data=replace(config.data, **change))) is None, change
    filtered = replace(config, data=replace(config.data, min_score=2.0))
    with pytest.raises(
        ResumeError, match=r"corpus: \w+ -> \w+\): settings of data\.\* are others, or what data\.source"
    ):
        find_or_create(filtered, manifest_sha256=find_corpora(filtered, progress=quiet).sha256)
    (own / "1.parquet").unlink()
    assert begun_with(config) == begun.folders[0]
    shutil.rmtree(own)
    assert begun_with(config) == begun.folders[0]
    assert begun_with(filtered) is None
    tokenizer_gone = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "gone.json")))
    assert begun_with(tokenizer_gone) == begun.folders[0]


def test_a_place_where_a_run_was_that_is_out_of_reach_holds_up_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, over, prepared_in = config_of(tmp_path, source=str(source)), Event(), corpora_module.prepared_in
    monkeypatch.setattr(corpora_module, "ELSEWHERE_S", 0.1)
    for place in ("hangs", "refuses"):
        run = replace(config.run, name=place)
        moved, before = replace(config, run=run), replace(config, run=replace(run, storage_path=place))
        write_config(find_or_create(moved, manifest_sha256="ab" * 32), before)

    def away(path: str) -> Iterator[str]:
        if path == "hangs":
            over.wait(60)
        if path in ("hangs", "refuses"):
            raise PermissionError(path)
        yield from prepared_in(path)

    monkeypatch.setattr(corpora_module, "prepared_in", away)
    for place in ("hangs", "refuses"):
        assert begun_with(replace(config, run=replace(config.run, name=place))) is None
    over.set()


def test_a_run_whose_source_on_a_hub_is_gone_is_submitted_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, jobs.pretrain went on with its corpus, and jobs.submit ended with "is not on the hub"."""
    prepared = find_corpora(config_of(tmp_path, source=str(source)), progress=quiet)
    config = config_of(tmp_path, source="hf://datasets/us/gone")
    write_config(find_or_create(config, manifest_sha256=prepared.sha256), config)

    def gone(setting: str, location: str) -> dict[str, int]:
        raise DataError(f"{setting}={location} is not on the hub")

    monkeypatch.setattr(preflight, "files_on_hub", gone)
    assert check_corpus(config).num_rows == prepared.manifests[0].splits["train"].num_rows
    assert look_at_corpus(config) == ""
    away = "s3://b/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    for run in (RunConfig(storage_path=str(tmp_path), name="another"), RunConfig(storage_path=away)):
        with pytest.raises(DataError, match=r"^data.source=hf://datasets/us/gone is not on the hub$") as refused:
            check_corpus(replace(config, run=run), deadline_s=1.0, footers=False)
        assert not isinstance(refused.value, UnseenError)


def test_a_storage_that_cannot_be_reached_hides_no_mistake_in_the_corpus(tmp_path: Path) -> None:
    """A job was submitted with one, and its cluster started for it."""
    away = "s3://b/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    config = config_of(tmp_path, source=str(tmp_path / "nothing"))
    config = replace(config, run=RunConfig(storage_path=away), data=replace(config.data, recipe="typo"))
    with pytest.raises(DataError, match="typo") as refused:
        check_corpus(config, deadline_s=1.0, footers=False)
    assert not isinstance(refused.value, UnseenError)


def test_the_corpus_of_a_run_is_found_behind_an_endpoint_and_not_taken_for_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, source="s3://b/text")
    write_config(find_or_create(config, manifest_sha256="ab" * 32), config)
    folder = "s3://b/runs/data/fineweb_edu-x?endpoint_override=http://h:9"
    monkeypatch.setattr(corpora_module, "prepared_in", lambda path: iter([folder]))
    monkeypatch.setattr(Manifest, "load", lambda folder: SimpleNamespace(sha256="ab" * 32))
    assert begun_with(config) == folder

    def load(folder: str) -> Manifest:
        raise UnavailableError(f"{folder} does not answer")

    monkeypatch.setattr(Manifest, "load", load)
    with pytest.raises(UnavailableError):
        begun_with(config)


def test_rows_are_estimated_before_and_counted_after_the_preparation(
    tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    before = check_corpus(config)
    corpora = find_corpora(config, progress=quiet)
    after = check_corpus(config)
    counted = corpora.manifests[0].splits["train"].num_rows
    assert (after.num_rows, after.basis, after.line()) == (counted, "", "")
    assert before.num_rows is not None
    assert counted / MARGIN < before.num_rows < counted * MARGIN
    assert before.line() == (
        f"data: to be prepared; about {before.num_rows:,} rows of 64 tokens (estimated from parquet footers), "
        f"{320 * 12 / before.num_rows:.2f} epochs of them in train.steps=320"
    )


def test_filters_are_part_of_the_estimate(tmp_path: Path, source: Path, tokenizer: Path) -> None:
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    everything, half = check_corpus(config), check_corpus(replace(config, data=replace(config.data, min_score=2.0)))
    assert everything.num_rows is not None
    assert half.num_rows == pytest.approx(everything.num_rows / 2, rel=0.05)


def test_a_source_that_is_sorted_by_what_is_filtered_is_not_refused_for_its_first_documents(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.preflight.READ_BYTES", 0)
    folder = tmp_path / "source"
    folder.mkdir()
    for name, language in (("a", "de"), ("b", "en"), ("c", "de")):
        pq.write_table(pa.table({"text": texts(2000), "language": [language] * 2000}), folder / f"{name}.parquet")
    outlook = check_corpus(config_of(tmp_path, source=str(folder), tokenizer=str(tokenizer), language="en"))
    assert outlook.num_rows
    outlook = check_corpus(config_of(tmp_path, source=str(folder), tokenizer=str(tokenizer), language="fr"))
    assert outlook.num_rows is None, "a sample does not tell that nothing is left"


def test_a_source_that_can_be_listed_and_not_read_is_one_line(
    tmp_path: Path, tokenizer: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bucket of which one may list what is there."""

    def refused(self: Any, name: str) -> Any:
        raise PermissionError(f"Access Denied: {name}")

    monkeypatch.setattr("regrow.data.prepare.files.SourceFiles.parquet", refused)
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    with pytest.raises(UnseenError, match=r"data\.source=.* cannot be read \(.*Access Denied"):
        check_corpus(config)
    with pytest.raises(DataError, match="Access Denied"):
        prepare(config.data, load_recipe("fineweb_edu"), tmp_path / "out", progress=quiet)


def test_a_corpus_too_small_for_one_batch_is_refused_with_both_numbers(
    tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    corpora = find_corpora(replace(config, run=RunConfig(storage_path=str(tmp_path / "counted"))), progress=quiet)
    num_rows = corpora.manifests[0].splits["train"].num_rows
    too_large = num_rows + 1
    assert check_corpus(config_of(tmp_path, num_rows, source=str(source), tokenizer=str(tokenizer))).basis == "counted"
    with pytest.raises(DataError) as refused:
        check_corpus(config_of(tmp_path, too_large, source=str(source), tokenizer=str(tokenizer)))
    assert str(refused.value) == (
        f"data.source={source} has {num_rows:,} train rows of data.seq_len=64 tokens (counted), fewer than one "
        f"global batch of optim.global_batch_seqs={too_large}; choose a larger data.source, or lower "
        "optim.global_batch_seqs or data.seq_len"
    )
    find_corpora(config, progress=quiet)
    with pytest.raises(DataError, match=rf"has \d+ train rows of 64 tokens, fewer than .*={too_large}; lower it"):
        check_corpus(config_of(tmp_path, too_large, source=str(source), tokenizer=str(tokenizer)))


def test_a_prepared_corpus_that_is_named_is_counted(tmp_path: Path, source: Path, tokenizer: Path) -> None:
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    (folder,) = find_corpora(config, progress=quiet).folders
    named = config_of(tmp_path / "elsewhere", corpora={"web": folder})
    assert check_corpus(named).num_rows == check_corpus(config).num_rows
    with pytest.raises(DataError, match=r"fewer than one global batch of optim.global_batch_seqs=100000"):
        check_corpus(config_of(tmp_path, 100_000, corpora={"web": folder}))
    with pytest.raises(DataError, match=r"nowhere holds no finished corpus"):
        check_corpus(config_of(tmp_path, corpora={"web": str(tmp_path / "nowhere")}))


def test_a_look_at_what_is_prepared_deletes_nothing_and_has_a_deadline(
    tmp_path: Path, source: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a preparation was killed while it tidied up, in an object store."""
    storage_path = f"memory://{tmp_path.name}-{os.getpid()}"
    config = config_of(tmp_path, source=str(source), tokenizer=str(tokenizer))
    config = replace(config, run=RunConfig(storage_path=storage_path))
    (place,) = find_corpora(config, progress=quiet).folders
    folder = Storage.at(place)
    for name in ("plan.json", "train-00000.record", "spool/000000.json"):
        folder.write_bytes(name, b"{}")
    there = folder.list()
    assert check_corpus(config).basis == ""
    assert folder.list() == there
    find_corpora(config, progress=quiet)
    assert len(folder.list()) == len(there) - 3, "a preparation tidies up"

    over, read = Event(), RemoteStorage.read_bytes

    def read_bytes(self: RemoteStorage, name: str) -> bytes:
        if name == "manifest.json":
            over.wait(60)
        return read(self, name)

    monkeypatch.setattr(RemoteStorage, "read_bytes", read_bytes)
    with pytest.raises(UnseenError, match=rf"run\.storage_path={storage_path} did not answer within 1 s"):
        check_corpus(config, deadline_s=1.0)
    over.set()


def test_the_source_is_looked_at_first(tmp_path: Path, source: Path) -> None:
    missing = {"source": str(tmp_path / "nowhere"), "tokenizer": str(tmp_path / "none.json")}
    with pytest.raises(
        UnseenError, match=rf"^data.source={tmp_path}/nowhere: there is no {tmp_path}/nowhere; give a file"
    ):
        check_corpus(config_of(tmp_path, **missing))
    with pytest.raises(
        UnseenError, match=rf"^data.tokenizer={tmp_path}/none.json: there is no {tmp_path}/none.json; give the path"
    ):
        check_corpus(config_of(tmp_path, **missing | {"source": str(source)}))
    with pytest.raises(DataError, match=r"^data.source is not set: give the file"):
        check_corpus(config_of(tmp_path, tokenizer=missing["tokenizer"]))


def test_a_tokenizer_that_does_not_fit_is_refused_with_the_settings_that_do(
    tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    large = tmp_path / "large.json"
    content = json.loads(tokenizer.read_text())
    first = len(content["model"]["vocab"]) + len(content["added_tokens"])
    content["model"]["vocab"] |= {f"word{number}": first + number for number in range(600)}
    large.write_text(json.dumps(content))
    ids = first + 600
    with pytest.raises(
        DataError, match=rf"{large} has {ids} ids, data.vocab_size=512; set data.vocab_size={-(-ids // 128) * 128}"
    ):
        check_corpus(config_of(tmp_path, source=str(source), tokenizer=str(large)))
    with pytest.raises(
        DataError, match=r"the tokenizer has no <eos>; name its end-of-text token with data.end_of_text"
    ):
        check_corpus(config_of(tmp_path, source=str(source), tokenizer=str(tokenizer), end_of_text="<eos>"))
    torn = tmp_path / "torn.json"
    torn.write_bytes(tokenizer.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"data.tokenizer={torn} is no tokenizer that can be read"):
        check_corpus(config_of(tmp_path, source=str(source), tokenizer=str(torn)))


def test_files_without_texts_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"tokens": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"none of its .parquet files can be read and has a column `text`"):
        check_corpus(config_of(tmp_path, source=str(tmp_path / "a.parquet"), tokenizer=str(tokenizer)))


def test_a_store_that_takes_a_connection_and_says_nothing_costs_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with silent_port() as port:
        source = f"s3://bucket/folder?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        with pytest.raises(UnseenError, match=r"^data.source=s3://.* did not answer within 0.5 s; check the network"):
            check_corpus(config_of(tmp_path, source=source), deadline_s=0.5)
        begun = time.monotonic()
        arguments = ["+cluster=h200x8", f"data.source='{source}'", f"run.storage_path={tmp_path}"]
        done = subprocess.run(
            [sys.executable, "-m", "jobs.submit", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, "kind: RayJob" in done.stdout) == (0, True), done.stderr
    assert done.stderr.startswith("note: the corpus was not looked at, the job will: data.source=s3://")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - begun < 60  # Arrow's client itself asks for 100 s, and cannot be told to stop


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what HF_ENDPOINT says to a process that starts: `huggingface_hub` reads it once."""

    def set_endpoint(url: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()

    yield set_endpoint
    HfFileSystem.clear_instance_cache()


@pytest.fixture
def on_hub(source: Path, tokenizer: Path, endpoint: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Settings for a corpus on a hub of this machine."""
    with hub({"datasets/us/web": source.parent, "models/us/bpe": tokenizer.parent}) as url:
        endpoint(url)
        yield {"source": f"hf://datasets/us/web/{source.name}", "tokenizer": "hf://us/bpe/tokenizer.json"}


def test_a_corpus_on_a_hub_is_estimated_and_prepared(tmp_path: Path, source: Path, on_hub: dict[str, str]) -> None:
    config = config_of(tmp_path, **on_hub)
    by_footers, by_sizes = check_corpus(config), check_corpus(config, footers=False)
    assert by_footers.num_rows is not None
    assert (by_footers.basis, by_sizes.basis) == (
        "estimated from parquet footers",
        "estimated from the sizes of its files",
    )
    all_three = check_corpus(config_of(tmp_path, **on_hub | {"source": f"{on_hub['source']}/*.parquet"}))
    assert all_three.num_rows == by_footers.num_rows
    corpora = find_corpora(config, progress=quiet)
    assert check_corpus(config).num_rows == corpora.manifests[0].splits["train"].num_rows


def test_a_glob_on_a_hub_names_what_it_names_to_the_preparation(
    tmp_path: Path, source: Path, on_hub: dict[str, str]
) -> None:
    """Before, it was refused where its `*` stood for a slash: a hub's own globs stop there."""
    above = on_hub["source"].rpartition("/")[0]
    for footers in (True, False):
        whole = check_corpus(config_of(tmp_path, **on_hub), footers=footers)
        for same in (f"{above}/{source.name}*.parquet", f"{above}/s*{source.name[1:]}/?.parquet"):
            assert check_corpus(config_of(tmp_path, **on_hub | {"source": same}), footers=footers) == whole
    with pytest.raises(DataError, match=r"the hub at .* has no file there"):
        check_corpus(config_of(tmp_path, **on_hub | {"source": f"{above}/{source.name}*.txt"}))


def test_what_a_hub_does_not_have_is_no_matter_of_reaching_it(tmp_path: Path, on_hub: dict[str, str]) -> None:
    for change, line in (
        (
            {"source": "hf://datasets/us/none/x"},
            r"^data.source=hf://datasets/us/none/x is not on the hub at http://127",
        ),
        (
            {"source": "hf://datasets/us/web/none"},
            r"^data.source=hf://datasets/us/web/none: the hub at .* no file there$",
        ),
        (
            {"tokenizer": "hf://us/bpe/none.json"},
            r"^data.tokenizer=hf://us/bpe/none.json: the hub at .* no file there$",
        ),
        (
            {"tokenizer": "hf://us/none/tokenizer.json"},
            r"^data.tokenizer=hf://us/none/tokenizer.json is not on the hub",
        ),
    ):
        with pytest.raises(DataError, match=line) as refused:
            check_corpus(config_of(tmp_path, **on_hub | change))
        assert not isinstance(refused.value, UnseenError)
        assert "\n" not in str(refused.value)


def test_a_hub_that_is_not_there_or_says_nothing_is_one_line(
    tmp_path: Path, endpoint: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, source="hf://datasets/us/web/x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        endpoint(url)
        with pytest.raises(UnseenError, match=rf"^data.source=hf://.*: the hub at {url} cannot be reached \(.*refused"):
            check_corpus(config)
    with silent_port() as port:
        endpoint(f"http://127.0.0.1:{port}")
        with pytest.raises(UnseenError, match=r"^data.source=hf://.* did not answer within 0.5 s"):
            check_corpus(config, deadline_s=0.5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml")))
def test_every_cluster_file_gives_the_job_a_corpus_that_is_looked_at_first(name: str, tmp_path: Path) -> None:
    """Those of GPU clusters come from the hub, with a tokenizer that fits; the others' is here."""
    config = pretrain_config([f"+cluster={name}", f"run.storage_path={tmp_path}"])
    check(config)
    if config.cluster.address is None:
        outlook = check_corpus(config)
        assert outlook.num_rows is not None
        assert outlook.num_rows > config.optim.global_batch_seqs
        return
    assert config.data.source is not None
    assert config.data.source.startswith("hf://datasets/HuggingFaceFW/fineweb-edu/")
    assert config.data.tokenizer is not None
    assert 100_278 <= config.data.vocab_size <= config.model.vocab_size  # dolma2's ids
    sample = {"sample/100BT": 100e9, "sample/350BT": 350e9, "data": 1300e9}[config.data.source.split("edu/")[1]]
    drawn = config.train.steps * config.optim.global_batch_seqs * config.data.seq_len
    assert drawn < 0.97 * sample  # dolma2 makes 3% fewer tokens than GPT-2's tokenizer, which these are counted with


def test_where_a_job_is_submitted_from_may_see_less_than_the_job(
    tmp_path: Path, source: Path, tokenizer: Path, on_hub: dict[str, str]
) -> None:
    assert look_at_corpus(config_of(tmp_path, **on_hub)) == ""
    with pytest.raises(DataError, match=r"fewer than one global batch of optim.global_batch_seqs=100000"):
        look_at_corpus(config_of(tmp_path, 100_000, **on_hub))
    for unseen in ({"source": "/of/pods", "tokenizer": str(tokenizer)}, {"corpora": {"web": "/of/pods"}}):
        note = look_at_corpus(config_of(tmp_path, **unseen))
        assert note.startswith("the corpus was not looked at, the job will: data.")
        assert "/of/pods" in note
        assert "\n" not in note
    with pytest.raises(DataError, match=r"has no <eos>"):
        look_at_corpus(config_of(tmp_path, source=str(source), tokenizer=str(tokenizer), end_of_text="<eos>"))


def test_an_outlook_without_rows_says_so() -> None:
    assert Outlook(None, 64, 10, 12, "its recipe does not tell its size").line() == (
        "data: to be prepared; its recipe does not tell its size"
    )


@pytest.mark.skipif(not CORPUS.is_dir() or not DOLMA2.is_file(), reason="no ../shared/corpus and tokenizers here")
def test_fineweb_edu_is_estimated_within_the_margin(tmp_path: Path) -> None:
    config = config_of(tmp_path, source=str(CORPUS), tokenizer=str(DOLMA2))
    config.data.vocab_size, config.data.seq_len, config.data.validation_fraction = 100352, 2048, 0.005
    measured = check_corpus(config).num_rows
    config.data.tokenizer, config.data.vocab_size = None, 128256
    assumed = check_corpus(config).num_rows
    # all 2,068 documents: counted once with the tokenizer
    texts = [
        text for path in sorted(CORPUS.glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()[::20]
    ]
    num_bytes = sum(len(text.encode()) for text in texts)
    total = sum(
        len(text.encode()) for path in CORPUS.glob("*.parquet") for text in pq.read_table(path)["text"].to_pylist()
    )
    encoded = Tokenizer.from_file(str(DOLMA2)).encode_batch_fast(texts, add_special_tokens=False)
    rows = total * sum(len(each.ids) + 1 for each in encoded) / num_bytes * 0.995 / 2048
    for estimate in (measured, assumed):
        assert estimate is not None
        assert rows / MARGIN < estimate < rows * MARGIN


@pytest.mark.slow
def test_the_job_says_so_before_it_joins_a_cluster(tmp_path: Path) -> None:
    with socket.socket() as closed:  # no Ray answers there, which is looked at later
        closed.bind(("127.0.0.1", 0))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jobs.pretrain", "+cluster=h100x64", "data=python_docs", "data.seq_len=8192"),
                f"run.storage_path={tmp_path}",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"RAY_ADDRESS": f"127.0.0.1:{closed.getsockname()[1]}"},
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: python_docs has about "), done.stderr
    assert "of optim.global_batch_seqs=448; choose a larger data.recipe" in done.stderr
    assert done.stderr.count("\n") == 1
