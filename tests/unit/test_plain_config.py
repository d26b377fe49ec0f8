"""Configurations without Hydra are those that Hydra composes."""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from regrow.config import plain, store
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
        *([f"cluster.spare_workers={spares}"] for spares in ("auto", "0", "8", "-1", "null", "Null")),
        ["data.source=NULL", "train.stop_at_step=nUll"],
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


@pytest.mark.parametrize("text", ["/d/a b", "/d/läufe", "2026", "null", "it's", 'a"b', "a\\", "a\\\\'b", "true"])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_what_is_in_quotes_is_the_text_that_hydra_reads(text: str, quote: str) -> None:
    """As jobs.checkpoint prints commands; before, a run was begun anew in a folder whose name began with a quote."""
    escaped = re.sub(rf"(\\*)({quote}|$)", lambda found: 2 * found[1] + "\\" * bool(found[2]) + found[2], text)
    arguments = [f"run.name={quote}{escaped}{quote}", f"data.source={quote}{escaped}{quote}"]
    config = plain.pretrain_config(arguments)
    assert (config.run.name, config.data.source) == (text, text)
    assert config == pretrain_config(arguments)


@pytest.mark.parametrize("value", ["'/d/a", "'a'b'", '"', "\"a'"])
def test_quotes_that_do_not_end_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="has quotes that do not end, or more of them"):
        plain.pretrain_config([f"run.storage_path={value}"])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Adds files to a copy of conf/."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    monkeypatch.setattr(plain, "CONF_DIR", conf)
    monkeypatch.setattr(store, "CONF_DIR", conf)

    def add(files: dict[str, str]) -> None:
        for name, text in files.items():
            (conf / f"{name}.yaml").write_text(text, "utf-8")

    return add


GLOBAL = "# @package _global_\n"
MINE = f"{GLOBAL}defaults: [h100x64, _self_]\ncluster: {{name: mine, min_workers: 48}}\n"
HERE = """\
# @package _global_
defaults:
  - {bases}
  - override /model: 70b
  - _self_
cluster: {{name: mine, max_workers: 60}}
"""


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        ({"cluster/mine": MINE}, []),
        ({"cluster/mine": MINE}, ["model=1b"]),
        ({"cluster/mine": MINE.replace("[h100x64, _self_]", "[h100x64]")}, []),
        ({"cluster/mine": MINE.replace("[h100x64, _self_]", "[_self_, h100x64]")}, []),
        ({"cluster/mine": MINE.replace("[h100x64, _self_]", "[h100x512, h100x64]")}, []),
        ({"cluster/mine": HERE.format(bases="h100x64")}, []),
        ({"cluster/mine": HERE.format(bases="base"), "cluster/base": MINE}, []),
        ({"cluster/mine": HERE.format(bases="base"), "cluster/base": MINE}, ["data=text_files", "train.steps=9"]),
        ({"cluster/mine": MINE.replace("h100x64", "base"), "cluster/base": HERE.format(bases="gpu1")}, []),
        ({"cluster/mine": "defaults: [base]\nmax_workers: 7\n", "cluster/base": "defaults: [cpu3]\nname: b\n"}, []),
        ({"cluster/mine": "defaults: [gpu1]\nname: mine\n"}, []),
        ({"cluster/mine": "# @package cluster\nname: mine\n"}, []),
    ],
)
def test_a_file_that_builds_on_others_is_composed_as_hydra_does(
    own: Callable[[dict[str, str]], None], files: dict[str, str], arguments: list[str]
) -> None:
    """Before, +cluster=mine had nothing of what it builds on: the 5M model in place of 8b."""
    own(files)
    config = plain.pretrain_config(["+cluster=mine", *arguments])
    assert config == pretrain_config(["+cluster=mine", *arguments])
    assert config.cluster.name in ("mine", "h100x64", "b")


