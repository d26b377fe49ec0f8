"""Evaluation: the shipped tasks' documents, results, what is refused, and the real thing against our own model."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from regrow.accept.tiny import tiny_model
from regrow.config.schema import DataConfig, Dtype, PretrainConfig
from regrow.data.prepare.documents import Document
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import encode, load_tokenizer
from regrow.data.read.corpora import Corpora
from regrow.data.read.manifest import Manifest
from regrow.data.read.shards import ShardReader
from regrow.errors import EvaluationError
from regrow.evaluate import catalog, documents, harness, results, source
from regrow.evaluate.documents import questions
from regrow.model.llama import Llama
from regrow.record.run_folder import checkpoints_of, identity, write_record
from regrow.state.disk.catalog import choose
from regrow.state.exchange.runs import export_run
from regrow.storage import Storage
from support.away import TRIES, Away
from support.corpus import WordRecipe
from support.runs import RUN_ID, save_run

ROOT = Path(__file__).parents[2]
CORPUS = DataConfig(recipe="words", vocab_size=512, seq_len=256, validation_fraction=0.3)
MODEL = replace(tiny_model(), vocab_size=512)

needs_lm_eval = pytest.mark.skipif(
    any(find_spec(package) is None for package in harness.PACKAGES), reason=f"the extra is missing: {harness.INSTALL}"
)


def quiet(total: int) -> Any:
    return lambda num_bytes: None


def job(*arguments: object, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.evaluate", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random weights, `mine`, with two checkpoints, and its corpus beside it."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(CORPUS, WordRecipe(), folder / "data" / "words", progress=lambda stage, done, total: None)
    save_run(folder / "mine", MODEL, steps=(1, 2))
    mine = identity(PretrainConfig(model=MODEL, data=CORPUS))
    sha256 = Manifest.load(folder / "data" / "words").sha256
    write_record(Storage.at(folder / "mine"), run_id=RUN_ID, identity=mine, manifest_sha256=sha256)
    return folder


def export(run: Path, to: Path) -> Path:
    _, index = choose(*checkpoints_of(str(run)))
    export_run("hf", str(run), index, str(to), dtype=Dtype.float32, start=quiet)
    return to


def held_out_texts() -> list[str]:
    every = WordRecipe().documents(CORPUS, *WordRecipe().pieces(CORPUS))
    return [document.text for document in every if documents.held_out(document.text, CORPUS.validation_fraction)]


# What the shipped tasks ask.


def test_the_validation_documents_of_a_corpus_are_the_texts_that_training_never_saw(storage: Path) -> None:
    folder = storage / "data" / "words"
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    found = documents.validation_documents(ShardReader(folder, "validation"), tokenizer)
    want = held_out_texts()
    assert len(want) - 1 <= len(found) <= len(want)
    assert set(found) <= set(want)
    assert documents.validation_documents(ShardReader(folder, "validation"), tokenizer, 3) == found[:3]
    trained = documents.validation_documents(ShardReader(folder, "train"), tokenizer)
    assert len(trained) >= 60 - len(want) - 1
    assert not set(trained) & set(found)


def test_documents_of_a_store_that_is_away_for_a_while_are_waited_for(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second of it ended the evaluation."""
    monkeypatch.setattr("regrow.storage.time.sleep", lambda seconds: None)
    monkeypatch.setattr(Away, "of_each", TRIES + 1)
    Away.refused.clear()
    folder, config = storage / "data" / "words", DataConfig(cache_dir=str(tmp_path))
    there = documents._validation(Corpora.at(f"away://{folder}", config))
    assert there == documents._validation(Corpora.at(folder, config))


