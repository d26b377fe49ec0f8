"""Carries out what control decides, on a clock and threads of its own: no display, report or slow store delays it."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.past import Past, formed
from regrow.process_log import say, say_error
from regrow.record.claim import Claim
from regrow.record.events import from_row
from regrow.record.log import RANKS, RunLog, encode
from regrow.record.relative import without_lists
from regrow.runtime.board import Board
from regrow.runtime.clock import ControlClock
from regrow.runtime.fleet import Fleet
from regrow.runtime.liveness.probe import RollCall
from regrow.runtime.log_writer import LogWriter
from regrow.runtime.publisher import Publisher
from regrow.runtime.writing import fetch
from regrow.show.prometheus import RunMetrics
from regrow.state.memory.held import is_whole
from regrow.storage import RETRY_DEADLINE_S, Storage

TICK_S = 0.1
STACKS = "stacks"  # folder, of what each worker did while a group stood still
RANKS_EVERY_S = 30.0  # for the file of what ranks spend their time on
FLUSH_S = RETRY_DEADLINE_S + 30.0  # for the log, before COMMIT: its store may fail for as long as that is asked again
FORM_S = 0.5  # for a generation's number to be in the log, before a worker has to ask again for it
KEEPERS_S = 5.0  # for all of its nodes' keepers to remember it instead; then one is enough
CLOSE_S = FLUSH_S  # for the log, in the end
DELETE_S = 30.0  # for old checkpoints to be gone, in the end
FLUSH_EVERY_S = 10.0  # shows whether storage is there, and whether the run is still ours
MESSAGES = 1 << 32  # numbers for each coordinator's: its own are above those of all before it
NUM_UPDATES = 10_000  # that are kept for the driver


@dataclass(frozen=True)
class Update:
    """One thing to show, in order."""

    number: int
    kind: str  # "row" (of metrics) or "event"
    content: dict[str, Any]


@dataclass(frozen=True)
class _Formed:
    """The newest generation's number on its way to where the next coordinator finds it."""

    logged: int  # the log's work that has it in storage
    keepers: list[Future[None]]  # of its nodes
    at: float  # of the monotonic clock


