"""Acceptance's runner: deadlines, crashes, interruptions, the form of its JSON; and its command line."""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import accept as accept_job

from regrow.accept import checks_cluster, checks_kernels, checks_one_gpu, checks_one_node, checks_training
from regrow.accept.claims import CHECKS, Check, Claim, Finding, NotTested, Part, Report, State, read_report
from regrow.accept.main import HELP, READ, Options, chosen, measured, parse, show, why_skipped, write_json
from regrow.accept.runner import Machine, Outcome, members, run_check, run_checks
from regrow.config.store import pretrain_config
from regrow.errors import ConfigError
from regrow.forecast.settle import settled
from regrow.state.memory.slots import Committed

ROOT = Path(__file__).parents[2]
CLAIMS = tuple(Claim(name, f"that {name}", "so much", f"mend {name}") for name in ("first", "second"))


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """Makes a check of a function's body, which has `report` and a folder of the test's own."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Checks:
        number = 0

        @classmethod
        def of(cls, body: str, deadline_s: float = 60.0, **needs: float) -> Check:
            cls.number += 1
            module = f"accept_test_{cls.number}"
            code = f"import os, subprocess, sys, time\nHERE = {str(tmp_path)!r}\n\ndef check(report):\n"
            (tmp_path / f"{module}.py").write_text(code + textwrap.indent(textwrap.dedent(body), "    "))
            return Check(f"{module}:check", Part.no_gpu, deadline_s, CLAIMS, **needs)  # type: ignore[arg-type]

    return Checks


def states(found: list[Finding]) -> list[State]:
    return [each.state for each in found]


def run(*checks: Check, machine: Machine = Machine(), minutes: float = 10.0) -> Outcome:  # noqa: B008
    return run_checks(checks, machine, minutes=minutes, tell=lambda now, found: None)


def test_each_claim_is_in_the_state_that_its_check_found(checks: type) -> None:
    found, broke = run_check(
        checks.of("""
            report.found("first", True, "3 s")
            report.found("second", False, "9 s", "too slow")
        """),
        60,
    )
    assert [(each.state, each.figure, each.reason) for each in found] == [
        (State.proved, "3 s", ""),
        (State.refused, "9 s", "too slow"),
    ]
    assert broke == ""


def test_a_deadline_kills_the_check_and_all_that_it_started_also_what_left_its_session(
    checks: type, tmp_path: Path
) -> None:
    body = """
        report.found("first", True, "3 s")
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [subprocess.Popen(sleep, start_new_session=apart).pid for apart in (False, True)]
        open(os.path.join(HERE, "pids"), "w").write(f"{os.getpid()} {pids[0]} {pids[1]}")
        time.sleep(600)
    """
    began = time.monotonic()
    found, broke = run_check(checks.of(body), 8)
    assert time.monotonic() - began < 40
    assert states(found) == [State.proved, State.refused]
    assert found[1].reason == "did not end within 8 s"
    assert broke == ""  # a hang is a result
    assert [_state(pid) for pid in map(int, (tmp_path / "pids").read_text().split())] == ["Z"] * 3


def test_a_crash_is_refused_with_its_last_line_and_the_claims_behind_it_are_not_tested(checks: type) -> None:
    body = """
        print("the last thing it said", flush=True)
        os.abort()
    """
    found, broke = run_check(checks.of(body), 60)
    assert states(found) == [State.refused, State.not_tested]
    assert found[0].reason.startswith("its process was ended by SIGABRT")
    assert broke == ""


@pytest.mark.parametrize(
    ("line", "state", "reason", "broke"),
    [
        (
            'raise RuntimeError("CUDA error: out of memory\\nmore")',
            State.refused,
            "RuntimeError: CUDA error: out",
            False,
        ),
        ("report.there_is_no_such_thing()", State.refused, "AttributeError: 'Report' object has no", True),
        ("import there_is_no_such_package", State.not_tested, "needs the package there_is_no_such_package", False),
    ],
)
def test_what_a_check_raises_is_its_machines_fault_or_its_own(
    checks: type, line: str, state: State, reason: str, broke: bool
) -> None:
    found, problem = run_check(checks.of(line), 60)
    assert found[0].state is state
    assert found[0].reason.startswith(reason)
    assert bool(problem) is broke


def test_the_command_goes_on_after_each_of_them(checks: type) -> None:
    outcome = run(
        checks.of("os._exit(3)"),
        checks.of('report.found("first", True, "")'),
        checks.of("raise KeyError('ours')"),
        checks.of('report.found("first", True, ""); report.found("second", True, "")'),
    )
    assert Counter(states(outcome.findings)) == {State.proved: 3, State.refused: 3, State.not_tested: 2}
    assert len(outcome.broke) == 1


def test_what_a_machine_lacks_is_not_tested_and_says_so(checks: type) -> None:
    machine = Machine(gpus=("H100",), memory_gib=79)
    outcome = run(checks.of("pass", num_gpus=2), checks.of("pass", num_gpus=1, memory_gib=100), machine=machine)
    assert {each.reason for each in outcome.findings} == {
        "needs 2 GPUs, 1 here",
        "needs GPUs of 100 GiB, 79 here",
    }
    assert set(states(outcome.findings)) == {State.not_tested}


@pytest.mark.long
def test_a_part_whose_minutes_are_over_begins_nothing_more(checks: type) -> None:
    outcome = run(checks.of("time.sleep(600)"), checks.of("pass"), minutes=0.1)
    assert "accept.only=first runs it" in outcome.findings[0].reason
    assert "accept.only=first runs it" in outcome.findings[2].reason
    assert set(states(outcome.findings)) == {State.not_tested}
    assert (outcome.findings[0].check_s or 0) >= 6
    assert outcome.findings[2].check_s is None


def test_a_check_that_its_parts_minutes_cut_short_refuses_nothing_that_it_did_not_find(checks: type) -> None:
    begun = 'report.begun("second", "was begun and did not come to its end"); '
    found = 'report.found("first", False, "9 s", "too slow"); '
    cut = run(checks.of(found + begun + "time.sleep(600)"), minutes=0.1)
    assert states(cut.findings) == [State.refused, State.not_tested]
    assert cut.findings[1].reason.startswith("the 0.1 minutes of its part were over; accept.only=first")
    # at its own deadline what was begun hangs
    late = run(checks.of(found + begun + "time.sleep(600)", deadline_s=6))
    assert [each.reason for each in late.findings] == ["too slow", "was begun and did not come to its end"]
    assert states(late.findings) == [State.refused] * 2


def test_a_check_of_one_gpu_runs_as_a_worker_does(checks: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    told = 'report.found("first", True, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]); '
    check = checks.of(told + 'report.found("second", True, os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "none"))')
    for part, wanted in ((Part.one_process, ["0", str(os.cpu_count())]), (Part.one_node, ["1", "none"])):
        found, _ = run_check(replace(check, part=part), 60.0)
        assert [each.figure for each in found] == wanted


def test_a_session_that_has_ended_has_no_members() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert process.pid in members(process.pid)
    process.kill()
    process.wait()
    assert members(process.pid) == []


INTERRUPTED = """
import sys
sys.path[:0] = [{root!r} + "/platform"]
import regrow.accept.main as main
from regrow.accept.main import Options
from regrow.accept.claims import Check, Claim, Part
from pathlib import Path