def test_documents_do_not_depend_on_how_many_rows_are_read_at_a_time(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = storage / "data" / "words"
    read = partial(documents.validation_documents, tokenizer=load_tokenizer(folder / "tokenizer.json"))
    whole = [read(ShardReader(folder, "validation"), most=most) for most in (1, 5, 200)]
    monkeypatch.setattr(documents, "ROWS_AT_A_TIME", 1)
    assert [read(ShardReader(folder, "validation"), most=most) for most in (1, 5, 200)] == whole


def test_python_docs_are_the_validation_documents_of_the_default_corpus() -> None:
    recipe = WordRecipe(num_documents=400)
    every = [
        document for document in recipe.documents(CORPUS, *recipe.pieces(CORPUS)) if isinstance(document, Document)
    ]
    found = documents.python_docs(recipe)
    assert found == [document.text for document in every if documents.held_out(document.text, 0.03)]
    assert 0 < len(found) < 40
    conf = (ROOT / "conf" / "data" / "python_docs.yaml").read_text()
    assert f"validation_fraction: {documents.PYTHON_DOCS_FRACTION}" in conf
    real = documents.python_docs()
    assert len(real) > 10
    assert max(map(len, real)) <= documents.DOCUMENT_CHARS
    assert len(questions(real)) > 100


def test_one_of_four_continuations_is_the_documents_own() -> None:
    texts = held_out_texts()
    asked = questions(texts)
    assert len(asked) > 20
    for question in asked:
        assert len(set(question.choices)) == documents.NUM_CHOICES
        (home,) = (text for text in texts if question.context in text)
        own = [choice for choice in question.choices if question.context + choice in home]
        assert own == [question.choices[question.answer]]
        for choice in question.choices:
            assert re.match(r" \w", choice)
            assert documents.CONTINUATION_CHARS <= len(choice) <= 2 * documents.CONTINUATION_CHARS
    answers = Counter(question.answer for question in asked)
    assert set(answers) == set(range(documents.NUM_CHOICES))
    assert max(answers.values()) < 0.6 * len(asked)
    assert questions(texts) == asked
    assert questions(texts, 5) == asked[:5]
    assert questions(texts[:3]) == []


def test_the_catalog_names_the_task_files_and_their_functions() -> None:
    files = {path.stem: path.read_text() for path in catalog.TASKS_FOLDER.glob("[a-z]*.yaml")}
    assert files.keys() == catalog.SHIPPED.keys()
    for name, text in files.items():
        assert f"task: {name}\ncustom_dataset: !function regrow.evaluate.documents.{name}\n" in text
        assert callable(getattr(documents, name))


# Results.

FOUND = {
    "results": {
        "bits": {
            "name": "bits",
            "alias": "bits",
            "sample_len": 7,
            "bits_per_byte,none": 2.5,
            "bits_per_byte_stderr,none": "N/A",
        },
        "gsm": {
            "name": "gsm",
            "alias": "gsm",
            "sample_len": 10,
            "exact_match,strict": 0.5,
            "exact_match_stderr,strict": 0.125,
            "exact_match,loose": float("nan"),
        },
    },
    "higher_is_better": {"bits": {"bits_per_byte": False}, "gsm": {"exact_match": True}},
    "n-samples": {"bits": {"original": 21, "effective": 7}, "gsm": {"original": 10, "effective": 10}},
    "n-shot": {"bits": 0, "gsm": 5},
    "versions": {"bits": 1, "gsm": 3.0},
}


def test_results_have_value_standard_error_direction_and_number_of_examples() -> None:
    found = results.task_results(FOUND, {"dtype": "float32"})
    assert found["bits"] == {
        "metrics": {"bits_per_byte": {"value": 2.5, "stderr": None, "higher_is_better": False}},
        "num_examples": 7,
        "num_examples_there": 21,
        "num_fewshot": 0,
        "task_version": 1,
        "dtype": "float32",
    }
    assert found["gsm"]["metrics"] == {
        "exact_match,strict": {"value": 0.5, "stderr": 0.125, "higher_is_better": True},
        "exact_match,loose": {"value": None, "stderr": None, "higher_is_better": True},
    }


def test_the_table_shows_every_metric() -> None:
    lines = list(results.table(results.task_results(FOUND, {})))
    assert [line.split() for line in lines] == [
        ["task", "examples", "shots", "metric", "value", "stderr"],
        ["bits", "7", "of", "21", "0", "bits_per_byte", "2.5000", "-", "lower", "is", "better"],
        ["gsm", "10", "5", "exact_match,strict", "0.5000", "0.1250", "higher", "is", "better"],
        ["exact_match,loose", "-", "-", "higher", "is", "better"],
    ]
    assert len({line.index(word) for line, word in zip(lines, ("metric", "bits_", "exact", "exact"), strict=True)}) == 1


def test_results_of_the_same_model_are_joined_and_those_of_another_one_kept(tmp_path: Path) -> None:
    folder, model = Storage.at(tmp_path / "new"), {"folder": "runs/mine", "run_id": RUN_ID, "step": 2}
    found = results.task_results(FOUND, {})
    assert results.earlier_results(folder, model) == {}
    results.write_results(folder, model, {"bits": found["bits"], "gsm": {"metrics": {}}})
    results.write_results(folder, model, {"gsm": found["gsm"]})
    assert results.earlier_results(folder, model) == found
    before = folder.read_bytes(results.RESULTS)
    with pytest.raises(EvaluationError, match=r"has results of runs/mine, step 2; name another --out"):
        results.write_results(folder, {**model, "step": 3}, found)
    assert folder.read_bytes(results.RESULTS) == before
    with pytest.raises(EvaluationError, match=r"has results of runs/mine, step 2; name another --out"):
        results.earlier_results(folder, {**model, "run_id": "another"})
    moved = {**model, "folder": "elsewhere/mine"}
    assert results.earlier_results(folder, moved) == found, "a run is the same wherever its folder lies"
    exported = Storage.at(tmp_path / "exported")
    results.write_results(exported, {**model, "run_id": None, "step": None}, found)
    with pytest.raises(EvaluationError, match=r"has results of runs/mine; name another --out"):
        results.earlier_results(exported, {**moved, "run_id": None, "step": None})
    for damaged in (b"{", b"[]", b"{}", before.replace(b'"version"', b'"verse"')):
        folder.write_bytes(results.RESULTS, damaged)
        with pytest.raises(EvaluationError, match=r"results\.json is no file of results; name another --out"):
            results.earlier_results(folder, model)


def test_a_place_that_cannot_be_written_is_found_before_anything_slow(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EvaluationError, match=r"file/evaluations: results cannot be written \(.*\); name another --out"
    ):
        results.check_writable(Storage.at(tmp_path / "file" / "evaluations"))
    results.check_writable(Storage.at(tmp_path / "new" / "evaluations"))
    assert not list((tmp_path / "new" / "evaluations").iterdir())


# What is evaluated, and what is refused.


def test_a_run_is_exported_for_the_while_and_the_copy_removed_whatever_ends_it(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = source.find_source(str(storage / "mine"))
    assert (found.step, found.run_id) == (2, RUN_ID)
    assert found.corpora is not None
    assert found.corpora.folders == (str(storage / "data" / "words"),)
    assert str(found.results(None)) == f"{storage}/mine/evaluations/step-00000002"
    assert str(found.results(7)) == f"{storage}/mine/evaluations/step-00000002-limit-7"
    assert source.find_source(str(storage / "mine"), step=1).step == 1
    with found.model_folder(None, quiet) as folder:
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"
        assert (folder / "tokenizer.json").exists()
        assert folder.parent == tmp_path
    assert not list(tmp_path.iterdir())

    def terminated() -> None:
        with found.model_folder(Dtype.bfloat16, quiet):
            assert list(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        terminated()
    assert not list(tmp_path.iterdir())


def test_an_exported_model_is_taken_as_it_is(storage: Path, tmp_path: Path) -> None:
    folder = export(storage / "mine", tmp_path / "hf")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    found = source.find_source(str(folder), corpus=str(storage / "data" / "words"))
    assert (found.step, found.run_id) == (None, None)
    assert str(found.results(None)) == f"{folder}/evaluations"
    assert str(found.results(7)) == f"{folder}/evaluations/limit-7"
    assert found.corpora is not None
    with found.model_folder(Dtype.bfloat16, quiet) as same:
        assert same == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_what_cannot_be_evaluated_is_said_in_one_line(storage: Path, tmp_path: Path) -> None:
    def refused(folder: Path, message: str, **options: Any) -> None:
        with pytest.raises(harness.RegrowError, match=message) as caught:
            source.find_source(str(folder), **options)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "nowhere is not there, or empty")
    refused(storage, "is neither a run's folder .* nor an exported model's")
    refused(storage / "mine", "has no checkpoint of step 7; it has 2, 1", step=7)
    refused(storage / "mine", "holds no finished corpus", corpus=str(tmp_path / "nowhere"))
    folder = export(storage / "mine", tmp_path / "hf")
    refused(folder, "--step chooses among a run's checkpoints", step=2)
    (folder / "tokenizer_config.json").unlink()
    refused(folder, "has no tokenizer_config.json, so its tokenizer is not known")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"has config.json but no \*.safetensors")
    save_run(tmp_path / "runs" / "alone", MODEL)
    refused(tmp_path / "runs" / "alone", f"was not found, so there is no tokenizer; put it into {tmp_path}/runs/data")
    (tmp_path / "runs" / "alone" / "run.json").unlink()
    refused(tmp_path / "runs" / "alone", "has no run.json")


def test_a_corpus_that_a_run_named_is_found_where_it_was_put_or_said_to_be_missing(
    storage: Path, tmp_path: Path
) -> None:
    shutil.copytree(storage, tmp_path / "runs")
    run, words = tmp_path / "runs" / "mine", Manifest.load(storage / "data" / "words")

    def named(**corpora: str) -> None:
        (run / "config.yaml").write_text(yaml.safe_dump({"data": {"corpora": corpora}}))

    named(web="/gone/web")
    found = source.find_source(str(run)).corpora
    assert found is not None
    assert (found.names, found.folders) == (("web",), (f"{tmp_path}/runs/data/words",))
    shutil.copytree(storage / "data" / "words", tmp_path / "runs" / "data" / "code")
    replace(words, recipe="code").save(tmp_path / "runs" / "data" / "code")
    both = {"code": f"{tmp_path}/runs/data/code", "web": "/gone/web"}
    named(**both)
    with pytest.raises(EvaluationError, match=r"no tokenizer; put data\.corpora\.web back to /gone/web, or export"):
        source.find_source(str(run))
    named(**both | {"web": f"{tmp_path}/runs/data/words"})
    with pytest.raises(
        EvaluationError, match=r"no tokenizer; those at .*code and .*words are not what it trained on, or"
    ):
        source.find_source(str(run))


def test_without_a_choice_every_shipped_task_runs_that_can_and_none_twice(storage: Path, tmp_path: Path) -> None:
    words = source.find_source(str(storage / "mine")).corpora
    assert harness.usual_tasks(None) == list(catalog.PYTHON_DOCS)
    assert harness.usual_tasks(words) == list(catalog.SHIPPED)
    manifest = Manifest.load(storage / "data" / "words")
    replace(manifest, recipe="python_docs").save(tmp_path)
    assert harness.usual_tasks(Corpora.at(tmp_path)) == list(catalog.OF_A_CORPUS)


@pytest.mark.parametrize(("context", "vocab_size", "rows"), [(128, 4096, 32), (1024, 32_000, 8), (8192, 128_256, 1)])
def test_without_a_choice_a_batchs_logits_are_a_gigabyte_at_most(
    context: int, vocab_size: int, rows: int, tmp_path: Path
) -> None:
    config = {"max_position_embeddings": context, "vocab_size": vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert harness.usual_batch_size(tmp_path) == rows


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(EvaluationError, match=r"^lm_eval missing; pip install 'regrow\[evaluate\]'"):
        harness.set_up([])


def test_the_list_needs_nothing_but_the_standard_library_and_regrow() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "jobs.evaluate", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(catalog.SHIPPED)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "ray", "hydra", "pyarrow", "lm_eval", "transformers"} & imported


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a run's folder or an exported model's"),
        (["runs/mine", "--limit", "0"], "'0' is not 1 or more"),
        (["runs/mine", "--batch-size", "big"], "'big' is not 1 or more"),
        (["runs/mine", "--num-fewshot", "-1"], "num-fewshot"),
        (["runs/mine", "--dtype", "float8"], "float8"),
    ],
)
def test_mistakes_in_arguments_are_usage_errors(arguments: list[str], message: str) -> None:
    assert message in job(*arguments, status=2).stderr.splitlines()[-1]


