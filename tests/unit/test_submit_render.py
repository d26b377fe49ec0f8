"""Rendered manifests: golden, clean by every rule, and the same run as jobs.pretrain's.

After a change that is meant: GOLDEN=write .venv/bin/python -m pytest tests/unit/test_submit_render.py
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import hydra
import pytest
import yaml
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from regrow.config.check import topologies
from regrow.config.schema import Network, PretrainConfig, SubmitConfig, SubmitJobConfig
from regrow.config.store import pretrain_config, to_dataclass, to_dict
from regrow.control.membership import ENDS_WITH_JOB
from regrow.drill.processes import wait_until_gone
from regrow.errors import ConfigError
from regrow.forecast.memory import plan_snapshot_memory
from regrow.forecast.settle import settled
from regrow.model.size import state_bytes
from regrow.submit.check import broken_rules
from regrow.submit.pods import drain_command, grace_s, longest_restart_s, sizes, submitter_pod
from regrow.submit.render import MAX_NAME, entrypoint, job_name, render, to_yaml
from regrow.submit.submit import pretrain_arguments, submit
from support.crd import NEEDS_CRD, rayjob_schema
from support.submission import CODE, compose, rendered

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "submit"
CLUSTERS = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("h*.yaml"))
VARIANTS = {
    "h100x64-eks_p5-kueue": [
        "+cluster=h100x64",
        "+site=eks_p5",
        "submit.queue=kueue",
        "submit.queue_name=h100",
        "run.name=Llama_8B",
        "run.storage_path=s3://llama/runs",
        "+data.corpora.web=s3://llama/web",
        "submit.env_secret=storage",
        "submit.priority_class=research",
    ],
    "h100x64-infiniband-volcano": [
        "+cluster=h100x64",
        "+site=infiniband",
        "submit.queue=volcano",
        "submit.queue_name=h100",
        "submit.priority_class=research",
        "submit.redis_address=redis://redis.regrow.svc:6379",
        "submit.redis_secret=redis/password",
        "submit.auth_secret=ray-token",
        "submit.volume_claim=runs",
        "run.storage_path=/mnt/runs",
        "submit.image_pull_secret=registry",
        "submit.deadline_s=1209600",
        "cluster.spare_workers=8",
        "+submit.env.HF_HOME=/mnt/runs/hf",
        "submit.tolerations=[{key: spot, operator: Equal, value: 'yes', effect: NoSchedule}]",
    ],
    "cpu": ["run.name=on-cpus", "cluster.max_workers=4", "submit.workers_per_node=2"],
}
CASES = {name: [f"+cluster={name}"] for name in CLUSTERS} | VARIANTS
IDS = list(CASES)
OWN_CORPUS = ("+data.corpora.web=/not-on-this-machine/web",)  # which is not looked for on the network


def test_the_large_clusters_are_among_the_cases() -> None:
    assert {"h100x64", "h100x512", "h100x2048", "h100x16384", "h100x98304", "h200x8"} <= set(CASES)


@pytest.mark.parametrize("case", IDS)
def test_rendering_equals_the_golden_file(case: str) -> None:
    _, manifests = rendered(CASES[case])
    # every new setting changes the hash of all configs: its own test is below
    text = re.sub(r"(config-sha256: )'?[0-9a-f]{64}'?", r"\1(of the config)", to_yaml(manifests))
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("case", IDS)
def test_no_rule_is_broken_by_what_is_shipped(case: str) -> None:
    config, (*_, manifest) = rendered(CASES[case])
    assert broken_rules(config, CODE, shlex.split(manifest["spec"]["entrypoint"])) == []


@NEEDS_CRD
@pytest.mark.parametrize("case", IDS)
def test_a_rendered_job_passes_kuberays_schema_without_unknown_fields(case: str) -> None:
    found = Draft202012Validator(rayjob_schema()).iter_errors(rendered(CASES[case])[1][-1])
    assert [f"{error.json_path}: {error.message}" for error in found] == []


@pytest.mark.parametrize("case", IDS)
def test_the_yaml_stream_reads_back_as_the_manifests(case: str) -> None:
    manifests = rendered(CASES[case])[1]
    assert list(yaml.safe_load_all(to_yaml(manifests))) == manifests


@pytest.mark.parametrize("case", IDS)
def test_the_entrypoint_is_the_same_run_on_the_cluster_that_it_runs_in(case: str) -> None:
    config, (*_, manifest) = rendered(CASES[case])
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "jobs.pretrain"]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        there = to_dataclass(hydra.compose("pretrain", words[3:]))
    here = {group: value for group, value in to_dict(config).items() if group != "submit"}
    here["cluster"] |= {"address": "auto", "local_nodes": 0}
    assert to_dict(there) == here


def test_what_a_site_sets_of_the_run_reaches_the_job(tmp_path: Path) -> None:
    given = ["+cluster=h100x64", "+site=infiniband", "submit.queue=none", "run.name=a"]
    config = compose(given)
    config.run.storage_path = "s3://bucket/a folder/it's"  # as a site's file may
    words = pretrain_arguments(config, given)
    assert words[:3] == ["+cluster=h100x64", "run.name=a", "cluster.address=auto"]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        there = to_dataclass(hydra.compose("pretrain", words))
    assert there.run.storage_path == config.run.storage_path


@pytest.mark.parametrize(
    "argument",
    [
        "run.storage_path=/shared/${oc.env:TEAM}/runs",
        "++run.name=x-${oc.env:TEAM}",
        r"run.name=x-$\{oc.env\:TEAM\}",
        r"run={storage_path:/shared/$\{oc.env\:TEAM\}}",
    ],
)
@pytest.mark.parametrize("backend", ["kuberay", "ray"])
def test_a_run_folder_that_the_jobs_environment_would_fill_in_is_refused(
    backend: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM", "s3cr3t")
    given = ["+cluster=h100x64", *OWN_CORPUS, argument, f"submit.backend={backend}"]
    with pytest.raises(ConfigError, match=r"^\S+ has \$\{\.\.\.\}, .*; write what is meant$") as caught:
        submit(compose(given), given)
    assert str(caught.value).startswith(argument)
    assert "s3cr3t" not in str(caught.value)


def test_other_settings_may_be_for_the_jobs_environment_to_fill_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR", "/mnt/mirror")
    given = ["+cluster=h100x64", "data.source=${oc.env:MIRROR}/corpus"]
    assert pretrain_arguments(compose(given), given) == [*given, "cluster.address=auto"]


def test_the_model_and_the_corpus_that_a_site_chooses_reach_the_job(tmp_path: Path) -> None:
    """A model's rope_scaling is no setting that could be given by itself where the model of before has none."""
    defaults = "defaults: [override /model: 1b, override /data: python_docs]"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.yaml").write_text(f"# @package _global_\n{defaults}\nrun: {{seed: 5}}\n")
    command = [sys.executable, "-m", "jobs.submit", f"--config-dir={tmp_path}", "+site=mine", "data.seq_len=256"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *_, job = yaml.safe_load_all(done.stdout)
    words = shlex.split(job["spec"]["entrypoint"])[3:]
    assert words == ["model=1b", "data.seq_len=256", "cluster.address=auto", "run.seed=5"]
    there = pretrain_config(words)
    assert (there.model.name, there.run.seed) == ("1b", 5)
    assert there.model.rope_scaling is not None


def test_a_run_that_no_arguments_give_is_refused_in_one_line() -> None:
    config = compose(["+data.corpora.web=/mnt/web"])
    config.data.corpora = {}  # as a file of another group may
    with pytest.raises(ConfigError, match=r"no arguments of jobs\.pretrain give data\.corpora=\{\} ") as refused:
        pretrain_arguments(config, ["+data.corpora.web=/mnt/web"])
    assert "\n" not in str(refused.value)
    config = compose(["model=1b"])
    config.model.rope_scaling = None
    assert pretrain_arguments(config, ["model=1b"])[-1] == "model.rope_scaling=null"


def test_a_job_is_checked_as_it_will_settle_what_is_left_open(capfd: pytest.CaptureFixture[str]) -> None:
    """The fewest stages of a pipeline, above all: with them, a size may have no group."""
    given = ["+cluster=h100x64", "model=70b", "parallel.tp=8", "parallel.pp=4", "cluster.min_workers=8"]
    with pytest.raises(ConfigError) as of_job:
        settled(pretrain_config(given))
    with pytest.raises(ConfigError) as of_submit:
        submit(compose(given), given)
    assert str(of_submit.value) == str(of_job.value)

    given = ["+cluster=h100x64", "model=70b", "parallel.tp=8", "parallel.pp=4", "cluster.min_workers=32", *OWN_CORPUS]
    assert submit(compose(given), given) == 0
    *_, job = yaml.safe_load_all(capfd.readouterr().out)
    assert shlex.split(job["spec"]["entrypoint"])[3:] == [*given, "cluster.address=auto"], "it settles the same"


@pytest.mark.parametrize("address", ["cluster.address=ray://elsewhere:10001", "cluster.local_nodes=3", "+cluster=cpu3"])
def test_a_job_joins_its_own_cluster_whatever_the_submitter_would_have_used(address: str) -> None:
    config = compose([address])
    words = pretrain_arguments(config, [address])
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        there = to_dataclass(hydra.compose("pretrain", words))
    assert (there.cluster.address, there.cluster.local_nodes) == ("auto", 0)


HOSTILE = [
    "run.storage_path='s3://a b/$HOME/`id`'",
    'data.mixture=[{from_tokens: 0, weights: {web: 9, "it\'s": 1}}]',
    "+data.corpora.web=a;rm -rf *",
    "train.steps=1\n2",
    "model.name={a,b}",
    "data.source=\\\\$x\"'",
    "data.tokenizer=",
]


def test_the_entrypoint_survives_kubernetes_and_the_jobs_shell() -> None:
    """Kubernetes replaces in a container's command; the job runs it in a shell; another's submitter, in two."""
    show = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))"]
    line = entrypoint([*HOSTILE, "model.name=$(HOME)$$"])
    (container,) = submitter_pod(SubmitConfig(), "image", {}, line, {"run": "$(HOME)"})["spec"]["containers"]
    *_, metadata, given = [each.replace("$$", "$") for each in container["command"]]
    assert "$(" not in "".join(container["command"]).replace("$$", "")
    assert (json.loads(metadata), given) == ({"run": "$(HOME)"}, line)
    for shell in ("sh", "bash"):
        job = f"{shlex.join(show)} {given}"
        words = subprocess.run([shell, "-c", job], capture_output=True, text=True, check=True).stdout
        assert words.strip() == ascii(["python", "-m", "jobs.pretrain", *HOSTILE, "model.name=$(HOME)$$"])


