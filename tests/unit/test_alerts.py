"""The alert rules, the dashboard and the scrape configuration in k8s/monitoring: what they ask for exists, and each
alert fires when it should and not before, by Prometheus' own tool on series that tell a story.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from regrow.config.schema import PretrainConfig
from regrow.control.cadence import Cadence
from regrow.record.events import from_row
from regrow.record.ledger import STATES
from regrow.record.log import METRIC_KEYS
from regrow.show.prometheus import FAMILIES, Figures
from support.prometheus import MONITORING, dashboard_expressions, hurried, missing, rules
from support.submission import rendered

ROOT = Path(__file__).parents[2]
RULES = [rule for group in rules()["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in RULES]
RAYS_OWN = {  # that the dashboard shows beside ours
    "ray_node_cpu_utilization",
    "ray_node_mem_used",
    "ray_node_mem_total",
    "ray_node_mem_shared_bytes",
    "ray_node_gpus_utilization",
}
NOT_SHOWN = {  # by the dashboard: others say the same, or alerts alone ask for it
    "ray_regrow_submitted_timestamp_seconds",
    "ray_regrow_trained_tokens",
    "ray_regrow_snapshots_total",
    "ray_regrow_last_snapshot_timestamp_seconds",
    "ray_regrow_snapshot_interval_seconds",
    "ray_regrow_checkpoint_step",
    "ray_regrow_stops_total",
    "ray_regrow_own_ray",
}
WORKER = 'run="a", WorkerId="w1"'
needs_promtool = pytest.mark.skipif(bool(missing("promtool")), reason=missing("promtool"))


@dataclass(frozen=True)
class Story:
    """Series with a value every minute, in promtool's notation, and which alerts are to fire at which minutes.

    `1x5` is six values of 1; `0+60x5` counts up by 60; `_` is no value.
    """

    series: dict[str, str]
    firing: dict[int, set[str]]


def sound(minutes: int = 180, **changed: str) -> dict[str, str]:
    """A run in which all is well; `changed` has the series that are not."""
    told = {
        "last_step_timestamp_seconds": f"0+60x{minutes}",
        "last_checkpoint_timestamp_seconds": " ".join(str(60 * (at // 10 * 10)) for at in range(minutes + 1)),
        "last_snapshot_timestamp_seconds": f"0+60x{minutes}",
        "checkpoint_interval_seconds": f"600x{minutes}",
        "running": f"1x{minutes}",
        "submitted_timestamp_seconds": f"1000x{minutes}",
        "world_size": f"64x{minutes}",
        "target_world_size": f"64x{minutes}",
        "nonfinite_steps_total": f"0x{minutes}",
        "productive": f"0+58x{minutes}",
        "down": f"0+2x{minutes}",
        "stops_total": f"0x{minutes}",
    } | changed
    return {name_of(name): values for name, values in told.items()}


def name_of(name: str, worker: str = WORKER) -> str:
    label = ""
    if name in STATES:
        name, label = "state_seconds_total", f', state="{name}"'
    elif name == "stops_total":
        label = ', reason="finished"'
    return f"ray_regrow_{name}{{{worker}{label}}}"


def of_another_process(**told: str) -> dict[str, str]:
    return {name_of(name, 'run="a", WorkerId="w2"'): values for name, values in told.items()}


def of_a_restarted_coordinator(*, stepped_at: float, trains: bool = True) -> dict[str, str]:
    """What a process tells from minute 61 on that takes the place of another one, by its own figures: of a step a
    minute, where the group trains, and a snapshot every eight minutes."""
    lines = {"submitted": {}, "generation": {"generation": 1, "start_step": 0, "cause": "start", "world_size": 64}}
    events = [from_row({"event": name, "time": 0.0, **fields}) for name, fields in lines.items()]
    cadence = Cadence(every_steps=100, every_minutes=None, automatic=False, mtbf_hours=24.0, now=3660.0)
    figures, names = Figures(PretrainConfig(), cadence, events, 3660.0, stepped_at=stepped_at), ("step", "snapshot")
    told: dict[str, list[str]] = {f"last_{name}_timestamp_seconds": [] for name in names}
    for minute in range(61, 101):
        if trains and minute > 61:
            figures.row(dict.fromkeys(METRIC_KEYS, 1.0), 60.0 * minute)
        if trains and minute % 8 == 5 and minute > 61:
            figures.snapshot(minute, 60.0 * minute)
        for name, values in told.items():
            values.append(f"{figures.values[f'regrow_{name}', '']:.0f}")
    constant = {"running": 1, "submitted_timestamp_seconds": 1000, "world_size": 64, "target_world_size": 64}
    return of_another_process(
        **{name: f"_x61 {' '.join(values)}" for name, values in told.items()},
        **{name: f"_x61 {value}x39" for name, value in {**constant, "stops_total": 0}.items()},
    )


FAILED = f'ray_regrow_stops_total{{{WORKER}, reason="failed"}}'
FLAT_AFTER_60 = {"productive": "0+58x60 3480x120", "down": "0+2x60 120x120"}


def until_60() -> dict[str, str]:
    """All is well for an hour, and then nothing comes any more."""
    told = sound(last_checkpoint_timestamp_seconds="0+60x60")
    return {name: values.replace("x180", "x60") for name, values in told.items()}


STORIES = {
    "all is well": Story(sound(), {at: set() for at in (0, 1, 5, 31, 61, 120, 180)}),
    "no step comes": Story(
        sound(
            last_step_timestamp_seconds="0+60x60 3600x120",
            last_checkpoint_timestamp_seconds="0+60x60 3600x120",
            last_snapshot_timestamp_seconds="0+60x60 3600x120",
        ),
        {60: set(), 75: set(), 78: {"RegrowNoProgress"}, 150: {"RegrowNoProgress"}},
    ),
    "the start takes long": Story(
        sound(last_step_timestamp_seconds="0x12 780+60x100", running="1x112"), {12: set(), 14: set(), 60: set()}
    ),
    "the run is gone": Story(
        until_60(), {60: set(), 64: set(), 67: {"RegrowRunLost"}, 100: {"RegrowRunLost"}, 130: set()}
    ),
    "the run is gone, and its node goes on telling what was counted": Story(
        {name: values if "_total" in name else until_60()[name] for name, values in sound(**FLAT_AFTER_60).items()},
        {60: set(), 67: {"RegrowRunLost"}, 150: set()},
    ),
    "the run has finished": Story(
        until_60() | {name_of("stops_total"): "0x59 1x120"},
        {at: set() for at in (60, 63, 67, 80, 119, 121, 125)},
    ),
    **{
        f"it is gone, and so is the Ray {whose}, before its stop was scraped": Story(
            until_60() | {name_of("own_ray"): f"{own_ray}x60"},
            {at: set() for at in (60, 64)} | dict.fromkeys((67, 100), firing) | {130: set()},
        )
        for whose, own_ray, firing in (("that it started", 1, set[str]()), ("that it joined", 0, {"RegrowRunLost"}))
    },
    "it was lost, and has finished on a Ray of its own": Story(
        until_60()
        | {name_of("own_ray"): "0x60"}
        | of_another_process(
            running="_x61 1x18",
            submitted_timestamp_seconds="_x61 4660x18",
            stops_total="_x61 0x18",
            own_ray="_x61 1x18",
        ),
        {at: set() for at in (62, 80, 84, 86, 100, 121, 130)},
    ),
    "it finished on a Ray of its own, was resumed on another one, and is gone": Story(
        until_60()
        | {name_of("own_ray"): "1x60"}
        | of_another_process(
            running="_x70 1x10",
            submitted_timestamp_seconds="_x70 5200x10",
            stops_total="_x70 0x100",
            own_ray="_x70 0x10",
        ),
        {70: set(), 81: set(), 90: {"RegrowRunLost"}},
    ),
    "the run has failed": Story(
        until_60() | {name_of("running"): "1x59 0", FAILED: "0x59 1x120"},
        {60: set(), 64: set(), 67: {"RegrowRunFailed"}, 115: {"RegrowRunFailed"}, 125: set()},
    ),
    "it failed, was started again, and has finished": Story(
        until_60()
        | {name_of("running"): "1x59 0", FAILED: "0x59 1x120"}
        | of_another_process(
            running="_x63 1x17 0", submitted_timestamp_seconds="_x63 4700x18", stops_total="_x63 0x17 1x100"
        ),
        {at: set() for at in (62, 64, 67, 70, 79, 81, 83, 86, 90, 100, 119, 125)},
    ),
    "it failed, was started again, and fails again": Story(
        until_60()
        | {name_of("running"): "1x59 0", FAILED: "0x59 1x120"}
        | of_another_process(running="_x63 1x17 0", submitted_timestamp_seconds="_x63 4700x18")
        | {FAILED.replace("w1", "w2"): "_x63 0x17 1x100"},
        {70: set(), 83: set(), 88: {"RegrowRunFailed"}, 130: {"RegrowRunFailed"}, 145: set()},
    ),
    "it failed, and fails again at once": Story(
        until_60()
        | {name_of("running"): "1x59 0", FAILED: "0x59 1x120"}
        | of_another_process(running="_x63 0", submitted_timestamp_seconds="_x63 4700")
        | {FAILED.replace("w1", "w2"): "_x63 1x100"},
        {at: {"RegrowRunFailed"} for at in (67, 90, 115, 121)} | {130: set()},
    ),
    "it finished, was resumed, and is gone": Story(
        until_60()
        | {name_of("stops_total"): "0x59 1x120"}
        | of_another_process(running="_x70 1x10", submitted_timestamp_seconds="_x70 5200x10", stops_total="_x70 0x100"),
        {70: set(), 81: set(), 90: {"RegrowRunLost"}},
    ),
    "the coordinator is restarted": Story(
        until_60()
        | {name_of(name): values for name, values in FLAT_AFTER_60.items()}
        | of_another_process(
            running="_x61 1x118",
            submitted_timestamp_seconds="_x61 1000x118",
            last_step_timestamp_seconds="_x61 3720+60x118",
            last_checkpoint_timestamp_seconds="_x61 3600x4 3960+60x113",
            last_snapshot_timestamp_seconds="_x61 3720+60x118",
            checkpoint_interval_seconds="_x61 600x118",
            world_size="_x61 64x118",
            target_world_size="_x61 64x118",
            nonfinite_steps_total="_x61 0x118",
            productive="_x61 0+58x118",
            down="_x61 0+2x118",
            stops_total="_x61 0x118",
        ),
        {at: set() for at in (60, 61, 62, 63, 64, 66, 70, 100, 175)},
    ),
    "the coordinator is restarted, and its first snapshot takes minutes": Story(
        until_60() | of_a_restarted_coordinator(stepped_at=3590.0), {at: set() for at in range(60, 100)}
    ),
    **{
        f"its last checkpoint takes 25 minutes, {how}": Story(
            sound(
                last_step_timestamp_seconds="0+60x60 3600x120",
                last_checkpoint_timestamp_seconds="0+60x60 3600x120",
                last_snapshot_timestamp_seconds="0+60x60 3600x120",
                step="100+1x60 160x120",
                target_steps=f"{target} 160x120",
                running="1x85 0",
                stops_total="0x85 1x100",
            ),
            dict.fromkeys((78, 84), firing),
        )
        for how, target, firing in (
            ("all steps are trained", "160x60", set[str]()),
            ("it was asked to stop", "500x60", set[str]()),
            ("it has steps to go", "500x180", {"RegrowNoProgress"}),
        )
    },
    "the coordinator of a run that stands still is restarted": Story(
        until_60()
        | sound(60, last_step_timestamp_seconds="0+60x50 3000x9")
        | of_a_restarted_coordinator(stepped_at=3000.0, trains=False),
        {60: set(), 65: set(), 68: {"RegrowNoProgress"}, 95: {"RegrowNoProgress"}},
    ),
    **{
        f"{event}, then it finished": Story(
            until_60()
            | {name_of("stops_total"): "0x180"}
            | of_another_process(
                running="_x61 1x18 0",
                submitted_timestamp_seconds=f"_x61 {submitted}x19",
                last_step_timestamp_seconds="_x61 3720+60x18",
                last_checkpoint_timestamp_seconds="_x61 3720+60x18",
                last_snapshot_timestamp_seconds="_x61 3720+60x18",
                stops_total="_x61 0x17 1x100",
            ),
            {at: set() for at in (62, 65, 75, 80, 82, 84, 86, 90, 100, 115, 119, 122, 125, 130)},
        )
        for event, submitted in (("its coordinator was restarted", 1000), ("it was killed and resumed", 4660))
    },
    "it was killed, resumed, and is gone": Story(
        until_60()
        | of_another_process(running="_x61 1x18", submitted_timestamp_seconds="_x61 4660x18", stops_total="_x61 0x100"),
        {62: set(), 80: set(), 86: {"RegrowRunLost"}, 130: {"RegrowRunLost"}},
    ),
    "steps are not finite": Story(
        sound(nonfinite_steps_total="0x60 3x120"), {60: set(), 62: {"RegrowNotFinite"}, 75: set()}
    ),
    "checkpoints fail": Story(
        sound(last_checkpoint_timestamp_seconds="0+60x60 3600x120"),
        {80: set(), 89: set(), 92: {"RegrowCheckpointOld"}, 180: {"RegrowCheckpointOld"}},
    ),
    "checkpoints are wanted every hour, and fail": Story(
        sound(checkpoint_interval_seconds="3600x181", last_checkpoint_timestamp_seconds="0x181"),
        {100: set(), 180: set()},
    ),
    "no checkpoint is wanted": Story(
        {
            name: values
            for name, values in sound(last_checkpoint_timestamp_seconds="0x180").items()
            if name != name_of("checkpoint_interval_seconds")
        },
        {180: set()},
    ),
    "no snapshot commits": Story(
        sound(last_snapshot_timestamp_seconds="0+60x60 3600x120"), {69: set(), 72: {"RegrowSnapshotOld"}}
    ),
    "snapshots lie fourteen minutes apart": Story(
        sound(
            last_snapshot_timestamp_seconds=" ".join(str(60 * (at // 14 * 14)) for at in range(181)),
            snapshot_interval_seconds="840x180",
        ),
        {at: set() for at in range(181)},
    ),
    **{
        f"no snapshot commits, of which there is one every {interval_s} s": Story(
            sound(last_snapshot_timestamp_seconds="0+60x60 3600x120", snapshot_interval_seconds=f"{interval_s}x180"),
            {after - 1: set(), after + 2: {"RegrowSnapshotOld"}, 180: {"RegrowSnapshotOld"}},
        )
        for interval_s, after in ((60, 70), (840, 102))
    },
    "nodes are missing": Story(sound(world_size="64x60 56x120"), {61: set(), 90: set(), 92: {"RegrowBelowTargetSize"}}),
    "a node is missing for a while": Story(sound(world_size="64x60 56x20 64x100"), {at: set() for at in (70, 91, 120)}),
    "much is lost": Story(
        sound(productive="0+58x60 3480+20x120", down="0+2x60 120+40x120"),
        {70: set(), 85: set(), 130: {"RegrowGoodputLow"}},
    ),
    "the start takes eight minutes, and nothing is lost after it": Story(
        {
            name_of("init"): "0+60x8 480x200",
            name_of("productive"): "0x8 0+60x200",
            name_of("other"): "0x208",
        },
        {at: set() for at in (30, 33, 36, 40, 50, 70)},
    ),
    "a group is small for long": Story(
        sound(submitted_timestamp_seconds="0x180", goodput_ratio="0.98x180", effective_ratio="0.97x60 0.75x120"),
        {60: set(), 85: set(), 95: {"RegrowEffectiveLow"}},
    ),
    "all of its steps are slow, from the first one on": Story(
        sound(submitted_timestamp_seconds="0x180", goodput_ratio="0.98x180", effective_ratio="0.85x180"),
        {90: set(), 121: set(), 125: {"RegrowEffectiveLow"}, 180: {"RegrowEffectiveLow"}},
    ),
    "its start takes two minutes and its first step nearly seven, and nothing is lost after it": Story(
        sound(
            submitted_timestamp_seconds="0x180",
            goodput_ratio="_x9 " + " ".join(f"{1 - 120 / (60 * at):.6f}" for at in range(9, 181)),
            effective_ratio="_x9 " + " ".join(f"{1 - (120 + 394) / (60 * at):.6f}" for at in range(9, 181)),
        ),
        {at: set() for at in range(181)},
    ),
    **{
        f"{kind} is suspected": Story(
            sound() | {f'ray_regrow_suspects{{{WORKER}, kind="{kind}"}}': "0x60 1x30 0x90"},
            {60: set(), 64: set(), 68: {alert}, 85: {alert}, 100: set()},
        )
        for kind, alert in (
            ("slow_compute", "RegrowSlowCompute"),
            ("slow_data", "RegrowSlowData"),
            ("slow_copy", "RegrowSlowCopy"),
            ("slow_link", "RegrowSlowLink"),
        )
    },
    "a process hangs": Story(
        sound() | {f'ray_regrow_failures_total{{{WORKER}, cause="worker_hung"}}': "0x60 1x120"},
        {60: set(), 63: {"RegrowHung"}, 110: {"RegrowHung"}, 125: set()},
    ),
    "a unit computes wrong": Story(
        sound() | {f'ray_regrow_incidents_total{{{WORKER}, kind="corruption"}}': "0x60 1x120"},
        {60: set(), 63: {"RegrowCorruption"}, 110: {"RegrowCorruption"}, 125: set()},
    ),
    "two runs, one of which is in trouble": Story(
        sound()
        | {
            name.replace('run="a"', 'run="b"'): values
            for name, values in sound(last_snapshot_timestamp_seconds="0x180").items()
        },
        {5: set(), 20: {"RegrowSnapshotOld"}},
    ),
}


def promtool(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("pace", ["as they are", "hurried"])
def test_promtool_finds_the_rules_sound(tmp_path: Path, pace: str) -> None:
    content = rules() if pace == "as they are" else hurried(rules())
    (tmp_path / "rules.yml").write_text(yaml.dump(content))
    promtool(tmp_path, "check", "rules", "--lint=all", "--lint-fatal", "rules.yml")


@needs_promtool
@pytest.mark.parametrize("name", STORIES)
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path, name: str) -> None:
    story = STORIES[name]
    (tmp_path / "rules.yml").write_text(yaml.dump(rules()))
    expected = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)],
        }
        for minute, alerts in story.firing.items()
    ]
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in story.series.items()],
                "promql_expr_test": expected,
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.dump(test))
    promtool(tmp_path, "test", "rules", "test.yml")


def test_every_alert_has_a_story_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fired = set().union(*(alerts for story in STORIES.values() for alerts in story.firing.values()))
    assert fired == set(ALERTS)
    assert not set().union(*STORIES["all is well"].firing.values())


def test_hurried_rules_have_a_second_for_every_minute_and_ranges_of_at_least_ten() -> None:
    for rule, quick in zip(RULES, hurried(rules())["groups"][0]["rules"], strict=True):
        times, quick_times = (re.findall(r"\[(\d+[smh])\]", each["expr"]) for each in (rule, quick))
        assert [max(10, seconds(each) // 60) for each in times] == [seconds(each) for each in quick_times]
        assert seconds(rule.get("for", "0m")) == 60 * seconds(quick.get("for", "0s"))
        assert "* 60" not in quick["expr"]


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def figures_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_[a-z_]+", expression))


@pytest.mark.parametrize("rule", RULES, ids=ALERTS)
def test_alerts_ask_for_figures_that_exist_and_say_what_to_do(rule: dict[str, Any]) -> None:
    assert figures_in(rule["expr"]) <= {f"ray_{name}" for name in FAMILIES}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert "$labels.run" in rule["annotations"]["summary"]
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert anchor in [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("rule", RULES, ids=ALERTS)
def test_alerts_outlive_a_coordinator_that_is_restarted(rule: dict[str, Any]) -> None:
    """Gauges vanish with their process: each is looked for over a range. Counters begin anew: they are summed."""
    for name in figures_in(rule["expr"]):
        family = FAMILIES[name.removeprefix("ray_")]
        functions = ("rate", "increase", "max_over_time") if family.is_counter else ("last_over_time", "max_over_time")
        for asked in re.findall(rf"(\w+)\({name}(?:{{[^}}]*}})?\[\d+[mh]\]\)", rule["expr"]):
            assert asked in functions
        assert len(re.findall(rf"\w+\({name}(?:{{[^}}]*}})?\[", rule["expr"])) == rule["expr"].count(name)


def test_the_dashboard_asks_for_figures_that_exist_and_shows_them_all() -> None:
    shown = set().union(*map(figures_in, dashboard_expressions()))
    assert shown <= {f"ray_{name}" for name in FAMILIES} | RAYS_OWN
    assert {f"ray_{name}" for name in FAMILIES} - shown <= NOT_SHOWN


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "namespace", "run"}
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]
        targets = panel.get("targets", [])
        assert bool(targets) == (panel["type"] != "row")
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["datasource"]["uid"] == "${datasource}"
            for name in figures_in(target["expr"]) - RAYS_OWN:
                assert re.search(rf'{name}{{namespace=~"\$namespace", run=~"\$run"', target["expr"]), panel["title"]


def test_the_pod_monitor_finds_the_ports_of_rendered_pods() -> None:
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())["spec"]
    *_, manifest = rendered(["+cluster=h100x64"])[1]
    cluster = manifest["spec"]["rayClusterSpec"]
    ports = {}
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    for template in [*templates, manifest["spec"]["submitterPodTemplate"]]:
        labels = template["metadata"]["labels"]
        selected = monitor["selector"]["matchLabels"].items() <= labels.items() and all(
            labels[each["key"]] in each["values"] for each in monitor["selector"]["matchExpressions"]
        )
        assert set(monitor["podTargetLabels"]) <= labels.keys()
        if selected:
            containers = template["spec"]["containers"]
            ports[labels["regrow/role"]] = {port["name"] for each in containers for port in each.get("ports", [])}
    assert ports.keys() == {"head", "worker"}
    scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    assert "metrics" in ports["head"] & ports["worker"] & scraped
    assert scraped <= ports["head"]


def test_the_documentations_settings_of_a_prometheus_without_an_operator_name_nodes_and_rules() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    blocks = [block for block in re.findall(r"(?:^    .+\n)+", text, re.MULTILINE) if "scrape_configs:" in block]
    (settings,) = map(yaml.safe_load, blocks)
    assert set(settings) == {"scrape_configs", "rule_files"}
    (written,) = re.findall(r"rules\.yaml'.*> (\S+)$", text, re.MULTILINE)
    assert settings["rule_files"] == [written]


def test_the_documentation_names_every_alert_and_file() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| `(Regrow\w+)` \|", document, re.MULTILINE) == ALERTS
    for file in MONITORING.iterdir():
        assert f"k8s/monitoring/{file.name}" in document
