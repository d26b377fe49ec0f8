"""benchmarks/throughput_table.py: every model that it names can be run on the clusters that it names."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from regrow.config.check import check
from regrow.config.store import pretrain_config
from regrow.data.preflight import check_corpus

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("[gh]*.yaml"))


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("throughput_table", ROOT / "benchmarks" / "throughput_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_all_workers_of_a_cluster_have_rows_of_a_corpus_that_needs_no_hub(
    table: ModuleType, cluster: str, tmp_path: Path
) -> None:
    for model in table.PUBLISHED:
        alike = table.settings_of(model, [f"+cluster={cluster}"])
        for recipe in ("none", "tensorwise_all_gather"):
            config = pretrain_config([*alike, f"parallel.float8={recipe}", "+data.corpora.random=/shared/random"])
            check(config)
            workers = config.cluster.max_workers
            assert config.cluster.min_workers == workers
            assert config.optim.global_batch_seqs == workers * table.SETTINGS[model][0]
            assert (config.data.source, config.data.tokenizer) == (None, None)


def test_what_was_given_prevails_and_the_corpus_fills_two_batches(table: ModuleType, tmp_path: Path) -> None:
    given = ["+cluster=h100x64", "cluster.max_workers=8", "data.seq_len=64", "parallel.compile=false"]
    alike = table.settings_of("70b", [*given, "model.vocab_size=100352", "parallel.activation_checkpoint=none"])
    config = pretrain_config([*alike, f"+data.corpora.random={tmp_path}"])
    assert (config.optim.global_batch_seqs, config.optim.num_slices) == (16, 8)
    assert (config.parallel.compile, config.parallel.activation_checkpoint) == (False, "none")
    table.make_corpus(tmp_path, config)
    assert check_corpus(config).num_rows == 32


@pytest.mark.parametrize(
    ("cluster", "model", "fits"), [("h100x64", "70b", True), ("h100x64", "405b", False), ("h100x512", "405b", True)]
)
def test_what_fits_by_its_settings(table: ModuleType, cluster: str, model: str, fits: bool) -> None:
    reason = table.what_does_not_fit([*table.settings_of(model, [f"+cluster={cluster}"]), "parallel.float8=none"])
    assert (reason == "") is fits, reason