@pytest.mark.parametrize(
    ("defaults", "entry"),
    [
        ("[h100x64, h100x64]", "mine.yaml: defaults: h100x64"),
        ("[override /model: 8b, h100x64]", "h100x64"),
        ("[h100x64, h100x65]", "no cluster called 'h100x65'"),
        ("[/cluster/h100x64]", "/cluster/h100x64"),
        ("[optional h100x64]", "optional h100x64"),
        ("[h100x64@cluster]", "h100x64@cluster"),
        ("[/model: 8b]", "{'/model': '8b'}"),
        ("[override /model: null]", "{'override /model': None}"),
        ("[override /site: eks_p5]", "{'override /site': 'eks_p5'}"),
        ("['${cluster.name}']", "${cluster.name}"),
        ("", "mine.yaml: defaults: None is no list"),
        ("gpu1", "mine.yaml: defaults: gpu1 is no list"),
        ("[mine]", "conf/cluster/mine.yaml builds on conf/cluster/mine.yaml twice"),
        ("[one, other]", "conf/cluster/mine.yaml builds on conf/cluster/gpu1.yaml twice"),
    ],
)
def test_what_is_not_understood_of_defaults_is_refused(
    own: Callable[[dict[str, str]], None], defaults: str, entry: str
) -> None:
    above = dict.fromkeys(("cluster/one", "cluster/other"), f"{GLOBAL}defaults: [gpu1]\n")
    own({"cluster/mine": f"{GLOBAL}defaults: {defaults}\n", **above})
    with pytest.raises(ConfigError) as caught:
        plain.pretrain_config(["+cluster=mine"])
    assert entry in str(caught.value)


def test_only_a_file_of_a_cluster_chooses_of_other_groups(own: Callable[[dict[str, str]], None]) -> None:
    own({"model/mine": "defaults: [8b, override /data: fineweb_edu]\n"})
    with pytest.raises(ConfigError, match=r"conf/model/mine.yaml: only a file of conf/cluster chooses a data"):
        plain.pretrain_config(["model=mine"])


SAME = [
    "source: ~",
    'source: "/a # b"',
    "source: '/a/it''s'",
    "source: /a # b",
    "source: a#b",
    "source: 'null'",
    "source: 'yes'",
    "source: y",
    "source: 010",
    "source: 2026_11_28",
    "source: 2026-11-28",
    "source: 12:30:45",
    "source: |\n  a\n  b",
    "source: 1__0e3",
    "min_score:",
    "min_score: 3",
    "corpora: {web: /a, mail: 7}",
    "corpora: {web: /a}\nmixture:\n- from_tokens: 0\n  weights: {web: 1}\n- {from_tokens: 1e9, weights: {web: .5}}",
    "seq_len: '16'",
    "seq_len: 1_024",
    "seq_len: 0x10",
    "seq_len: 010",
    *(f"cache_gb: {number}" for number in ("1e-3", "12", "'7'", ".5", "-1E+3", "1_0e3", "1.5e3", ".inf")),
    "---\nseq_len: 16",
    "{seq_len: 16, source: /a}",
    "<<: {seq_len: 16}",
    "defaults: [fineweb_edu_all]\ntokenizer: null",
]
REFUSED = {
    "source: ${oc.env:HOME}/runs": "data.source=${oc.env:HOME}/runs is for Hydra to fill in",
    "source: ???": "data.source=??? is for Hydra to fill in",
    "source: true": "data.source=True is no text; write it in quotes",
    "source: no": "data.source=False is no text; write it in quotes",
    "source: 12e4": "data.source=120000.0 is no text; write it in quotes",
    "source: 1.5": "data.source=1.5 is no text; write it in quotes",
    "source: [a]": "data.source=['a'] is no text",
    "corpora: {no: /a}": "line 1: the key 'no' is no word; write it in quotes",
    "corpora: {2024: /a}": "line 1: the key '2024' is no word; write it in quotes",
    "corpora: {web: ~}": "data.corpora.web=null is no value: the setting is not Optional; a text goes in quotes",
    "corpora: [a]": "data.corpora=['a'] is no mapping",
    "corpora:": "data.corpora=null is no value: the setting is not Optional",
    "mixture: {}": "data.mixture={} is no list",
    "mixture: [1]": "data.mixture[0]=1 is no mapping",
    "mixture: [{x: 1}]": "unknown setting 'data.mixture[0].x'",
    "seq_len: 16.0": "data.seq_len=16.0 is no int",
    "seq_len: true": "data.seq_len=True is no int",
    "seq_len: null": "data.seq_len=null is no value: the setting is not Optional",
    "# @package _global_\nsnapshot: {every_steps: ~}": "snapshot.every_steps=null is no value",
    "cache_gb: true": "data.cache_gb=True is no float",
    "seq_len: 1\nseq_len: 2": "line 2: the key 'seq_len' is there twice",
    "seq_len: 1\n---\nseq_len: 2": "line 2: but found another document",
    "a: b: c": "line 1: mapping values are not allowed here",
    "- a": "is no mapping of settings: ['a']",
    "# @package train\nsteps: 3": "@package train is not read here; _global_ or data is",
}


