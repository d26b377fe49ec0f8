"""Configurations without Hydra are those that Hydra composes."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from regrow.config import plain
from regrow.config.run_yaml import read_yaml
from regrow.config.schema import DataConfig, MixtureStage, OptimConfig, PretrainConfig
from regrow.config.store import load_run_config, pretrain_config, to_dict
from regrow.errors import ConfigError
from regrow.forecast.settle import settled
from regrow.record.run_folder import read_config
from regrow.storage import Storage

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        *([f"model={name}"] for name in names("model")),
        *([f"data={name}"] for name in names("data")),
        *([f"+cluster={name}"] for name in names("cluster")),
        ["+cluster=h100x64", "model=70b", "data=python_docs"],
        *([f"cluster.spare_workers={spares}"] for spares in ("auto", "0", "8", "-1", "null")),
        ["+cluster=h100x64", "cluster.spare_workers=8"],
        ["model=8b", "model.rope_scaling.factor=32", "optim.lr=3e-4", "train.steps=7", "run.name=a=b"],
        [
            "parallel.float8=rowwise",
            "parallel.compile=true",
            "cluster.threads_per_worker=null",
            "data.source=s3://a/b c",
        ],
        [
            "+data.corpora.web=/a/b",
            "optim.moments=bfloat16",
            "checkpoint.every_steps=null",
            "checkpoint.every_minutes=2",
        ],
    ],
    ids=" ".join,
)
def test_the_same_configuration_as_hydras(arguments: list[str]) -> None:
    quoted = [a if " " not in a and a.count("=") == 1 else a.replace("=", "='", 1) + "'" for a in arguments]
    assert plain.pretrain_config(arguments) == pretrain_config(quoted)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.stesp=3", "unknown setting 'train.stesp'; did you mean 'train.steps'?"),
        ("train.steps=many", "train.steps=many is no int"),
        ("parallel.float8=fast", "parallel.float8=fast is no Float8, one of none, tensorwise"),
        ("parallel.compile=maybe", "parallel.compile=maybe is no bool"),
        ("model=9b", "no model called '9b'; available: 150m, 1_8b"),
        ("data.mixture=[]", "data.mixture=[] cannot be given here; use jobs.pretrain"),
        ("train", "'train' is no key=value"),
        ("train=3", "train=3 cannot be given here"),
    ],
)
def test_a_mistake_is_one_line_with_the_value(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plain.pretrain_config([argument])
    assert str(caught.value).startswith(message)


def test_a_value_that_looks_like_a_choice_is_none() -> None:
    config = plain.pretrain_config(["+cluster=h100x64", "run.storage_path=/mnt/data=x/model=y"])
    assert (config.data.recipe, config.model.name) == ("fineweb_edu", "8b")


def test_models_that_are_sizes_alone_are_read_by_name() -> None:
    assert plain.read_model("150m").tied
    assert "debug" not in plain.models()
    assert plain.read_model("debug").name == "debug"


def test_every_command_of_torchrun_that_is_shown_trains() -> None:
    shown = [(ROOT / name).read_text().replace("\\\\\n", " ") for name in ("README.md", "jobs/pretrain_torchrun.py")]
    command = re.compile(r"torchrun --nproc-per-node (\d+) -m jobs\.pretrain_torchrun ((?:[\w.]+=\S+ *)*)")
    found = [match for text in shown for match in command.findall(text)]
    assert len(found) == 2
    for ranks, arguments in found:
        config = plain.pretrain_config(arguments.split())
        config.cluster.min_workers = config.cluster.max_workers = int(ranks)
        for gpus in (0, 1):
            config.cluster.gpus_per_worker = gpus
            settled(config)


CORPORA = {"en": "/a", "no": "/b", "2024": "/c", "on": "/d", "~": "/e", "a: b": "/f #"}


def mixed(**optim: float) -> PretrainConfig:
    weights = dict.fromkeys(CORPORA, 5e-5)
    data = DataConfig(corpora=CORPORA, mixture=[MixtureStage(0.0, weights), MixtureStage(1e16, weights)])
    return PretrainConfig(data=data, optim=OptimConfig(**optim))


def test_yaml_reads_names_of_corpora_as_words_and_small_floats_as_numbers() -> None:
    """Before, a corpus called "no" came back as False, by which jobs.report ended, and 1e-08 as a string."""
    config = mixed(eps=1e-8, lr=5e-5, max_grad_norm=float("inf"))
    assert yaml.safe_load(plain.to_yaml(config)) == to_dict(config)
    assert "  eps: 1.0e-08\n" in plain.to_yaml(config)
    assert '    en: "/a"\n    "no": "/b"\n    "2024": "/c"\n' in plain.to_yaml(config)


@given(
    names=st.dictionaries(st.text(max_size=20), st.text(max_size=20)),
    weights=st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False)),
    numbers=st.tuples(*[st.floats(allow_nan=False)] * 2),
)
def test_whatever_the_settings_are_yaml_reads_them_back(
    names: dict[str, str], weights: dict[str, float], numbers: tuple[float, float]
) -> None:
    data = DataConfig(corpora=names, mixture=[MixtureStage(numbers[0], weights)], cache_gb=numbers[1])
    text = plain.to_yaml(PretrainConfig(data=data)).encode()
    assert yaml.safe_load(text)["data"] == read_yaml(text)["data"] == asdict(data)


def test_an_older_configuration_of_a_run_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """Keys stood there bare, and floats as JSON has them."""
    text = """\
data:
  corpora:
    en: "/a"
    no: "/b"
    2024: "/c"
  mixture: [{"from_tokens": 1e+16, "weights": {"no": 5e-05}}]
optim:
  eps: 1e-08
  max_grad_norm: Infinity
run:
  name: "1e-08"
"""
    (tmp_path / "config.yaml").write_text(text)
    content = read_config(Storage.at(tmp_path))
    assert content["data"]["corpora"] == {"en": "/a", "no": "/b", "2024": "/c"}
    assert content["data"]["mixture"] == [{"from_tokens": 1e16, "weights": {"no": 5e-5}}]
    assert content["optim"] == {"eps": 1e-8, "max_grad_norm": float("inf")}
    assert content["run"] == {"name": "1e-08"}
    config = load_run_config(tmp_path)
    assert config.data.corpora == content["data"]["corpora"]
    assert config.data.mixture == [MixtureStage(1e16, {"no": 5e-5})]
    assert (config.optim.eps, config.run.name) == (1e-8, "1e-08")


def test_a_run_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(plain.to_yaml(mixed(lr=5e-5)))
    assert load_run_config(tmp_path) == mixed(lr=5e-5)
