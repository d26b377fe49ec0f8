"""The command line: quick answers, and one clear line for every mistake."""

import errno
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow import direct_file
from regrow.config import store
from regrow.config.check import check, check_data, check_new, geometry, topologies, world_sizes
from regrow.config.schema import (
    AttentionKernel,
    ClusterConfig,
    CompileMode,
    Dtype,
    Float8,
    MixtureStage,
    PipelineSchedule,
    PretrainConfig,
    RopeScaling,
    Schedule,
)
from regrow.config.spares import most_workers
from regrow.config.store import as_typed, load_run_config, pretrain_config, pretrain_overrides, to_dict
from regrow.errors import BatchError, ConfigError
from regrow.forecast.settle import settled
from regrow.record.run_folder import read_record, write_record
from regrow.runtime import driver
from regrow.storage import LocalStorage, Storage
from regrow.submit.render import entrypoint
from support.commands import call

ROOT = Path(__file__).parents[2]


def pretrain(*arguments: str, ray_address: str = "") -> subprocess.CompletedProcess[str]:
    return run_job("pretrain", *arguments, ray_address=ray_address)


def pretrain_alone(*arguments: str, ray_address: str = "") -> subprocess.CompletedProcess[str]:
    """The same as a process."""
    return subprocess.run(
        [sys.executable, "-m", "jobs.pretrain", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | without_ray(ray_address),
    )


def run_job(job: str, *arguments: str, ray_address: str = "") -> subprocess.CompletedProcess[str]:
    return call(job, *arguments, env=without_ray(ray_address))


def without_ray(address: str = "") -> dict[str, str]:
    return {"RAY_ADDRESS": address, "RAY_TMPDIR": "/nowhere-that-matters"}


def test_help_names_every_group_and_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, runpy; sys.argv = ['jobs.pretrain', '--help']\n"
        "try: runpy.run_module('jobs.pretrain', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "HEAVY []" in done.stdout, done.stdout + done.stderr
    for word in ("+cluster=h100x64", "h100x512", "debug", "405b", "num_slices", "every_steps"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("job", "own"),
    [
        ("pretrain", []),
        ("prepare_data", []),
        ("plan", []),
        ("submit", ["site"]),
        ("drill", ["drill"]),
        ("simulate", ["simulate/faults", "simulate/policy", "simulate/scale", "simulate/world"]),
    ],
)
def test_each_group_that_help_names_can_be_chosen(job: str, own: list[str]) -> None:
    """Before, all jobs named all groups, and said of each that it is chosen with a plus, which was refused."""
    printed = run_job(job, "--help").stdout.partition(" ==\n")[2].partition("\n\n")[0]
    groups = {group: files.split(", ") for group, _, files in (line.partition(": ") for line in printed.splitlines())}
    assert sorted(groups) == sorted(["cluster", "data", "model", *own])
    for group, files in groups.items():
        plus = "+" if group in ("cluster", "site", "drill") else ""
        done = run_job(job, "--cfg", "job", f"{plus}{group}={files[0]}")
        assert done.returncode == 0, done.stderr


def test_cfg_job_prints_the_resolved_configuration() -> None:
    done = pretrain_alone("--cfg", "job", "+cluster=cpu3", "train.steps=7")
    assert done.returncode == 0, done.stderr
    assert "steps: 7" in done.stdout
    assert "local_nodes: 3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train.stepz=5"], "unknown setting 'train.stepz'; did you mean 'train.steps'?"),
        (["model=8c"], "no model called '8c'; available: "),
        (["+cluster=h100"], "no cluster called 'h100'; available: cpu3, "),
        (["+model=8b"], "model is chosen without a plus: model=8b"),
        (["+data=python_docs"], "data is chosen without a plus: data=NAME"),
        (["+cluster=cpu3", "+cluster=gpu1"], "cluster is given twice: give it once, as +cluster=gpu1"),
        (["drill=kill_node"], "unknown setting 'drill'; drill belongs to jobs.drill"),
        (["+drill=kill_node"], "drill belongs to jobs.drill"),
        (["simulate/faults=llama3"], "unknown setting 'simulate/faults'; simulate belongs to jobs.simulate"),
        (["+simulate/faults=llama3"], "simulate belongs to jobs.simulate"),
        (["+site=infiniband"], "submit, which files of site set, belongs to jobs.submit"),
        (["submit.action=apply"], "unknown setting 'submit.action'; submit, which files of site set, belongs to"),
        (["+drill.nodes=3"], "unknown setting 'drill'; drill belongs to jobs.drill"),
        (["data.corpora.a=b"], "data.corpora has no a yet; new entries are added with a plus: +data.corpora.a=..."),
        (["train.steps=many"], "train.steps"),
        (["parallel.float8=fp9"], "parallel.float8"),
        (["optim.num_slices=7"], "set optim.global_batch_seqs=14"),
        (["cluster.max_workers=5"], "set optim.num_slices="),
        (["cluster.max_workers=16"], "gives 0 slices to 4 of 16 ranks"),
        (["parallel.float8=rowwise"], "needs parallel.dtype=bfloat16"),
        (
            ["+cluster=gpu1", "model=8b", "parallel.attention=efficient"],
            "knows no grouped queries, and model.num_heads=32 share model.num_kv_heads=8",
        ),
        (["+cluster=gpu1", "data.seq_len=1000", "parallel.float8=tensorwise"], "must be a multiple of 16 on GPUs"),
        (["run.name=../x"], "run.name='../x'"),
        (
            ["run.storage_path=s3://me:word@bucket/x"],
            "run.storage_path has a user and a password, or a signature, in its URI",
        ),
        (["+data.corpora.x=y", "model.rope_scaling.factor=8"], "model.rope_scaling.factor: model.rope_scaling is null"),
        (["train.steps"], "train.steps"),
        (["train.steps=a=b"], "train.steps=a=b: mismatched input '='"),
        (["data.source=/texts"], "data=python_docs reads none; give data=text_files or data=fineweb_edu"),
        (["=3"], "=3 names no setting: a variable in front of it may be empty"),
        (["data=null"], "a group of files takes the name of one: data=NAME in place of data=null"),
        (["+cluster=1", "model=8b"], "a group of files takes the name of one: cluster=NAME in place of cluster=1"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_the_fix(arguments: list[str], line: str) -> None:
    assert_one_line(pretrain(*arguments), line)


def test_so_it_does_as_a_process() -> None:
    assert_one_line(pretrain_alone("train.stepz=5"), "unknown setting 'train.stepz'; did you mean 'train.steps'?")


def assert_one_line(done: subprocess.CompletedProcess[str], line: str) -> None:
    assert done.returncode != 0
    assert done.stderr.startswith("error: "), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("secret", ["word", "wo/rd+/x"])
@pytest.mark.parametrize(
    "setting",
    ["run.storage_path", "data.source", "data.tokenizer", "+data.corpora.web", "parallel.compile_cache"],
    ids=lambda name: name.lstrip("+"),
)
def test_credentials_in_a_uri_are_refused_and_not_shown(setting: str, secret: str) -> None:
    config = pretrain_config([f"{setting}=s3://me:{secret}@bucket/x"])
    for rules in (check, check_data):
        with pytest.raises(ConfigError, match=rf"^{setting.lstrip('+')} has .*AWS_SECRET_ACCESS_KEY") as caught:
            rules(config)
        assert secret not in str(caught.value).replace("password", "")
    for option in ("?sv=2024&sig=s3cr3t", "?region=x&X-Amz-Signature=s3cr3t"):
        with pytest.raises(ConfigError, match="or a signature, in its URI") as caught:
            check(pretrain_config([f"{setting}='abfss://runs@account.dfs.core.windows.net/x{option}'"]))
        assert "s3cr3t" not in str(caught.value)
    for place in ("s3://bucket/a:b@c", "hdfs://node:8020/a@b"):  # no credentials
        check(pretrain_config([f"{setting}={place}", "data=text_files"]))


@pytest.mark.parametrize(
    ("job", "setting", "arguments"),
    [
        ("pretrain", "run.storage_path", []),
        ("pretrain", "run.storage_path", ["+data.corpora.web=/dev"]),
        ("pretrain_torchrun", "run.storage_path", []),
        ("prepare_data", "run.storage_path", []),
        ("drill", "run.storage_path", ["+drill=kill_node"]),
        ("simulate", "simulate.out", ["+cluster=h100x64", "simulate.days=1", "simulate.replicas=2"]),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line_before_anything_starts(
    job: str, setting: str, arguments: list[str]
) -> None:
    done = run_job(job, *arguments, f"{setting}=/dev/null/x")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: /dev/null/x(/data)? is no folder to write to \(Not a directory\); set {setting} to one\n", done.stderr
    )
    assert done.stdout == ""


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_place_that_fails_is_one_line_wherever_a_job_meets_it(number: int) -> None:
    with pytest.raises(SystemExit, match=rf"^error: /runs/x: {os.strerror(number)}$"):
        meet(OSError(number, os.strerror(number), "/runs/x"))


def test_a_disk_that_is_full_when_a_run_begins_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(direct_file.os, "write", lambda file, data: (_ for _ in ()).throw(full))
    said = pytest.raises(SystemExit, match=rf"^error: {tmp_path}/run.json: No space left on device$")
    with said, store._mistakes_in_one_line(PretrainConfig):
        write_record(LocalStorage(tmp_path), run_id="mine", identity={}, manifest_sha256="aa", is_new=True)


def test_a_remote_store_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Storage.at("memory://nowhere/mine")
    folder.retry_s = 0.0
    gone = OSError("connection refused\nand more of the client's words")
    monkeypatch.setattr(folder, "open_file", lambda path: (_ for _ in ()).throw(gone))
    said = "error: memory://nowhere/mine/run.json: still failing after 0 s: connection refused"
    with pytest.raises(SystemExit, match=f"^{said}$"), store._mistakes_in_one_line(PretrainConfig):
        read_record(folder)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "of no file"), OSError(errno.EBADF, "of a bug", "/runs/x"), OSError("of a library")]
)
def test_other_errors_of_the_system_keep_their_traceback(error: OSError) -> None:
    with pytest.raises(OSError, match="of ") as caught:
        meet(error)
    assert caught.value is error