@hypothesis_given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True))
def test_every_run_name_gives_a_name_that_kubernetes_takes(name: str) -> None:
    config = SubmitJobConfig()
    config.run.name = name
    found = job_name(config)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found), found
    assert len(found) <= MAX_NAME


def test_two_runs_never_share_a_job() -> None:
    names = ["llama-8b", "Llama-8b", "llama_8b", "llama.8b", "llama-8b-", "8b", "run-8b", "x" * 47, "x" * 48, "x" * 63]
    found = []
    for name in names:
        config = SubmitJobConfig()
        config.run.name = name
        found.append(job_name(config))
    assert found[0] == "llama-8b"
    assert len(set(found)) == len(names)


@pytest.mark.parametrize("case", IDS)
def test_shared_memory_holds_what_every_world_size_asks_for(case: str) -> None:
    """The same arithmetic that a worker does before it takes snapshots, at each size that the cluster allows."""
    config, (*_, manifest) = rendered(CASES[case])
    group = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == "shm"]
    room = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
    room -= int(group["rayStartParams"]["object-store-memory"])
    per_node = sizes(config, config.submit).workers
    world_sizes = topologies(config)
    of_ranks = {each: -(-state_bytes(config.model) // each) for each in world_sizes}
    for world_size in world_sizes:
        need = plan_snapshot_memory(
            world_size,
            of_ranks,
            slots=config.snapshot.slots,
            ranks_on_node=min(per_node, world_size),
            ranks_copied=min(per_node, world_size) if ceil(world_size / per_node) > 1 else 0,
        )
        assert need.total <= room, world_size
    (memory,) = {
        str(group["template"]["spec"]["containers"][0]["resources"][k]["memory"]) for k in ("requests", "limits")
    }
    assert int(memory.removesuffix("Gi")) * 2**30 > room


def test_state_bytes_are_those_of_a_real_optimizer() -> None:
    import torch

    from regrow.model.llama import Llama

    config = PretrainConfig().model
    with torch.device("meta"):
        parameters = list(Llama(config).parameters())
    assert state_bytes(config) == sum(3 * parameter.numel() * parameter.element_size() for parameter in parameters)


def test_without_snapshots_shared_memory_is_rays_alone() -> None:
    config = compose(["+cluster=h100x64", "snapshot.every_steps=0"])
    assert sizes(config, config.submit).snapshot_bytes == 0


def test_nodes_are_counted_from_workers_and_spare_ones() -> None:
    config = compose(["+cluster=h100x64", "cluster.spare_workers=3", "cluster.min_workers=33"])
    size = sizes(config, config.submit)
    assert (size.least_nodes, size.most_nodes, size.gpus) == (5, 9, 8)


def test_a_job_starts_on_the_fewest_nodes_and_grows_or_asks_for_all_at_once() -> None:
    *_, growing = rendered(["+cluster=h100x64"])[1]
    *_, fixed = rendered(["+cluster=h100x64", "submit.autoscale=false"])[1]
    counts = []
    for manifest in (growing, fixed):
        cluster = manifest["spec"]["rayClusterSpec"]
        group = cluster["workerGroupSpecs"][0]
        counts.append(
            (cluster["enableInTreeAutoscaling"], group["replicas"], group["minReplicas"], group["maxReplicas"])
        )
    assert counts == [(True, 4, 4, 8), (False, 8, 4, 8)]


def test_kueue_admits_a_fixed_size_unless_its_elastic_jobs_are_on() -> None:
    arguments = ["+cluster=h100x64", "submit.queue=kueue", "submit.queue_name=q"]
    *_, fixed = rendered(arguments)[1]
    *_, elastic = rendered([*arguments, "submit.kueue_elastic=true"])[1]
    key = "kueue.x-k8s.io/elastic-job"
    assert fixed["spec"]["suspend"] is elastic["spec"]["suspend"] is True
    assert not fixed["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]
    assert key not in fixed["metadata"]["annotations"]
    assert elastic["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]
    assert elastic["metadata"]["annotations"][key] == "true"


def test_the_drain_ends_inside_the_grace_period_and_idle_nodes_outlive_a_restart() -> None:
    config, (*_, manifest) = rendered(["+cluster=h100x64", "submit.drain_s=90", "train.collective_timeout_s=1800"])
    cluster = manifest["spec"]["rayClusterSpec"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "--deadline-remaining-seconds 90" in command[2]
    assert pod["terminationGracePeriodSeconds"] == grace_s(config.submit) > 90 + 10
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] > longest_restart_s(config) > 1800


def test_the_drain_command_drains_and_waits_for_the_raylet_or_the_deadline(tmp_path: Path) -> None:
    """The real shell line, with stand-ins for Ray's command and for a raylet that ends after a while."""
    agent = "--dashboard_agent_command=/usr/bin/python agent.py --node-id=00ff"
    raylet = f"17 /ray/raylet --raylet_socket_name=/tmp/ray/s --node_id=80d4d5 {agent}"
    _, (*_, manifest) = rendered(["+cluster=h100x64"])
    pod = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    for name, body in {
        "timeout": 'echo $1 > allowed; shift; "$@"',
        "ray": 'printf "%s\\n" "$@" > drained',
        "pgrep": f"if [ $1 = -ax ]; then echo {raylet}; exit; fi; echo x >> looks; [ $(wc -l < looks) -lt 3 ]",
        "sleep": "echo $1 >> slept",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_ADDRESS": "head:6379"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=30)
    assert (tmp_path / "drained").read_text().splitlines() == [
        *("drain-node", "--address", "head:6379", "--node-id", "80d4d5", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "the pod is being deleted", "--deadline-remaining-seconds", "60"),
    ]
    assert (tmp_path / "allowed").read_text().split() == ["60"]
    assert (tmp_path / "slept").read_text().splitlines() == ["1", "1"]


def test_a_drain_that_hangs_and_a_raylet_that_stays_end_with_the_time_for_them(tmp_path: Path) -> None:
    for name, body in {"ray": "exec sleep 600", "pgrep": "echo 17 raylet --node_id=80d4d5"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_ADDRESS": "head:6379"}
    subprocess.run(["bash", "-c", drain_command(2)], env=env, check=True, timeout=60)


def test_ray_has_the_drain_command_and_takes_these_options() -> None:
    from ray.scripts.scripts import drain_node

    options = {option for parameter in drain_node.params for option in parameter.opts}
    assert {"--address", "--node-id", "--reason", "--reason-message", "--deadline-remaining-seconds"} <= options
    (reason,) = [each for each in drain_node.params if each.name == "reason"]
    assert "DRAIN_NODE_REASON_PREEMPTION" in reason.type.choices


def test_networks_ask_for_their_devices_and_the_users_environment_wins() -> None:
    found = {}
    for network in Network:
        config = compose(["+cluster=h100x64", f"submit.network={network.value}", "+submit.env.NCCL_DEBUG=INFO"])
        *_, manifest = render(config, CODE, [])
        container = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env["NCCL_DEBUG"] == "INFO"
        found[network] = {key: value for key, value in limits.items() if key not in ("cpu", "memory", "nvidia.com/gpu")}
    assert found == {
        Network.plain: {},
        Network.efa: {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5Gi"},
        Network.infiniband: {"rdma/hca_shared_devices_a": "1"},
    }


def test_an_autoscaler_that_ends_is_started_again_and_ends_with_its_pod(tmp_path: Path) -> None:
    """The real shell line behind KubeRay's command of the container, and a stand-in that fails twice and then stays."""
    (line,) = rendered(["+cluster=h100x64"])[1][-1]["spec"]["rayClusterSpec"]["autoscalerOptions"]["args"]
    assert "$(" not in line  # which Kubernetes would expand
    for name, body in {
        "ray": "echo $$ $@ >> starts; [ $(wc -l < starts) -gt 2 ] || exit 1; touch stays; exec sleep 600",
        "sleep": f"[ $1 = 5 ] || exec {shutil.which('sleep')} $1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["KUBERAY_GEN_AUTOSCALER_START_CMD"] = "ray kuberay-autoscaler --cluster-name c1 --cluster-namespace pretrain"
    with subprocess.Popen(["/bin/bash", "-c", "--", line], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as process:
        while not (tmp_path / "stays").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    starts = [each.split(maxsplit=1) for each in (tmp_path / "starts").read_text().splitlines()]
    assert [words for _, words in starts] == [env["KUBERAY_GEN_AUTOSCALER_START_CMD"].removeprefix("ray ")] * 3
    assert said.decode().splitlines() == ["the autoscaler has ended (1) and is started again"] * 2
    assert wait_until_gone([int(starts[-1][0])], 60.0) == []


@pytest.mark.parametrize("network", [Network.efa, Network.infiniband])
@pytest.mark.parametrize("refused", [False, True])
def test_a_worker_on_a_fast_network_locks_all_the_memory_its_host_allows_or_says_what_the_host_lacks(
    network: Network, refused: bool
) -> None:
    """The real shell line, in front of `ray start` as KubeRay puts it there."""
    *_, manifest = rendered(["+cluster=h100x64", f"submit.network={network.value}"])[1]
    container = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    pasted = "".join(f" {word} " for word in container["command"])
    generous = "ulimit() { echo asked for: $*; }"
    limited = 'ulimit() { case "$*" in "-l unlimited") return 1;; -l) echo 8192;; esac; }'
    line = f"{limited if refused else generous}; {pasted} && ulimit -n 65536; echo ray starts"
    done = subprocess.run(["/bin/bash", "-c", "--", line], capture_output=True, text=True, check=True, timeout=30)
    said = done.stdout.splitlines()
    assert done.stderr == ""
    assert said[-1] == "ray starts"
    if not refused:
        assert said[:-1] == ["asked for: -l unlimited", "asked for: -n 65536"]
        return
    (warning,) = said[:-1]
    assert warning.startswith("warning: 8192 KiB of memory may be locked here")
    assert "LimitMEMLOCK=infinity" in warning
    assert "LimitMEMLOCK=infinity" in (ROOT / "k8s" / "README.md").read_text()


def test_a_worker_on_a_plain_network_locks_no_memory_and_has_no_command_of_ours() -> None:
    *_, manifest = rendered(["+cluster=h100x64"])[1]
    (container,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert "command" not in container


@pytest.mark.parametrize("case", IDS)
def test_a_worker_may_be_evicted_before_its_node_ends_and_the_head_may_not(case: str) -> None:
    """Karpenter drains a node that is to be interrupted, and evicts no pod that is not to be disrupted."""
    cluster = rendered(CASES[case])[1][-1]["spec"]["rayClusterSpec"]
    head, worker = (
        each["template"]["metadata"].get("annotations", {})
        for each in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])
    )
    assert worker == {}
    assert head["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize("case", IDS)
def test_a_head_leaves_a_dead_host_well_before_kuberay_gives_its_job_up(case: str) -> None:
    """Kubernetes' own tolerations of 300 s, after 40 to find the host dead, are as long as KubeRay's patience."""
    cluster = rendered(CASES[case])[1][-1]["spec"]["rayClusterSpec"]
    tolerations = cluster["headGroupSpec"]["template"]["spec"]["tolerations"]
    for taint in ("not-ready", "unreachable"):
        (found,) = [each for each in tolerations if each["key"] == f"node.kubernetes.io/{taint}"]
        assert (found["operator"], found["effect"]) == ("Exists", "NoExecute")
        assert 0 < found["tolerationSeconds"] <= 60


@pytest.mark.parametrize("given", [[], ["+submit.head_node_selector.pool=steady"]])
def test_the_submitter_is_where_the_head_is_and_moved_no_more_than_it_and_may_end_daily_for_a_year(
    given: list[str],
) -> None:
    """KubeRay deletes a cluster that trains once its submitter's pod has ended so often, be it by evictions."""
    spec = rendered(["+cluster=h100x64", *given])[1][-1]["spec"]
    head, submitter = spec["rayClusterSpec"]["headGroupSpec"]["template"], spec["submitterPodTemplate"]
    assert submitter["metadata"]["annotations"] == head["metadata"]["annotations"] != {}
    for field in ("nodeSelector", "tolerations"):
        assert submitter["spec"].get(field) == head["spec"].get(field)
    assert submitter["spec"].get("nodeSelector") == ({"pool": "steady"} if given else None)
    assert spec["submitterConfig"]["backoffLimit"] >= 366


@pytest.mark.parametrize("given", [[], ["+submit.env.RAY_START_ULIMIT_OPEN_FILES='131072'"]])
def test_ray_starts_with_all_open_files_that_the_host_allows_or_with_what_the_user_says(given: list[str]) -> None:
    """KubeRay's line in front of `ray start`, in the environment of the pods."""
    cluster = rendered(["+cluster=h100x64", *given])[1][-1]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        (container,) = group["template"]["spec"]["containers"]
        env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        line = "ulimit() { printf '%s ' $@; }; ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
        done = subprocess.run(["/bin/bash", "-c", "--", line], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["-n", "131072" if given else "hard"]


def test_the_driver_is_told_that_its_cluster_ends_with_it() -> None:
    _, (*_, manifest) = rendered(["+cluster=h100x64"])
    assert manifest["spec"]["shutdownAfterJobFinishes"] is True
    pod = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": ENDS_WITH_JOB, "value": "1"} in pod["containers"][0]["env"]


def test_the_config_hash_is_the_runs_and_not_the_sites() -> None:
    def digest(arguments: list[str]) -> str:
        return cast(str, rendered(arguments)[1][-1]["metadata"]["annotations"]["regrow/config-sha256"])

    base = digest(["+cluster=h100x64"])
    assert digest(["+cluster=h100x64", "submit.namespace=other", "submit.retries=0"]) == base
    assert digest(["+cluster=h100x64", "optim.lr=1e-4"]) != base


def test_the_image_names_commit_and_ray_unless_it_has_a_tag() -> None:
    def image(name: str) -> str:
        *_, manifest = render(compose([f"submit.image='{name}'"]), CODE, [])
        return cast(str, manifest["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["image"])

    assert image("host:5000/team/regrow") == f"host:5000/team/regrow:{CODE.git_sha}-ray{CODE.ray_version}"
    assert image("host:5000/team/regrow:v1") == "host:5000/team/regrow:v1"
    assert image("regrow@sha256:00") == "regrow@sha256:00"


def test_a_commit_that_looks_like_a_number_stays_a_string() -> None:
    for sha in ("12e456789012", "123456789012", "0x1234567890"):
        *_, manifest = render(compose([]), replace(CODE, git_sha=sha), [])
        (line,) = [line for line in to_yaml([manifest]).splitlines() if "regrow/git-sha" in line]
        assert line.strip() == f"regrow/git-sha: '{sha}'"


@pytest.mark.parametrize("silence_s", [5.0, 10.0, 30.0, 60.0])
def test_ray_takes_a_silent_node_for_dead_after_about_as_long_as_is_asked_for(silence_s: float) -> None:
    """A check that fails takes its timeout, the next one comes a period later."""
    *_, manifest = render(compose([*CASES["h100x64"], f"submit.host_silence_s={silence_s}"]), CODE, [])
    pod = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert _dead_after_s(env) == pytest.approx(silence_s, rel=0.3)


def test_the_page_for_bare_ray_has_such_settings_too() -> None:
    text = (ROOT / "docs/bare-ray.md").read_text()
    assert _dead_after_s(dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", text))) == pytest.approx(10.0, rel=0.3)


def _dead_after_s(env: Mapping[str, Any]) -> float:
    period, timeout, threshold = (
        int(env[f"RAY_health_check_{name}"]) for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    return (threshold * timeout + (threshold - 1) * period) / 1000