class Shell:
    """Safe to use from several threads. `now` is control's; see `clock.ControlClock`."""

    def __init__(
        self,
        config: PretrainConfig,
        folder: Storage,
        checkpoints: Storage,
        run_id: str,
        *,
        claim: Claim,
        secret: bytes,
        past: Past,
        events: list[dict[str, Any]],
        instruments: Any,
    ) -> None:
        """`events` are the log's so far; `instruments` is `ray.util.metrics`, or None."""
        self._config, self._folder = config, folder
        self.lock = threading.RLock()
        self.clock = ControlClock(time.time())
        first_message = claim.number * MESSAGES
        self.control = Control(config, is_whole=is_whole, now=self.now, past=past, first_message=first_message)
        self._writer = LogWriter(self._tell_of_storage)
        self._claim, self._log = claim, RunLog(folder, claim=claim)
        self.publisher = Publisher(
            checkpoints, run_id, keep=config.checkpoint.keep, flush_log=self._flush_log, check=claim.check, fetch=fetch
        )
        self.publisher.keep_every_steps = config.checkpoint.keep_every_steps
        self.fleet = Fleet(run_id, secret, self.publisher)
        self.metrics = RunMetrics(
            config, self.control.cadence, events, instruments=instruments, note=self._note, stepped_at=past.logged_at
        )
        self.board = Board(folder, self._writer, self._note, wanted=config.observe.tensorboard)
        self.roll_call = RollCall()
        self._updates: deque[Update] = deque(maxlen=NUM_UPDATES)
        self._num_updates = first_message
        self._later: deque[e.Event] = deque()  # what carrying out commands has found
        self._flushed = (0, self.now)  # the log's newest flush, and when it was asked for
        self._formed = _Formed(0, [], 0.0)
        self._ranks_at, self._closing = 0.0, threading.Event()  # for the file of what ranks spend their time on
        self._node_snapshots: tuple[Mapping[str, Any], ...] = ()  # for the same
        self._timer = threading.Thread(target=self._run, name="timer", daemon=True)
        self._carriers: dict[type, Callable[[Any], None]] = {
            c.Form: self._form,
            c.Record: lambda command: self.record(command.event, command.fields),
            c.BeginRows: self._begin_rows,
            c.LogRow: self._log_row,
            c.GiveUp: lambda command: None,  # workers hear it when they ask, the driver with `updates`
            c.Kill: self.fleet.kill,
            c.Connect: lambda command: self.roll_call.meet(command.members),
            c.Probe: self._probe,
            c.Hail: self._hail,
            c.Ask: self.fleet.ask,
            c.TellOver: self.fleet.tell_over,
            c.SendPlaces: self.fleet.send_places,
            c.Announce: self.fleet.announce,
            c.RestartKeeper: self.fleet.restart,
            c.SnapshotCommitted: lambda command: self.metrics.snapshot(command.version.step),
            c.ShowRanks: self._show_ranks,
            c.ShowSnapshots: self._show_snapshots,
            c.SaveStacks: self._save_stacks,
            c.Write: self.fleet.write,
            c.WriteAll: self.fleet.write_all,
            c.ReadBack: self.fleet.read_back,
            c.ReadBackAll: self.fleet.read_back_all,
            c.PublishIndex: lambda command: (self.fleet if command.by else self.publisher).publish_index(command),
            c.PublishCommit: self.publisher.publish_commit,
            c.CleanUp: self.publisher.clean_up,
            c.Withdraw: lambda command: self.publisher.withdraw(command.step),
            c.NoteDamaged: self.publisher.note_damaged,
            c.Delete: self.publisher.delete,
        }

    @property
    def now(self) -> float:
        return self.clock.now

    def start(self) -> None:
        """From here on time passes."""
        self._timer.start()

    def tell(self, event: e.Event) -> Any:
        """An event to control; its reply, once all that follows from it is under way. Raises Fenced."""
        with self.lock:
            return self._follow(self.control.on(event, self.now))

    def is_formed(self) -> bool:
        """Whether a coordinator after this one will not give out the newest generation's number again.

        It is in the log, or while storage is away, its nodes' keepers know of it.
        """
        waited_s = time.monotonic() - self._formed.at
        if self._writer.wait(self._formed.logged, max(0.0, FORM_S - waited_s)):
            return True
        answers = [each for each in self._formed.keepers if not each.done() or each.exception() is None]
        known = sum(each.done() for each in answers)
        return known > 0 and (known == len(answers) or waited_s > KEEPERS_S)

    def await_log(self) -> None:
        """What was recorded so far is in the log; while storage is away it may not be."""
        self._writer.wait(self._writer.put(self._log.flush), FORM_S)

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Into the log, and to all that show it."""
        with self.lock:
            typed = from_row({"time": time.time(), "event": event, **fields})
            self._writer.put(lambda: self._log.event(typed), is_line=True)
            self.metrics.event(typed)
            self._update("event", without_lists(typed.to_row()))

    def reported(self, report: Mapping[str, Any]) -> None:
        """The driver has written a report."""
        with self.lock:
            self.metrics.reported(report)
            self.board.report(report, step=self.control.next_step - 1)

    def updates(self, after: int) -> list[Update]:
        """What happened after the update of this number, as far as it is still known."""
        with self.lock:
            return [update for update in self._updates if update.number > after]

    def close(self) -> str:
        """Write what is left, and end; what was not done, or empty."""
        self._closing.set()
        if self._timer.is_alive():
            self._timer.join()
        with self.lock:
            self.roll_call.close()
            self._writer.put(self._log.close)
            self.board.close()
        if self._writer.close(CLOSE_S):
            self.publisher.close(0.0)
            return f"storage is away: {_lost(self._writer.num_lines, is_local=self._folder.is_local)}"
        return self.publisher.close(DELETE_S)

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self.tick()
            except Exception as error:  # a mistake of ours; the next tick goes on
                say_error(error)

    def tick(self) -> None:
        """Take in what keepers and storage have answered, and let control decide what time alone decides."""
        with self.lock:
            self.clock.tick()
            for event in [*self.fleet.answers(), *self.publisher.done()]:
                try:
                    self.tell(event)
                except Exception as error:  # a mistake of ours, of one answer
                    say_error(error)
            self._follow(self.control.tick(self.now))
            self.metrics.tick()
            if self._claim.lost and not self.control.is_superseded:
                self.tell(e.Superseded(self._claim.lost))
        number, at = self._flushed
        if self.now - at > FLUSH_EVERY_S and self._writer.wait(number, 0.0):
            self._flushed = self._writer.put(self._log.flush), self.now
        self._writer.check()

    def _follow(self, commands: list[c.Command]) -> Any:
        """Carry them out, and what control makes of what that finds."""
        reply = self._carry_out(commands)
        while self._later:
            self._carry_out(self.control.on(self._later.popleft(), self.now))
        return reply

    def _carry_out(self, commands: list[c.Command]) -> Any:
        reply = None
        for command in commands:
            if isinstance(command, c.Reply):
                reply = command.value
            else:
                self._carriers[type(command)](command)
        return reply

    def _form(self, command: c.Form) -> None:
        self.record("forming", formed(command.generation, command.members))
        logged = self._writer.put((lambda: None) if self._folder.is_local else self._log.flush)  # there an event is
        keepers = self.fleet.remember(command.generation, dict.fromkeys(member.node for member in command.members))
        self._formed = _Formed(logged, keepers, time.monotonic())

    def _begin_rows(self, command: c.BeginRows) -> None:
        self._writer.put(lambda: self._log.begin(command.generation, command.start_step))
        self.board.begin(command.start_step)

    def _log_row(self, command: c.LogRow) -> None:
        row = dict(command.row)
        self._writer.put(lambda: self._log.row(row, is_late=command.is_late), is_line=True)
        self.board.row(row)
        self.metrics.row(row)
        self._update("row", row)

    def _probe(self, command: c.Probe) -> None:
        dead = self.roll_call.gone(command.members, time.monotonic())
        if dead:
            self._later.append(e.PortRefused(tuple(sorted(dead))))

    def _hail(self, command: c.Hail) -> None:
        running = self.roll_call.running(command.nodes)
        if running:
            self._later.append(e.Running(tuple(sorted(running))))

    def _show_ranks(self, command: c.ShowRanks) -> None:
        self.metrics.ranks(command.ranks, command.suspects)
        if self.now < self._ranks_at:
            return
        self._ranks_at = self.now + RANKS_EVERY_S
        content = {
            "time": time.time(),
            "ranks": [dict(each) for each in command.ranks],
            "snapshots": [dict(each) for each in self._node_snapshots],
        }

        def save() -> None:
            with contextlib.suppress(OSError):  # the next one comes
                self._folder.write_bytes(RANKS, encode(content))

        self._writer.put(save)

    def _show_snapshots(self, command: c.ShowSnapshots) -> None:
        self._node_snapshots = command.nodes
        self.metrics.node_snapshots(command.nodes)

    def _save_stacks(self, command: c.SaveStacks) -> None:
        generation = self.control.generation
        name = f"{STACKS}/generation-{generation:06d}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"

        def save() -> None:
            text = "\n".join(f"== node {node}\n{where or 'no answer'}" for node, where in command.found.items())
            with contextlib.suppress(OSError):  # the group matters more
                self._folder.write_bytes(name, text.encode())

        self._writer.put(save)
        self.record("stalled", {"generation": generation, "seconds": command.stalled_s, "stacks": name})

    def _update(self, kind: str, content: dict[str, Any]) -> None:
        self._num_updates += 1
        self._updates.append(Update(self._num_updates, kind, content))

    def _note(self, text: str) -> None:
        self.record("note", {"text": text})

    def _tell_of_storage(self, text: str) -> None:
        say(text)
        self._note(text)

    def _flush_log(self) -> None:
        self._writer.flush(self._log.flush, FLUSH_S)


def _lost(num_lines: int, *, is_local: bool) -> str:
    """What the log lacks, where so many lines were not written; an object store may not have some before them."""
    if num_lines == 0:
        return "the last rows and events of the run's log may be lost"
    least = "" if is_local else "at least "
    return f"{least}the last {num_lines} rows and events of the run's log are lost"
