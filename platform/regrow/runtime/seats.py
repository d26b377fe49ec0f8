"""The part of the coordinator at which workers join generations and ask for their seats: one by one, or all of a node
by way of its keeper."""

from collections.abc import Sequence
from typing import cast

from regrow.control import events as e
from regrow.control.group import WAITING_POLL_S
from regrow.control.membership import Member
from regrow.control.states import Answer, StartedAnswer
from regrow.runtime.shell import Shell


class Seats:
    """Of a run."""

    shell: Shell
    _secret: bytes

    def join(self, member: Member, expected: int) -> None:
        """A worker is ready for the next generation; see `Membership.join`."""
        self.shell.tell(e.Joined(member, expected))

    def join_all(self, joining: Sequence[tuple[Member, int]]) -> None:
        """The same of all workers of a node that are."""
        for member, expected in joining:
            self.join(member, expected)

    def formation(self, member_id: str, after: int) -> Answer:
        """A worker's seat in the generation that it is in, the first one after `after`; asked until it is there."""
        answer = cast(Answer, self.shell.tell(e.Asked(member_id, after)))
        return _seated(answer, member_id, self.shell, self._secret)

    def formations(self, asking: Sequence[tuple[str, int]]) -> list[Answer]:
        """The same of some workers of a node, by `member_id` and `after`."""
        return [self.formation(*each) for each in asking]

    def started(self, processes: Sequence[tuple[str, int, float]]) -> StartedAnswer:
        """Whether anything was heard of these workers, each by node, pid and how long ago (s) it was started."""
        return cast(StartedAnswer, self.shell.tell(e.Started(processes)))


def _seated(answer: Answer, member_id: str, shell: Shell, secret: bytes) -> Answer:
    """What a member is told: of a generation its seat, once storage and keepers know the number."""
    formation = answer.formation
    rank = formation.rank_of(member_id) if formation is not None else None
    if formation is None or rank is None:
        return answer
    return Answer(seat=formation.seat_of(rank, secret)) if shell.is_formed() else Answer(wait_s=WAITING_POLL_S)
