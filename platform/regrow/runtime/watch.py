"""Finds who keeps a group from getting on, by asking the keepers of its nodes, and saves what everyone was doing.

Asked only while the group stands still (`observe.stalls`): while it trains, nobody pays for being watched.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from regrow.control.health import DARK_S, Pulse, Stalls, Stragglers, Worker, left_behind
from regrow.control.membership import Member

ASK_AGAIN_S, ASKED_PER_S = 0.2, 2000.0  # between questions, and more where there are more keepers
WHERE_AGAIN_S = 5.0  # between questions where everyone is: who gets on has begun a collective meanwhile
LOOK_S = 1.5  # for keepers to say where everyone is
LOOKED_AT = 64  # nodes, at most: stacks are read by people


@dataclass(frozen=True)
class Suspect:
    """A member that does not get on, and why it is thought so."""

    member: Member
    dark: bool  # its node's keeper does not answer either
    detail: str


@dataclass
class _Asked:
    """One question to many keepers."""

    calls: dict[Any, str]  # to whom
    at: float
    where: bool = False  # whether pulses say where everyone is
    answers: dict[str, Any] = field(default_factory=dict)

    def collect(self) -> None:
        done = ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[0] if self.calls else []
        for call in done:
            node = self.calls.pop(call)
            try:
                self.answers[node] = ray.get(call)
            except ray.exceptions.RayError:  # its node is gone, which shows by itself
                self.answers[node] = None


class Watch:
    """Call `tick` often: it never waits."""

    def __init__(
        self,
        stalls: Stalls,
        *,
        save: Callable[[dict[str, str]], None],
        slow: Callable[[list[tuple[str, Pulse, float]]], None],
    ) -> None:
        """`save` takes what was found on each node of a group that stands still, `slow` who is, and by what factor."""
        self.stalls, self.save, self.slow = stalls, save, slow
        self._stragglers = Stragglers()
        self._check_up: _Asked | None = None
        self._hardware: _Asked | None = None
        self.gpus: dict[str, list[str]] = {}  # by node, what they told when they were asked last
        self._pulses: _Asked | None = None
        self._look: _Asked | None = None
        self._where: dict[Worker, Pulse] = {}  # when that was asked before
        self._suspects: list[Suspect] = []
        self._ask_at = 0.0

    def check_up(self, now: float, keepers: Mapping[str, Any]) -> None:
        """All ranks have probed their devices: how fast are they?"""
        self._check_up = _Asked({keeper.pulses.remote(): node for node, keeper in keepers.items()}, now)

    def read_gpus(self, now: float, keepers: Mapping[str, Any]) -> None:
        """Ask how all GPUs are: of those that fail, nobody can ask any more."""
        self._hardware = _Asked({keeper.gpus.remote(): node for node, keeper in keepers.items()}, now)

    def tick(self, now: float, members: Iterable[Member], keepers: Mapping[str, Any]) -> list[Suspect]:
        """The members of the current group that are to be given up; `keepers` are those of its nodes.

        Without keepers nobody can be asked, and nobody is given up.
        """
        if self._check_up is not None:
            self._finish_check_up(self._check_up)
        if self._hardware is not None:
            self._hardware.collect()
            self.gpus |= {node: answer for node, answer in self._hardware.answers.items() if answer}
            if not self._hardware.calls:
                self._hardware = None
        if not keepers or not self.stalls.stalled_s(now):
            self._pulses, self._look, self._suspects = None, None, []
            self._where.clear()
            return []
        if self._look is not None:
            return self._finish_look(now)
        if self.stalls.wants_a_look(now):
            self._begin_look(now, keepers)
            return []
        if self._pulses is None and now > self._ask_at:
            where = self.stalls.stuck(now)
            self._pulses = _Asked(
                {(keeper.where if where else keeper.pulses).remote(): node for node, keeper in keepers.items()},
                now,
                where,
            )
        if self._pulses is not None:
            self._suspects = self._found(now, list(members))
            if self._suspects:
                self._pulses = None
                self._begin_look(now, keepers)
        return []

    def _found(self, now: float, members: list[Member]) -> list[Suspect]:
        asked = self._pulses
        assert asked is not None
        asked.collect()
        suspects = []
        for member in members:
            pulses: list[Pulse] = asked.answers.get(member.node) or []
            for pulse in self.stalls.hung(pulses):
                if pulse.pid == member.pid:
                    how = "stopped" if pulse.stopped else f"in state {pulse.state}" if pulse.state else "gone"
                    detail = f"process {pulse.pid} {how}, last ran {pulse.silent_s:.1f} s ago"
                    suspects.append(Suspect(member, False, detail))
        waited = now - asked.at
        if waited > DARK_S:
            dark = set(asked.calls.values())
            said = f"nothing was heard of the node for {waited:.1f} s"
            suspects += [Suspect(member, True, said) for member in members if member.node in dark]
        if not asked.calls and asked.where:
            suspects += self._left_behind(asked.answers, members)
        if not asked.calls or waited > DARK_S:
            again_s = WHERE_AGAIN_S if asked.where else ASK_AGAIN_S
            self._ask_at = now + max(again_s, len(asked.answers) / ASKED_PER_S)
            self._pulses = None
        return suspects

    def _left_behind(self, answers: Mapping[str, list[Pulse] | None], members: list[Member]) -> list[Suspect]:
        pulses = {(node, pulse.pid): pulse for node, answer in answers.items() for pulse in answer or []}
        found = {(each.node, each.pid): each for each in members}
        before, self._where = self._where, {worker: pulses[worker] for worker in found if worker in pulses}
        return [
            Suspect(found[worker], False, f"process {worker[1]} runs, and is not in the collective that others wait in")
            for worker in left_behind(before, self._where)
        ]

    def _finish_check_up(self, asked: _Asked) -> None:
        asked.collect()
        if not asked.calls:
            self._check_up = None
            pulses = [(node, pulse) for node, answer in asked.answers.items() for pulse in answer or []]
            found = self._stragglers.found(pulses)
            if found:
                self.slow(found)

    def _begin_look(self, now: float, keepers: Mapping[str, Any]) -> None:
        first = {suspect.member.node for suspect in self._suspects if not suspect.dark}
        nodes = sorted(keepers, key=lambda node: node not in first)[:LOOKED_AT]
        self._look = _Asked({keepers[node].look.remote(): node for node in nodes}, now)

    def _finish_look(self, now: float) -> list[Suspect]:
        assert self._look is not None
        self._look.collect()
        if self._look.calls and now - self._look.at < LOOK_S:
            return []
        self.save({node: text or "" for node, text in self._look.answers.items()})
        suspects, self._suspects, self._look = self._suspects, [], None
        return suspects