def check(name, module):
    return Check(module + ":check", Part.no_gpu, 100, (Claim(name, "that " + name, "", ""),))

main.CHECKS = (check("quick", "quick"), check("slow", "slow"), check("never", "quick"))
sys.exit(main.accept(Options(out=Path({out!r})), []))
"""


def test_interrupted_halfway_what_was_found_stays_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text('def check(report):\n    report.found("quick", True, "1 s")\n')
    pid_file = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        "import os, time\n\ndef check(report):\n    report.begun('slow', 'did not come to its end')\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    code = INTERRUPTED.format(root=str(ROOT), out=str(tmp_path / "out"))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    give_up_at = time.monotonic() + 120
    while not pid_file.exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    content = json.loads((tmp_path / "out" / "accept.json").read_text())
    assert [(each["name"], each["state"]) for each in content["checks"]] == [
        ("quick", "proved"),
        ("slow", "not_tested"),
        ("never", "not_tested"),
    ]
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_check_ends_with_the_command_that_started_it_however_that_ends(checks: type, tmp_path: Path) -> None:
    check = checks.of("""
        open(os.path.join(HERE, "pid"), "w").write(str(os.getpid()))
        time.sleep(600)
    """)
    code = f"from regrow.accept.child import main; main({check.function!r}, '/dev/null', '/dev/null')"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'platform'}"}
    process = subprocess.Popen([sys.executable, "-c", outer], env=environment, start_new_session=True)
    give_up_at = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    time.sleep(0.2)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    while _state(pid) != "Z" and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert _state(pid) == "Z"


def _state(pid: int) -> str:
    """Of a process; Z also where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def finding(state: State, figure: str | None, reason: str = "", part: Part = Part.no_gpu) -> Finding:
    return Finding("name", "a claim [22]", state, figure, "< 3", reason, "do this", part)