def meet(error: OSError) -> None:
    """What a job that raises this ends with."""
    with store._mistakes_in_one_line(PretrainConfig):
        raise error


@pytest.mark.parametrize(("argument", "files"), [("~data", ["model"]), ("~model", ["data"])])
def test_a_group_without_a_file_is_as_the_schema_has_it(argument: str, files: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['jobs.pretrain', {argument!r}]\n"
        "from regrow.config.store import given_files, given_overrides, pretrain_overrides, run_job\n"
        "def job(config): print(list(given_files()), pretrain_overrides(config, given_overrides(), given_files()))\n"
        "run_job(job, name='pretrain')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{files} {[argument]}\n", "")


@pytest.mark.parametrize("text", ["2026_11_28", "12e4", "true", "1.50", "+7", "0x10", "no", "'1e3'"])
def test_a_text_is_what_was_typed(text: str) -> None:
    """Before, jobs.pretrain trained in runs/20261128, and in runs/120000.0, where runs were then looked for in vain."""
    config = pretrain_config([f"run.name={text}", f"data.language={text}", f"+data.corpora.web={text}"])
    typed = text.strip("'")
    assert (config.run.name, config.data.language, config.data.corpora) == (typed, typed, {"web": typed})


PLACES = ["~/runs", "/data/läufe", "/d/a=b", "/d/a(b)", "/d/a[1]", "/d/{a}", "/d/it's", "/d/a#b&c;d", "/d/a b", "é\\"]


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_what_was_typed_here_and_in_the_job_that_is_submitted(place: str) -> None:
    """Before, a lexer's exception, or mismatched input '=' expecting <EOF>."""
    given = [f"run.storage_path={place}", f"+data.corpora.web={place}"]
    config = pretrain_config(given)
    assert (config.run.storage_path, config.data.corpora) == (place, {"web": place})
    for arguments in (given, as_typed(given), []):
        words = shlex.split(entrypoint(pretrain_overrides(config, arguments)))
        assert pretrain_config(words[words.index("jobs.pretrain") + 1 :]) == config