@pytest.mark.parametrize("text", SAME)
def test_a_file_of_ones_own_is_read_as_hydra_does(own: Callable[[dict[str, str]], None], text: str) -> None:
    own({"data/mine": f"{text}\n"})
    config = plain.pretrain_config(["data=mine"])
    assert config == pretrain_config(["data=mine"])
    assert config.data != DataConfig() or text in ("source: ~", "min_score:")


@pytest.mark.parametrize(
    "text", ["rope_scaling: {factor: 4.0}", "rope_scaling: {}", "tied: yes", "name: 1b", "name: 8"]
)
def test_a_model_of_ones_own_is_read_by_its_name(own: Callable[[dict[str, str]], None], text: str) -> None:
    own({"model/mine": f"---\n{text}\n"})
    assert (
        plain.read_model("mine") == plain.pretrain_config(["model=mine"]).model == pretrain_config(["model=mine"]).model
    )


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_what_a_file_cannot_say_here_is_refused_with_its_name(
    own: Callable[[dict[str, str]], None], text: str, message: str
) -> None:
    own({"data/mine": f"{text}\n"})
    with pytest.raises(ConfigError) as caught:
        plain.pretrain_config(["data=mine"])
    assert str(caught.value).startswith(f"conf/data/mine.yaml: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", plain.models())
def test_a_models_sizes_are_the_same_without_pyyaml(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = plain.read_model(name)
    monkeypatch.setitem(sys.modules, "regrow.config.conf_yaml", None)
    assert plain.read_model(name) == known


@pytest.mark.parametrize("text", ["rope_scaling: {factor: 4.0}", "name: 'a b'", "- a", "norm_eps: 1e-6"])
def test_what_needs_pyyaml_says_so(
    own: Callable[[dict[str, str]], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own({"model/mine": f"dim: 16\n{text}\n"})
    monkeypatch.setitem(sys.modules, "regrow.config.conf_yaml", None)
    with pytest.raises(ConfigError, match=r"conf/model/mine.yaml: .* needs PyYAML, which is not installed"):
        plain.read_model("mine")


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
        *(
            (f"{key}={null}", f"{key.lstrip('+')}=null is no value: the setting is not Optional; a text goes in quotes")
            for key in ("run.name", "+data.corpora.web")
            for null in ("null", "NULL", "nUll")
        ),
        ("snapshot.every_steps=null", "snapshot.every_steps=null is no value: the setting is not Optional"),
        ("run.resume=Null", "run.resume=null is no value: the setting is not Optional"),
        ("data.mixture=null", "data.mixture=null is no value: the setting is not Optional"),
        ("run.storage_path=${oc.env:HOME}/runs", "run.storage_path=${oc.env:HOME}/runs is for Hydra to fill in"),
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
