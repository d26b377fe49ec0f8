"""The world in virtual time with checkpoints in real files, by the coordinator's publisher, and ways to end a run."""

import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.past import Past
from regrow.control.values import Version
from regrow.runtime.publisher import Publisher
from regrow.state.disk.catalog import committed_steps, open_checkpoint, step_folder
from regrow.state.disk.format import DataFile
from regrow.state.disk.upload import Tensors, Written
from regrow.storage import LocalStorage
from support.control_world import KEEP, Broken, Shard, World, advance
from support.spans import content_of

RUN = "0123456789abcdef"
HEAD = b"head"
WAYS = ("stop", "stop twice", "kill the driver", "give up", "outage", "outage that outlasts it")
OUTAGE_S = 600.0


class Away(LocalStorage):
    """A folder that cannot be written for a while."""

    def __init__(self, root: Path, is_away: Callable[[], bool]) -> None:
        super().__init__(root)
        self.is_away = is_away

    def join(self, *names: str) -> "Away":
        return Away(self.root.joinpath(*names), self.is_away)

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        if self.is_away():
            raise OSError(f"{self.root}/{name}: storage is away")
        return super().write_chunks(name, chunks)


class AtOnce:
    """In the place of the publisher's threads: virtual time does not pass in it."""

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(work())
        return done


class FiledWorld(World):
    """Its checkpoints are files in a folder."""

    damages = False  # these files are not

    def __init__(self, seed: int, folder: Path, **options: Any) -> None:
        self.disk = Away(folder, lambda: self.now < self.away_until)
        self.of_upload: dict[int, dict[str, int]] = {}  # of each upload, by node
        super().__init__(seed, **options)

    def _control(self, past: Past) -> Control:
        self.publisher = Publisher(self.disk, RUN, keep=KEEP, flush_log=lambda: None)
        self.publisher.close()
        self.publisher.thread = self.publisher.deleting = AtOnce()  # type: ignore[assignment]
        return super()._control(past)

    def _put(self, key: int, command: c.Write, part: Shard) -> None:
        super()._put(key, command, part)
        order = self.publisher.order(command)
        name = f"g{command.version.generation:06d}-{order.token}.safetensors"
        num_bytes = self.disk.join(step_folder(command.version.step)).write_chunks(
            name, [HEAD, part.state.to_bytes(8, "little")]
        )
        rows = self.of_upload.setdefault(command.upload, {})
        content = content_of("w", "float64", part.num_shards, rows.setdefault(command.origin, len(rows)))
        file = DataFile(name, num_bytes, len(HEAD), "", content)
        tensors: dict[int, Tensors] = {0: {"w": ("float64", (part.num_shards,))}} if command.describe else {}
        self.publisher.written(command.upload, order, Written((file,), 1, {}, {0: ""}, tensors))

    def _index(self, command: c.PublishIndex) -> e.Event:
        self.publisher.publish_index(command)
        return self._published()

    def _commit(self, command: c.PublishCommit, state: int) -> e.Event:
        super()._commit(command, state)
        self.publisher.publish_commit(command)
        return self._published()

    def _published(self) -> e.Event:
        (event,) = self.publisher.done()
        if isinstance(event, e.PublishFailed | e.IndexNotWritten):
            self.trouble_at = self.now
        return event

    def _do_CleanUp(self, command: c.CleanUp) -> None:
        super()._do_CleanUp(command)
        self.publisher.clean_up(command)
        self.publisher.done()

    def _do_Withdraw(self, command: c.Withdraw) -> None:
        super()._do_Withdraw(command)
        self.publisher.withdraw(command.step)

    def _do_Delete(self, command: c.Delete) -> None:
        super()._do_Delete(command)
        self.publisher.delete(command)
        self.publisher.done()

    def is_stored(self, version: Version) -> bool:
        """On disk, made of the samples before it."""
        steps = committed_steps(self.disk)
        for step in steps[:1]:
            state = 0
            for each in range(1, step + 1):
                state = advance(state, each)
            for file in open_checkpoint(self.disk, step, run_id=RUN).files:
                data = self.disk.read_range(f"{step_folder(step)}/{file.name}", len(HEAD), 8)
                if int.from_bytes(data, "little") != state:
                    raise Broken(f"the checkpoint of step {step} is not made of the samples before it")
        return max(steps, default=-1) >= version.step

    def strike(self, way: str) -> None:
        """End the run in this way, now."""
        if way == "stop":
            self.stop_asked = True
        elif way == "stop twice":
            self.stop_asked = True
            self.after(8.0 * self.rng.random(), self.leave_at_once)
        elif way == "kill the driver":
            self.kill_driver()
        elif way == "give up":
            self.send(e.Failed("the corpus is not there"))
        else:
            self.away_until = self.now + OUTAGE_S
            self.after(30.0 * self.rng.random(), lambda: setattr(self, "stop_asked", True))


def end_somehow(seed: int, folder: Path, way: str) -> FiledWorld:
    """A run that ends in this way at a random instant, often with a fault beside it. Raises Broken."""
    rng = random.Random(seed)
    num_nodes = rng.choice((1, 2, 3, 4))
    made = FiledWorld(
        seed,
        folder,
        num_nodes=num_nodes,
        last_step=30,
        min_workers=rng.randint(1, num_nodes),
        timeout_s=1800.0 if way == "outage" else 60.0,
    )
    for _ in range(rng.choice((0, 1, 1, 2))):
        made.after(30.0 * rng.random(), made.fault)
    made.after(30.0 * rng.random(), lambda: made.strike(way))
    made.run(6000.0)
    made.check_log()
    return made