@pytest.mark.parametrize("given", ["run.storage_path='/d/a", "run.storage_path", "train.steps=a=b"])
def test_what_is_no_text_or_has_quotes_that_do_not_end_is_still_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        pretrain_config([given])


def test_numbers_truth_values_and_what_may_be_either_stay_what_they_are() -> None:
    given = ["train.steps=1_000", "cluster.dashboard=false", "snapshot.every_steps=10", "data.source=null"]
    config = pretrain_config([*given, "snapshot.domain_label=null"])
    assert (config.train.steps, config.cluster.dashboard, config.snapshot.every_steps) == (1000, False, 10)
    assert (config.data.source, config.snapshot.domain_label) == (None, None)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("node_selector: {gpu: true}", "submit.node_selector.gpu: a text is wanted, and this is read as true;"),
        ("env: {ZONE: on}", "submit.env.ZONE: a text is wanted, and this is read as true; write it in quotes"),
        ("tolerations: [{key: a, operator: Equal, value: true}]", "this is read as true; write it in quotes"),
        ("node_selector: {tier: 1e3}", "submit.node_selector.tier: a text is wanted, and this is read as 1000.0;"),
    ],
)
def test_a_file_that_has_something_else_than_a_text_is_refused(tmp_path: Path, settings: str, line: str) -> None:
    """Before, pods asked for a node with the label gpu=True, and waited for good."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/mine.yaml").write_text(f"# @package _global_\nsubmit:\n  {settings}\n")
    done = run_job("submit", "--config-dir", str(tmp_path), "+cluster=h100x64", "+site=mine")
    assert (done.returncode, done.stdout) == (1, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def several(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    """A job that says how many steps it is to train, twice."""
    code = (
        f"import sys; sys.argv = ['jobs.pretrain', '-m', 'train.steps=3,4', 'hydra.sweep.dir={tmp_path}']\n"
        "from regrow.config.store import run_job\n"
        f"run_job(lambda config: print(config.train.steps), name='pretrain'{how})"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_one_command_is_one_run(tmp_path: Path) -> None:
    """Before, jobs.submit and jobs.drill carried out the first one, and ended as if that were all."""
    done = several(tmp_path, "")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: -m makes 2 runs, and a command is for one; give each a command of its own")
    assert len(done.stderr.splitlines()) == 1


def test_a_job_that_starts_nothing_takes_several(tmp_path: Path) -> None:
    assert several(tmp_path, ", takes_several=True").stdout == "3\n4\n"


def test_the_users_choice_of_model_wins_over_the_clusters() -> None:
    assert "name: 8b\n" in pretrain("--cfg", "job", "+cluster=h100x64").stdout
    assert "name: 1b\n" in pretrain("--cfg", "job", "+cluster=h100x64", "model=1b").stdout


@pytest.mark.parametrize("cluster", sorted(path.stem for path in (ROOT / "conf/cluster").glob("*.yaml")))
def test_every_cluster_file_passes_every_rule(cluster: str) -> None:
    config = pretrain_config([f"+cluster={cluster}"])
    table = check(config)
    assert all(
        table[size].batch.busy_share >= 0.85 for size in world_sizes(config, table).values()
    )  # the rest are spares


def test_who_is_a_spare_is_the_fewest_ranks_where_workers_have_gpus_and_what_is_said_elsewhere() -> None:
    def config(**cluster: Any) -> PretrainConfig:
        made = PretrainConfig(cluster=ClusterConfig(min_workers=5, max_workers=9, **cluster))
        made.optim.num_slices = made.optim.global_batch_seqs = 16
        return made

    auto, all_of_them = {5: 5, 6: 6, 7: 6, 8: 8, 9: 8}, {size: size for size in range(5, 10)}
    for cluster, sizes, most in (
        ({"spare_workers": "auto"}, auto, 9),
        ({"gpus_per_worker": 1}, auto, 9),
        ({}, all_of_them, 9),
        ({"spare_workers": 2}, all_of_them, 11),
        ({"spare_workers": 0, "gpus_per_worker": 1}, all_of_them, 9),
        ({"spare_workers": "auto", "in_place": False}, all_of_them, 9),
    ):
        made = config(**cluster)
        assert world_sizes(made) == sizes, cluster
        assert most_workers(made.cluster) == most


def test_more_units_than_slices_are_allowed_where_the_others_are_spares() -> None:
    made = PretrainConfig(cluster=ClusterConfig(min_workers=4, max_workers=5))
    made.optim.num_slices = made.optim.global_batch_seqs = 4
    with pytest.raises(BatchError, match="gives 0 slices to 1 of 5 ranks"):
        check(made)
    made.cluster.spare_workers = "auto"
    assert list(check(made)) == [4]
    assert world_sizes(made) == {4: 4, 5: 4}
    assert "spares by number of workers: 5:1" in geometry(made, check(made))
    made.cluster.min_workers = 3  # which a group has, whose six passes are for four slices
    with pytest.raises(BatchError, match="leaves ranks idle 33% of the passes at 3 workers"):
        check(made)


@pytest.mark.parametrize(("tokenizer", "fewer"), [(None, r" or data\.vocab_size=4096"), ("mine.json", "")])
def test_fewer_ids_are_offered_where_the_tokenizer_is_made_here(tokenizer: str | None, fewer: str) -> None:
    """One that is given has as many as it has: preparing refused what was offered."""
    config = PretrainConfig()
    config.data.vocab_size, config.data.tokenizer = 8192, tokenizer
    with pytest.raises(ConfigError, match=rf"data\.vocab_size=8192; set model\.vocab_size=8192{fewer}$"):
        check(config)


def test_the_defaults_pass_every_rule() -> None:
    assert list(check(PretrainConfig())) == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 0),
        ("train.stop_at_step", 401),
        ("train.validation_seqs", -1),
        ("train.nonfinite_skips", -1),
        ("train.nonfinite_rollbacks", -1),
        ("train.collective_timeout_s", float("inf")),
        ("train.collective_timeout_s", 1e14),
        ("cluster.silence_s", float("inf")),
        ("cluster.cpus_per_worker", float("nan")),
        ("cluster.spare_workers", -1),
        ("cluster.spare_workers", "many"),
        ("cluster.quarantine_failures", -1),
        ("cluster.quarantine_s", -1.0),
        ("cluster.quarantine_s", 1.0),
        ("cluster.max_failures", -2),
        ("cluster.cpus_per_worker", 1e-5),
        ("data.stream_cpus", -1.0),
        ("data.stream_cpus", 1e-5),
        ("cluster.probe_every_steps", -1),
        ("cluster.verify_every_steps", -1),
        ("cluster.least_link_gb_per_s", -1),
        ("cluster.silence_s", 1.0),
        ("cluster.stuck_s", 1.0),
        ("cluster.drain_slow_s", -1.0),
        ("cluster.wait_for_workers_s", -1.0),
        ("optim.num_slices", 0),
        ("cluster.gpus_per_worker", 2),
        ("cluster.cpus_per_worker", 0),
        ("model.dim", 0),
        ("model.num_heads", 0),
        ("model.num_heads", 7),
        ("model.num_kv_heads", 0),
        ("model.num_kv_heads", -1),
        ("model.num_kv_heads", 3),
        ("model.ffn_dim", 0),
        ("model.norm_eps", 0.0),
        ("model.norm_eps", float("nan")),
        ("model.rope_theta", 0.0),
        ("data.seq_len", 1),
        ("data.vocab_size", 8192),
        ("data.rows_per_shard", 100),
        ("data.rows_per_shard", 0),
        ("data.validation_fraction", 0.0),
        ("optim.lr", 0.0),
        ("optim.eps", -1.0),
        ("optim.weight_decay", -0.1),
        ("optim.warmup_fraction", 0.8),
        ("optim.beta2", 1.0),
        ("parallel.dp_replicate", 3),
        ("parallel.tp", 0),
        ("parallel.tp", 3),
        ("parallel.pp", 0),
        ("parallel.pp", 5),
        ("parallel.stages_per_rank", 1),
        ("parallel.loss_chunk_tokens", -1),
        ("parallel.activation_budget", 1.5),
        ("parallel.activation_budget", 0.5),
        ("parallel.prefetch_blocks", 0),
        ("parallel.bfloat16_tail", 1.5),
        ("parallel.attention", AttentionKernel.cudnn),
        ("parallel.compile_mode", CompileMode.max_autotune),
        ("checkpoint.every_steps", 0),
        ("checkpoint.every_minutes", 0.0),
        ("checkpoint.timeout_s", 0.0),
        ("snapshot.slots", 1),
        ("snapshot.every_steps", -1),
        ("snapshot.every_steps", "often"),
        ("snapshot.most_steps_lost", 0),
        ("checkpoint.mtbf_hours", -1.0),
        ("checkpoint.keep", 1),
        ("checkpoint.keep_every_steps", 300),
        ("checkpoint.keep_every_steps", -200),
        ("observe.profile_at_step", 0),
        ("observe.profile_at_step", 401),
        ("observe.profile_steps", 0),
        ("observe.peak_tflops", 0.0),
    ],
)
def test_each_rule_names_its_key_and_value(key: str, value: object) -> None:
    config = PretrainConfig()
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    with pytest.raises(ConfigError) as error:
        check(config)
    assert f"{key}={value}" in str(error.value)


def test_adamw_without_eps_goes_on_where_a_run_has_begun_with_it() -> None:
    """Before, such a run could neither go on nor be changed: eps fixes its weights."""
    config = PretrainConfig()
    config.optim.eps = 0.0
    check(config)
    with pytest.raises(ConfigError, match=r"^optim.eps=0.0 must be positive: what has no gradient yet would"):
        check_new(config)
    config.optim.eps = 1e-12
    check_new(config)


@pytest.mark.parametrize("key", ["beta1", "beta2"])
def test_moments_in_bfloat16_take_betas_with_which_they_fall(key: str) -> None:
    config = PretrainConfig()
    setattr(config.optim, key, 0.999)
    check_new(config)
    config.optim.moments = Dtype.bfloat16
    check(config)  # a run that began so, before, goes on
    with pytest.raises(
        ConfigError, match=rf"optim.{key}=0.999 with optim.moments=bfloat16: .* set optim.{key}=0.99 or"
    ):
        check_new(config)
    setattr(config.optim, key, 0.99)
    check_new(config)


def test_a_profile_is_of_steps_that_the_job_trains() -> None:
    """Before, of later ones none was taken, and nothing said so."""
    config = PretrainConfig()
    config.train.stop_at_step, config.observe.profile_at_step = 30, 30
    check(config)
    config.observe.profile_at_step = 31
    with pytest.raises(ConfigError, match=r"observe.profile_at_step=31 is beyond the last step of this job, 30"):
        check(config)


def test_units_that_verify_each_other_need_a_slot_more() -> None:
    config = PretrainConfig()
    config.cluster.max_workers, config.snapshot.slots = 3, 2
    check(config)
    config.cluster.verify_every_steps = 100
    with pytest.raises(ConfigError, match=r"snapshot\.slots=2 must be at least 3 with .*verify_every_steps=100"):
        check(config)
    config.snapshot.every_steps = 0
    check(config)


def test_nodes_of_spares_hold_copies_and_a_cosine_has_no_decay_of_its_own() -> None:
    config = PretrainConfig()
    config.cluster.max_workers, config.cluster.spare_workers, config.snapshot.copies = 2, 2, 2
    config.optim.schedule, config.optim.warmup_fraction = Schedule.cosine, 0.8
    check(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", 0.0), ("factor", float("inf")), ("low_freq_factor", 0.0), ("high_freq_factor", 1.0)],
)
def test_a_scaling_of_rope_divides_by_nothing(name: str, value: float) -> None:
    config = PretrainConfig()
    config.model.rope_scaling = RopeScaling(**{name: value})
    with pytest.raises(ConfigError, match=rf"model\.rope_scaling\.{name}={value} "):
        check(config)


def test_every_number_of_a_mixture_is_one() -> None:
    config = PretrainConfig()
    config.data.corpora = {"web": "/data/web"}
    config.data.mixture = [MixtureStage(0, {"web": float("nan")})]
    with pytest.raises(ConfigError, match=r"data\.mixture\[0\]\.weights\.web=nan must be a finite number"):
        check(config)


def test_a_cluster_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        corpus = ["data=python_docs", "data.seq_len=128"]  # which is large enough
        done = pretrain_alone("+cluster=h100x64", *corpus, f"run.storage_path={tmp_path}", ray_address=address)
    assert done.returncode == 1
    assert "needs 64 GPUs (at least 32), found 0: no Ray cluster at 'auto' (the head at" in done.stderr
    assert "does not answer" in done.stderr
    assert done.stderr.count("\n") == 1


def test_float8_needs_bfloat16() -> None:
    config = PretrainConfig()
    config.parallel.float8 = Float8.rowwise
    with pytest.raises(ConfigError, match=r"parallel\.dtype=bfloat16"):
        check(config)
    config.parallel.dtype = Dtype.bfloat16
    check(config)


def test_what_is_on_the_host_is_not_gathered_as_float8() -> None:
    config = PretrainConfig()
    config.parallel.cpu_offload, config.parallel.dtype = True, Dtype.bfloat16
    for recipe in Float8:
        config.parallel.float8 = recipe
        if recipe is not Float8.tensorwise_all_gather:
            check(config)
    config.parallel.float8 = Float8.tensorwise_all_gather
    with pytest.raises(ConfigError, match=r"set parallel\.float8=tensorwise$"):
        check(config)


def test_attention_within_documents_has_a_kernel_of_its_own() -> None:
    config = PretrainConfig()
    config.parallel.attention = AttentionKernel.flash
    check(config)
    config.model.document_attention = True
    with pytest.raises(ConfigError, match=r"model\.document_attention=true: set parallel\.attention=auto"):
        check(config)


@pytest.mark.parametrize("kernel", [AttentionKernel.flash, AttentionKernel.cudnn])
def test_attention_of_gpus_in_float32_is_refused_where_its_kernel_has_none(kernel: AttentionKernel) -> None:
    config = PretrainConfig()
    config.cluster.gpus_per_worker, config.parallel.attention = 1, kernel
    with pytest.raises(ConfigError, match=r"takes bfloat16 on a GPU, and parallel\.dtype=float32: set parallel\.dtype"):
        check(config)
    config.parallel.dtype = Dtype.bfloat16
    check(config)


def test_attention_whose_sums_have_no_order_is_refused_where_units_are_compared() -> None:
    """torch has no deterministic cuDNN attention: with CUBLAS_WORKSPACE_CONFIG no group came past its first step."""
    config = PretrainConfig()
    config.cluster.gpus_per_worker, config.parallel.dtype = 1, Dtype.bfloat16
    config.parallel.attention, config.cluster.verify_every_steps = AttentionKernel.cudnn, 100
    with pytest.raises(ConfigError, match=r"verify_every_steps=100 compares .* set parallel\.attention=auto or"):
        check(config)
    config.parallel.attention = AttentionKernel.flash
    check(config)


def test_ranks_that_share_their_arithmetic_divide_what_they_share() -> None:
    config = PretrainConfig()
    config.parallel.tp, config.cluster.min_workers, config.cluster.max_workers = 4, 4, 8
    assert {size: each.batch.world_size for size, each in check(config).items()} == {4: 1, 8: 2}
    config.model.num_kv_heads = 2
    with pytest.raises(ConfigError, match=r"parallel\.tp=4 must divide model\.num_kv_heads=2; set parallel\.tp=2"):
        check(config)
    config.model.num_kv_heads, config.cluster.max_workers = 4, 6
    with pytest.raises(ConfigError, match=r"cluster\.max_workers=6; set parallel\.tp=2"):
        check(config)
    config.cluster.max_workers, config.optim.num_slices = 40, 8
    config.optim.global_batch_seqs = 8
    with pytest.raises(BatchError, match=r"gives 0 slices to 2 of 10 ranks"):
        check(config)


def test_pipelines_have_whole_units_at_full_size_and_a_block_a_stage() -> None:
    config = PretrainConfig()
    config.parallel.pp, config.cluster.min_workers, config.cluster.max_workers = 2, 2, 8
    with pytest.raises(
        BatchError, match=r"optim\.num_slices=12 leaves 20% of the ranks' time idle at 5 workers, where"
    ):
        check(config)
    config.optim.num_slices = config.optim.global_batch_seqs = 24
    table = check(config)
    assert {size: each.batch.world_size for size, each in table.items() if size % 2 == 0} == {2: 1, 4: 2, 6: 3, 8: 4}
    stages = table[8].stages
    assert stages is not None
    assert stages.blocks == (range(3), range(3, 4))  # the output takes the time of 1.4 blocks
    assert table[8].bubble_share == pytest.approx(1 / 7)
    assert {size: each.mesh.pp for size, each in table.items()} == {2: 2, 3: 1, 4: 2, 5: 1, 6: 2, 7: 1, 8: 2}
    assert world_sizes(config) == {size: size for size in range(2, 9)}
    config.parallel.least_pp = 2
    assert {size: each.mesh.pp for size, each in topologies(config).items()} == {2: 2, 3: 3, 4: 2, 6: 2, 8: 2}
    assert world_sizes(config)[5] == 4, "no number of stages from 2 to 4 divides five"
    config.parallel.least_pp = 3
    with pytest.raises(ConfigError, match=r"parallel\.least_pp=3 must be 1 to parallel\.pp=2"):
        check(config)
    config.parallel.least_pp = 1
    config.parallel.schedule, config.parallel.stages_per_rank = PipelineSchedule.interleaved, 3
    with pytest.raises(ConfigError, match=r"model\.num_layers=4 are fewer than the 6 stages of parallel\.pp=2, 3 a"):
        check(config)
    config.parallel.stages_per_rank = 2
    assert check(config)[8].bubble_share == pytest.approx(1 / 13)
    config.cluster.max_workers = 7
    with pytest.raises(ConfigError, match=r"cluster\.max_workers=7 must be a multiple of parallel\.pp=2 workers"):
        check(config)


def test_ranks_that_share_rows_cut_them_in_whole_chunks_and_hold_one_at_least() -> None:
    config = PretrainConfig()
    config.parallel.cp, config.cluster.min_workers, config.cluster.max_workers = 2, 3, 8
    assert {size: each.batch.world_size for size, each in check(config).items()} == {4: 2, 6: 3, 8: 4}
    config.cluster.min_workers = 2
    assert world_sizes(config) == {2: 2, 3: 2, 4: 4, 5: 4, 6: 6, 7: 6, 8: 8}, "a rank without another one waits"
    for key, value, message in (
        (
            "data.seq_len",
            130,
            r"data\.seq_len=130 must be a multiple of 4 for parallel\.cp=2, .* set data\.seq_len=128",
        ),
        ("cluster.max_workers", 7, r"cluster\.max_workers=7 must be a multiple of parallel\.cp=2 .*max_workers=8"),
        ("cluster.min_workers", 1, r"cluster\.min_workers=1 must be at least parallel\.cp=2 .*min_workers=2"),
        ("parallel.cp", 0, r"parallel\.cp=0 must be at least 1"),
        ("parallel.dp_replicate", 3, r"parallel\.dp_replicate=3 must divide cluster\.max_workers=8/parallel\.cp=2"),
        ("parallel.attention", AttentionKernel.flash, r"parallel\.cp=2 shares them out; set parallel\.attention=auto"),
    ):
        group, name = key.split(".")
        section = getattr(config, group)
        before = getattr(section, name)
        setattr(section, name, value)
        with pytest.raises(ConfigError, match=message):
            check(config)
        setattr(section, name, before)
    config.parallel.tp, config.data.seq_len, config.cluster.min_workers = 4, 4, 8
    with pytest.raises(
        ConfigError, match=r"data\.seq_len=4 must be a multiple of 8 for parallel\.cp=2 and parallel\.tp=4"
    ):
        check(config)
    config.parallel.tp, config.data.seq_len, config.parallel.pp, config.cluster.min_workers = 1, 16, 2, 4
    config.model.num_layers = 4
    assert {size: (each.mesh.pp, each.mesh.num_units) for size, each in check(config).items()} == {
        4: (2, 1),
        6: (1, 3),
        8: (2, 2),
    }, "stages are planned anew, shares of rows are not"
    assert world_sizes(config)[7] == 6
    config.parallel.tp, config.cluster.min_workers, config.cluster.max_workers = 4, 8, 24
    with pytest.raises(
        ConfigError, match=r"max_workers=24 .* parallel\.pp=2 x parallel\.cp=2 x parallel\.tp=4 workers"
    ):
        check(config)


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("parallel.cpu_offload", "parallel.cpu_offload=false"),
        ("parallel.separate_reduce", "parallel.separate_reduce=false"),
    ],
)
def test_what_a_pipeline_does_not_go_with_yet_is_refused(key: str, instead: str) -> None:
    config = PretrainConfig()
    config.parallel.pp, config.cluster.min_workers, config.cluster.max_workers = 2, 2, 8
    group, name = key.split(".")
    setattr(getattr(config, group), name, True)
    with pytest.raises(ConfigError, match=f"parallel.pp=2 does not go with {key}=true yet; set {instead}"):
        check(config)


def test_checkpoints_come_by_steps_by_time_or_automatically_but_not_never() -> None:
    config = PretrainConfig()
    config.checkpoint.every_steps = None
    with pytest.raises(ConfigError, match=r"every_steps=null.*set one of them, as checkpoint\.automatic=true"):
        check(config)
    config.checkpoint.every_minutes = 30
    check(config)
    config.checkpoint.every_minutes, config.checkpoint.automatic = None, True
    check(config)


@pytest.mark.parametrize(("key", "value"), [("every_minutes", 30), ("automatic", True)])
def test_checkpoints_by_time_need_snapshots(key: str, value: object) -> None:
    config = PretrainConfig()
    config.snapshot.every_steps = 0
    check(config)
    setattr(config.checkpoint, key, value)
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}={str(value).lower()} .*set snapshot\.every_steps=auto"):
        check(config)


def test_the_configuration_survives_yaml_and_back() -> None:
    from omegaconf import OmegaConf

    from regrow.config.plain import to_yaml

    assert OmegaConf.to_container(OmegaConf.create(to_yaml(PretrainConfig()))) == to_dict(PretrainConfig())


@pytest.mark.parametrize("content", [b"run: [", b"run: \xff"])
def test_a_damaged_configuration_of_a_run_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.yaml is damaged: "):
        load_run_config(tmp_path)


def test_where_groups_cannot_change_in_place_the_rest_is_checked_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.__version__", "2.61.0")
    monkeypatch.chdir(tmp_path)  # the checkout may have a run of this name
    sizes = ["cluster.max_workers=9", "cluster.min_workers=4", "optim.num_slices=8", "optim.global_batch_seqs=8"]
    config, _ = settled(pretrain_config(["+cluster=h200x8", *sizes]))
    check(config)
    with pytest.raises(BatchError, match="0 slices to 1 of 9 ranks"):
        driver.pretrain(config)