def test_accept_json_has_the_form_that_others_rely_on(tmp_path: Path) -> None:
    findings = [finding(State.proved, "2 s"), finding(State.not_tested, None, "no GPU here")]
    content = json.loads(write_json(tmp_path / "new", findings, Machine(), arguments=["a=b"]).read_text())
    for each in content["checks"]:
        assert {"name", "claim", "state", "figure", "expected"} <= each.keys()
        assert each["state"] in ("proved", "refused", "not_tested")
    assert [each["figure"] for each in content["checks"]] == ["2 s", None]
    assert [each["check_s"] for each in content["checks"]] == [None, None]
    assert content["counts"] == {"proved": 1, "not_tested": 1}
    assert content["versions"]["python"]


def test_the_table_says_what_to_do_where_a_claim_is_refused_and_only_there() -> None:
    refused = finding(State.refused, "4 s", "too slow")
    assert measured(refused) == "4 s; too slow"
    out = io.StringIO()
    show([finding(State.proved, "2 s", part=Part.cluster)], out)
    assert "to do" not in out.getvalue()
    show([refused, finding(State.not_tested, None, "no GPU here", Part.one_node)], out)
    assert "4 s; too slow (expected: < 3)\n                  to do: do this" in out.getvalue()
    assert "All GPUs of this node: 1 claim not tested here, no GPU here" in out.getvalue()
    assert "0 proved, 1 refused, 1 not tested here" in out.getvalue()


def test_every_check_has_a_function_and_every_claim_a_name_of_its_own() -> None:
    names = [claim.name for check in CHECKS for claim in check.claims]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), check.function
        assert all(claim.claim and claim.expected and claim.advice for claim in check.claims)


def test_every_claim_is_reported_by_its_check() -> None:
    """By name, somewhere in the module of its check."""
    for check in CHECKS:
        source = Path(importlib.import_module(check.function.partition(":")[0]).__file__ or "").read_text()
        for claim in check.claims:
            first = claim.name.partition("_")[0]
            assert f'"{claim.name}"' in source or f'"{first}_{{' in source, claim.name