# lm-evaluation-harness itself.

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",  # where nobody listens: a request would fail
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "",
}


def own_model(run: Path) -> Llama:
    from regrow.model.llama import init_buffers
    from regrow.state.disk.tensors import CheckpointTensors

    tensors = CheckpointTensors(*choose(*checkpoints_of(str(run))), lambda num_bytes: None)
    with torch.device("meta"):
        model = Llama(MODEL)
    model.to_empty(device="cpu")
    model.load_state_dict({name: tensors.whole(f"model/{name}") for name, _ in model.named_parameters()})
    init_buffers(model)
    return model


@torch.no_grad()
def nats(model: Llama, context: list[int], tokens: list[int]) -> float:
    """How unlikely our own model finds the tokens behind a context."""
    logits_TV = model(torch.tensor([[*context, *tokens][:-1]]))[0, len(context) - 1 :].double()
    return torch.nn.functional.cross_entropy(logits_TV, torch.tensor(tokens), reduction="sum").item()


def bits_per_byte(model: Llama, tokenizer: Tokenizer, texts: list[str], eot_id: int, seq_len: int) -> float:
    """Each document from end-of-text on, in windows of the context; the last one reaches back to be full."""
    total = 0.0
    for ids in (each.tolist() for each in encode(tokenizer, texts)):
        for begin in range(0, len(ids), seq_len):
            end = min(begin + seq_len, len(ids))
            before = [eot_id] if begin == 0 else ids[max(0, end - seq_len - 1) : begin]
            total += nats(model, before, ids[begin:end])
    return total / math.log(2) / sum(len(text.encode()) for text in texts)


