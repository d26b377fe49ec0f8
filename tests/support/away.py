"""An object store that is away for a while: `away://FOLDER`."""

from collections import Counter
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

TRIES = 2  # of one read, where something asks again by itself


class Away(LocalFileSystem):
    """A store that refuses the next `refusals` of what is asked for, and the first `of_each` for each file."""

    protocol = "away"
    refusals: ClassVar[float] = 0
    of_each: ClassVar[int] = 0
    asked: ClassVar[int] = 0
    refused: ClassVar[Counter[str]] = Counter()  # by file

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("away://") if isinstance(path, str) else path)

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        Away.asked += 1
        if Away.refusals > 0:
            Away.refusals -= 1
            raise ConnectionError("the store is away")
        if Away.refused[path] < Away.of_each:
            Away.refused[path] += 1
            raise ConnectionError("the store is away")
        return super()._open(path, *args, **options)


fsspec.register_implementation("away", Away)