def test_arguments_are_read_without_hydra() -> None:
    assert parse(["accept.only=null", "accept.parts=null", "accept.gpus=null"]) == Options()
    options = parse(["accept.out=/tmp/x", "accept.only=probe,host_name", "accept.gpus=1", "accept.minutes=2.5"])
    assert (options.out, options.only, options.gpus) == (Path("/tmp/x"), ("probe", "host_name"), 1)
    assert options.minutes == 2.5
    assert parse(["accept.out=~/x"]).out == Path.home() / "x"
    cluster = parse(["+cluster=cpu3", "run.storage_path=/shared"])
    assert cluster.parts == (Part.cluster,)
    assert cluster.pretrain == ("+cluster=cpu3", "run.storage_path=/shared")
    assert [f"accept.{name}" for name in READ] == re.findall(r"^  (accept\.\w+)  ", HELP, re.MULTILINE)
    for name in READ:
        default = getattr(Options(), name) or "null"
        assert re.search(rf"^  accept\.{name} .*\[{default}\]$", HELP, re.MULTILINE), name


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("accept.ot=x", "unknown setting 'accept.ot'; did you mean 'accept.out'?"),
        ("out=x", "unknown setting 'out'; did you mean 'accept.out'?"),
        ("train.steps=3", r"unknown setting 'train.steps'; settings of jobs.pretrain go with \+cluster=NAME only"),
        ("--quick", "'--quick' is no key=value"),
        ("accept.gpus=all", "accept.gpus=all: invalid literal"),
        ("accept.gpus=-1", "accept.gpus=-1: must be at least 1, or null for all"),
        ("accept.gpus=0", "accept.gpus=0: must be at least 1, or null for all"),
        ("accept.model=405b", "accept.model=405b: one of 150m, 1_8b, 1b, 3b, 8b"),
        ("accept.parts=gpu", "accept.parts=gpu: .* one of one_process, one_node"),
        ("accept.parts=cluster", r"needs \+cluster=NAME"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse([argument])
    assert "\n" not in str(error.value)


def test_a_claim_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'certificate_premise'"):
        chosen(Options(only=("certificat_premise",)))
    assert [check.function for check in chosen(Options(only=("host_nvml",)))] == [
        "regrow.accept.checks_one_gpu:gpu_host"
    ]


def test_parts_that_are_not_run_say_why() -> None:
    assert why_skipped(Part.cluster, Options(), Machine()) == "needs a Ray cluster: +cluster=NAME"
    assert why_skipped(Part.no_gpu, Options(), Machine(gpus=("H100",)))
    assert not why_skipped(Part.no_gpu, Options(), Machine())
    assert "accept.parts=cluster" in why_skipped(Part.one_node, Options(parts=(Part.cluster,)), Machine())


def test_one_machines_checks_import_neither_ray_nor_hydra() -> None:
    modules = sorted({check.function.partition(":")[0] for check in CHECKS if check.part is not Part.cluster})
    code = (
        "import importlib, sys\n"
        f"for name in {['regrow.accept.main', *modules]!r}: importlib.import_module(name)\n"
        "sys.exit(', '.join(sorted({'ray', 'hydra', 'omegaconf'} & set(sys.modules))) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "platform")})


def test_one_machines_checks_need_nothing_but_torch(tmp_path: Path) -> None:
    """What a lent machine may lack has stand-ins: every name of it that is imported, and with the same numbers."""
    modules = sorted({check.function.partition(":")[0] for check in CHECKS if check.part is not Part.cluster})
    for name in ("isal", "pynvml", "ray", "hydra", "omegaconf", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError('it is not installed')\n")
    code = (
        "import importlib, sys, zlib\n"
        "from regrow.accept import child\n"
        "child._missing = lambda name: True\n"
        "child.provide()\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from regrow.config.plain import models, read_model\n"
        "for name in models(): read_model(name)\n"
        "from regrow.state import checksums\n"
        "one, other = b'abc' * 100, b'defg' * 1234\n"
        "both = checksums.crc32_combine(zlib.crc32(one), zlib.crc32(other), len(other))\n"
        "sys.exit(0 if both == zlib.crc32(one + other) else 'another checksum')\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "platform")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths})


def test_help_needs_no_torch() -> None:
    code = "import sys, jobs.accept as job; job.main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "accept.out" in done.stdout


def test_ctrl_c_where_no_check_runs_is_a_word_and_no_traceback() -> None:
    code = (
        "import sys, jobs.accept as job\n"
        "def accept(options, arguments): raise KeyboardInterrupt\n"
        "job.accept = accept\n"
        "sys.exit(job.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a traceback after the first check, and what it had found was lost."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("regrow.accept.main.run_checks", lambda *_, **__: pytest.fail("a check has run"))
    assert accept_job.main([f"accept.out={tmp_path}/file", "accept.only=host_shm"]) == 1
    printed = capsys.readouterr()
    assert re.fullmatch(r"error: .*/file is no folder to write to .*; set accept.out to one\n", printed.err)


def test_losses_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever among good ones they are."""

    def losses(*_: object, **__: object) -> list[dict[int, float]]:
        return [{1: 2.0, 2: float("nan"), 3: 2.0}]

    monkeypatch.setattr(checks_one_node, "num_gpus", lambda: 2)
    monkeypatch.setattr(checks_one_node, "run_ranks", losses)
    monkeypatch.setattr(checks_kernels, "train_small", lambda parallel, *_: [*losses()[0].values()])
    report = Report(tmp_path / "report")
    checks_one_node.world_sizes(report)
    checks_kernels.small_model(report)
    found = read_report(tmp_path / "report")
    for name in ("sizes_float32", "sizes_bfloat16", "debug_float32", "debug_bfloat16", "debug_float8"):
        assert found[name]["state"] == "refused", name
        assert "inf" in found[name]["figure"]


def test_one_rank_without_room_for_slots_is_enough_for_snapshots_not_to_be_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [(9000.0, 1, 0.0), (9000.0, 1, float("nan"))]
    monkeypatch.setattr(checks_one_node, "num_gpus", lambda: 2)
    monkeypatch.setattr(checks_one_node, "import_torchao", lambda: None)
    monkeypatch.setattr(checks_one_node, "run_ranks", lambda *_, **__: ranks)
    checks_one_node.eight_b(Report(tmp_path / "report"))
    assert read_report(tmp_path / "report")["eight_b_snapshots"]["state"] == "not_tested"


def test_a_snapshot_is_confirmed_once_the_next_step_was_launched(tmp_path: Path) -> None:
    """So that its copy is beside that step, as in a run."""
    order: list[str] = []

    class Noting:
        folder = tmp_path

        def begin(self, step: int, _: object) -> bool:
            order.append(f"begin {step}, committed {Committed.read(tmp_path).newest.step}")
            return True

        def confirm(self, step: int) -> None:
            order.append(f"confirm {step}")

    snapshots = checks_one_node.SnapshotOfEachStep(Noting())
    for number in range(1, 4):
        order.append(f"launch {number}")
        snapshots.launched()
    snapshots.confirm()
    none = Committed.read(tmp_path / "none").newest.step
    assert order == [
        *("launch 1", f"begin 1, committed {none}"),
        *("launch 2", "confirm 1", "begin 2, committed 1"),
        *("launch 3", "confirm 2", "begin 3, committed 2"),
        "confirm 3",
    ]
    assert Committed.read(tmp_path).newest.step == 3


@pytest.mark.parametrize(("waits_for_all", "state"), [(False, "proved"), (True, "refused")])
def test_slots_that_are_closed_only_once_the_device_rests_are_refused(
    waits_for_all: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel took a second, and closing might take five."""
    order: list[str] = []
    event = SimpleNamespace(record=lambda: order.append("event"), query=lambda: "rest" in order)
    monkeypatch.setattr(checks_training.torch.cuda, "_sleep", lambda cycles: order.append("kernel"))
    monkeypatch.setattr(checks_training.torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(checks_training.torch.cuda, "synchronize", lambda: order.append("rest"))

    def begin(step: int, scalars: object) -> bool:
        order.append(f"copy {step}, committed {Committed.read(tmp_path).newest.step}")
        return True

    def close() -> None:
        order.append("rest" if waits_for_all else "close")

    snapshots: Any = SimpleNamespace(folder=tmp_path, generation=1, begun=2, begin=begin, close=close)
    checks_training.slots_closed(Report(tmp_path / "report"), snapshots)
    found = read_report(tmp_path / "report")["slots_closed"]
    assert found["state"] == state, found
    assert order[:3] == ["copy 3, committed 2", "kernel", "event"]


class Copying:
    """A device, by its own clock, on which a product takes a millisecond, and longer beside a snapshot's copy."""

    def __init__(self, copy_s: float, beside_s: float) -> None:
        self.copy_s, self.beside_s = copy_s, beside_s
        self.now, self.copied_at, self.on_side_stream = 0.0, 0.0, False

    def mm(self, *_: object) -> None:
        meanwhile = self.copied_at - self.now
        if meanwhile >= self.beside_s:
            self.now += self.beside_s
        else:
            self.now += meanwhile + 1e-3 * (1 - meanwhile / self.beside_s) if meanwhile > 0 else 1e-3

    def begin(self, *_: object) -> bool:
        self.copied_at = self.now + self.copy_s
        return True

    @contextlib.contextmanager
    def stream(self, _: object) -> Iterator[None]:
        self.on_side_stream = True
        yield
        self.on_side_stream = False

    def event(self, **_: object) -> Any:
        event = SimpleNamespace(synchronize=lambda: None, at=0.0)

        def record() -> None:
            event.at = self.copied_at if self.on_side_stream else self.now

        event.record, event.elapsed_time = record, lambda other: 1e3 * (other.at - event.at)
        return event


@pytest.mark.parametrize(
    ("first_copy_s", "copy_s", "beside_s", "state", "figure"),
    [
        (0.234, 0.234, 1.08e-3, "proved", "+8.0%"),
        (0.026, 0.026, 1.08e-3, "proved", "+8.0%"),  # slots of a small /dev/shm
        (0.026, 0.026, 1.2e-3, "refused", "+20.0%"),
        (0.026, 0.026, float("inf"), "refused", "+inf%"),  # no product ran meanwhile
        (0.040, 0.026, 1.2e-3, "refused", "+20.0%"),  # and some ran alone
        (0.100, 0.026, 1.2e-3, "not_tested", None),
    ],
)
def test_what_a_copy_costs_products_is_said_of_those_beside_it(
    first_copy_s: float,
    copy_s: float,
    beside_s: float,
    state: str,
    figure: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was said of 200, of which most ran after a small slot's copy."""
    device = Copying(copy_s, beside_s)
    for name, stand_in in {"Event": device.event, "stream": device.stream, "Stream": lambda _: None}.items():
        monkeypatch.setattr(checks_training.torch.cuda, name, stand_in)
    monkeypatch.setattr(checks_training.torch, "mm", device.mm)
    monkeypatch.setattr(checks_training.torch, "randn", lambda *_, **__: None)
    snapshots: Any = SimpleNamespace(begin=device.begin, wait=lambda: None, confirm=lambda step: None)
    checks_training.slots_beside(Report(tmp_path / "report"), snapshots, torch.device("cpu"), first_copy_s)
    found = read_report(tmp_path / "report")["slots_beside"]
    assert (found["state"], (found["figure"] or "").partition(" ")[0] or None) == (state, figure), found


def shared_memory_gib(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much is free in /dev/shm."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=gib << 18, f_frsize=1 << 12))


def test_a_nodes_shared_memory_is_for_the_gpus_that_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_one_gpu.torch.cuda, "device_count", lambda: 8)
    shared_memory_gib(40, monkeypatch)
    states = []
    for gpus in ("1", "2", "0"):
        monkeypatch.setenv("REGROW_ACCEPT_GPUS", gpus)
        checks_one_gpu.host(Report(tmp_path / gpus))
        states.append(read_report(tmp_path / gpus)["host_shm"]["state"])
    assert states == ["proved", "refused", "refused"]


def test_a_clusters_nodes_need_shared_memory_for_each_of_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as manifests give them: fewer where a run's shards are small."""

    def problems(wanted_gib: float) -> list[str]:
        return [each for each in checks_cluster.look(wanted_gib)["problems"] if "/dev/shm" in each]

    shared_memory_gib(100, monkeypatch)
    assert problems(8.0) == []
    assert problems(288.0) == ["100.0 GiB free in /dev/shm, 288.0 are wanted"]
    for cluster in ("h100x64", "h100x512", "h100x16384", "h100x98304", "h200x8"):
        manifest = Path(__file__).parents[1] / "golden" / "submit" / f"{cluster}.yaml"
        *_, given = re.findall(r"medium: Memory\n +sizeLimit: '(\d+)Gi'", manifest.read_text())  # of workers
        config, _ = settled(pretrain_config([f"+cluster={cluster}"]))
        assert 0 < 8 * checks_cluster.shm_gib_a_gpu(config) < int(given), cluster


@pytest.fixture
def pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what was given for jobs.pretrain."""
    monkeypatch.setenv("REGROW_ACCEPT_FOLDER", str(tmp_path))
    return lambda *given: monkeypatch.setenv("REGROW_ACCEPT_PRETRAIN", json.dumps(given))


def test_any_setting_may_follow_the_cluster_or_stand_before_it(pretrain: Callable[..., None], tmp_path: Path) -> None:
    given = ["run.name=mine", "train.steps=50", f"run.storage_path={tmp_path}", "+cluster=cpu3", "model.num_layers=2"]
    pretrain(*given)
    job = checks_cluster.Job("accept-1", *checks_cluster.settings(checks_cluster.arguments()))
    config = pretrain_config(job.arguments)
    assert (config.run.name, config.cluster.name, config.model.num_layers) == ("accept-1", "cpu3", 2)
    assert (job.steps, config.train.steps, job.checkpoint_every, config.checkpoint.every_steps) == (50, 50, 12, 12)
    assert job.folder == tmp_path / "accept-1"
    stopped = checks_cluster.Job("accept-1", *checks_cluster.settings([*given, "train.stop_at_step=20"]))
    assert stopped.steps == 20


def test_a_job_trains_where_its_run_is_looked_for(
    pretrain: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in the checkout, or below the user's home: without a step seen, sound hardware was refused."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\npwd -P\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, place in (("~/runs", tmp_path / "home" / "runs"), ("runs", tmp_path / "runs")):
        pretrain("+cluster=cpu3", f"run.storage_path={given}")
        job = checks_cluster.Job("accept-1", *checks_cluster.settings(checks_cluster.arguments()))
        assert job.folder == place / "accept-1"
    job.start()
    job.wait(60.0)
    assert job.output.read_text() == f"{tmp_path.resolve()}\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["+cluster=h100x16384"], r"model.num_layers=4 are fewer than the 64 stages"),
        (["+cluster=h100x98304"], r"parallel.tp=8 must divide model"),
        (["+cluster=cpu3", "train.stps=3"], "stps"),
    ],
)
def test_what_a_job_would_refuse_of_what_was_given_is_not_tested(
    pretrain: Callable[..., None], tmp_path: Path, given: list[str], words: str
) -> None:
    pretrain(*given)
    with pytest.raises(NotTested, match=words):
        checks_cluster.train(Report(tmp_path / "report"))


ROW = {"batch_digest": "a", "loss": 1.0}


class AfterAKill:
    """A job's groups and rows, once 64 workers have become others."""

    def __init__(self, later: list[int]) -> None:
        self.after, self.asked = later, 0

    def groups(self) -> list[dict[str, Any]]:
        self.asked += 1
        groups = [list(range(64)), self.after][: self.asked]
        return [
            {"generation": number, "start_step": number, "workers": [{"node": "n", "pid": pid} for pid in pids]}
            for number, pids in enumerate(groups, 1)
        ]

    def rows(self) -> dict[int, dict[str, Any]]:
        return {
            step: {**ROW, "step": step, "generation": step, "time": time.time()} for step in range(1, self.asked + 1)
        }


@pytest.mark.parametrize(
    ("arguments", "later", "state"),
    [
        ((), range(56), "proved"),  # the others wait as spares: no step would be shorter with them
        ((), [*range(55), 100], "refused"),
        ((), range(10), "refused"),  # those that are restarted come later
        (("cluster.spare_workers=0",), range(63), "proved"),
        (("cluster.spare_workers=0",), range(56), "refused"),
        (("cluster.max_workers=72",), [*range(63), 100], "proved"),  # a spare took its place
        (("parallel.tp=4",), range(60), "proved"),
        (("cluster.min_workers=64",), [*range(63), 100], "proved"),  # the group waited for another one
    ],
)
def test_a_killed_workers_survivors_that_have_to_go_on_are_those_that_make_the_step_shorter(
    arguments: tuple[str, ...], later: Iterable[int], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_cluster, "kill", lambda worker, config: None)
    job, config = AfterAKill(list(later)), pretrain_config(["+cluster=h100x64", *arguments])
    checks_cluster.kill_a_worker(Report(tmp_path / "report"), job, config, dict.fromkeys(range(9), ROW))
    found = read_report(tmp_path / "report")["cluster_worker_killed"]
    assert found["state"] == state, found


class Restarted:
    """A job of 60 steps that saves each 15 and is killed at 40; these groups come after."""

    steps, checkpoint_every = 60, 15
    groups_after: list[dict[str, Any]]

    def __init__(self, name: str, *_: object) -> None:
        self.undisturbed, self.starts = name.endswith("-undisturbed"), 0
        self.process = SimpleNamespace(send_signal=lambda number: None, wait=lambda: None)

    def start(self) -> None:
        self.starts += 1

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def rows(self) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(range(1, 61 if self.undisturbed or self.starts > 1 else 41), ROW)

    def groups(self) -> list[dict[str, Any]]:
        first = [{"start_step": step, "world_size": 3, "source": "checkpoint"} for step in (0, 21)]
        return first + (self.groups_after if self.starts > 1 else [])


@pytest.mark.parametrize(
    ("start_steps", "state", "figure"),
    [
        ([30], "proved", "10 steps again"),
        ([30, 45], "proved", "10 steps again"),  # smaller at first: it grows once a worker is back
        ([10], "refused", "30 steps again"),
        ([10, 45], "refused", "30 steps again"),
    ],
)
def test_what_a_killed_driver_cost_is_said_of_the_first_group_of_the_next(
    start_steps: list[int], state: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was of the last one, which may begin past the step at which the driver was killed."""
    config = SimpleNamespace(run=SimpleNamespace(storage_path=str(tmp_path)))
    monkeypatch.setattr(checks_cluster, "arguments", list)
    monkeypatch.setattr(checks_cluster, "settings", lambda given: (given, config))
    monkeypatch.setattr(checks_cluster, "kill_a_worker", lambda *_: None)
    groups = [{"start_step": step, "world_size": 3, "source": "checkpoint"} for step in start_steps]
    monkeypatch.setattr(Restarted, "groups_after", groups, raising=False)
    monkeypatch.setattr(checks_cluster, "Job", Restarted)
    checks_cluster.train(Report(tmp_path / "report"))
    found = read_report(tmp_path / "report")["cluster_driver_killed"]
    assert (found["state"], figure in found["figure"]) == (state, True), found


def test_runs_in_a_thread_too(checks: type) -> None:
    """Where signals cannot be caught."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(checks.of('report.found("first", True, "")'))))
    thread.start()
    thread.join()
    assert outcomes[0].findings[0].state is State.proved