def accuracy(model: Llama, tokenizer: Tokenizer, asked: list[documents.Question]) -> float:
    right = 0
    for question in asked:
        (context,) = (each.tolist() for each in encode(tokenizer, [question.context]))
        choices = [each.tolist() for each in encode(tokenizer, list(question.choices))]
        scores = [nats(model, context[-(CORPUS.seq_len + 1 - len(choice)) :], choice) for choice in choices]
        right += scores.index(min(scores)) == question.answer
    return right / len(asked)


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_offline_the_shipped_tasks_find_what_our_own_model_computes(storage: Path, tmp_path: Path) -> None:
    """Of a run and of its export, whose tokenizer here would put a token before every text that training never saw."""
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    environment = {**OFFLINE, "TMPDIR": str(temporary), "HF_HOME": str(home)}
    run, corpus = storage / "mine", storage / "data" / "words"
    done = job(run, "--limit", "7", **environment)
    assert not list(temporary.iterdir())
    where = run / "evaluations" / "step-00000002-limit-7" / "results.json"
    assert done.stdout.splitlines()[0] == f"{run}, step 2"
    assert done.stdout.splitlines()[-1] == f"written to {where}"
    written = json.loads(where.read_text())
    assert written["model"] == {"folder": str(run), "run_id": RUN_ID, "step": 2}
    tasks = written["tasks"]
    assert tasks.keys() == catalog.SHIPPED.keys()
    for name, task in tasks.items():
        assert name in done.stdout
        assert (task["num_examples"], task["limit"], task["num_fewshot"], task["dtype"]) == (7, 7, 0, "float32")
        assert task["num_examples_there"] > 7
        assert {"lm_eval", "transformers", "torch", "regrow"} <= task["versions"].keys()

    model, eot_id = own_model(run), Manifest.load(corpus).tokenizer.eot_id
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    texts = {
        "python_docs": documents.python_docs(),
        "corpus": documents.validation_documents(ShardReader(corpus, "validation"), tokenizer),
    }
    for name, of in texts.items():
        want = bits_per_byte(model, tokenizer, of[:7], eot_id, CORPUS.seq_len)
        bits = tasks[f"{name}_bits"]["metrics"]
        assert bits["bits_per_byte"]["value"] == pytest.approx(want, rel=1e-5)
        assert math.log2(bits["byte_perplexity"]["value"]) == pytest.approx(want, rel=1e-5)
        chosen = tasks[f"{name}_continuation"]["metrics"]["acc"]
        assert chosen["value"] == pytest.approx(accuracy(model, tokenizer, questions(of)[:7]))
        assert chosen["stderr"] is not None

    folder = export(run, tmp_path / "hf")
    changed = Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", changed.token_to_id("a"))])
    changed.save(str(folder / "tokenizer.json"))
    out = tmp_path / "out"
    job(
        folder,
        "--tasks",
        "corpus_bits,corpus_continuation",
        "--corpus",
        corpus,
        "--limit",
        7,
        "--out",
        out,
        **environment,
    )
    again = json.loads((out / "results.json").read_text())
    assert again["model"] == {"folder": str(folder), "run_id": None, "step": None}
    for name in catalog.OF_A_CORPUS:
        assert again["tasks"][name]["metrics"] == tasks[name]["metrics"]


REFUSALS = """
import sys
from regrow.errors import EvaluationError
from regrow.evaluate import harness

harness.set_up(sys.argv[1:])
for names in (["corpus_bits"], ["python_docs_bits", "arc_easy"]):
    try:
        harness.load_tasks(names, None)
    except EvaluationError as error:
        print(error)
try:
    harness.evaluate(None, [], harness.Settings(device="cuda:9"))
except EvaluationError as error:
    print(error)
"""


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_cannot_run_is_named_with_what_can(storage: Path, tmp_path: Path) -> None:
    environment = {**OFFLINE, "HF_HOME": str(tmp_path / "home")}
    done = job(storage / "mine", "--tasks", "arc_esay", status=1, **environment)
    assert "error: unknown task 'arc_esay', did you mean arc_easy?; --list names" in done.stderr.splitlines()[-1]
    command = [sys.executable, "-c", REFUSALS, "arc_easy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    corpus, offline, device = done.stdout.splitlines()
    assert corpus == "corpus_bits reads a prepared corpus; name its folder with --corpus"
    assert offline.startswith("task arc_easy cannot be loaded (")
    assert offline.endswith(f"These need none: {', '.join(catalog.SHIPPED)}")
    assert device.startswith("--device cuda:9 cannot be used: ")
