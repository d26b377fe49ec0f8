"""A folder in memory that counts what is asked of it."""

import uuid
from typing import Any

from regrow.storage import RemoteStorage, Storage


class Counting(RemoteStorage):
    """Requests, and bytes read, since they were last `taken`."""

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        super().__init__(fs, root, uri)
        self.requests, self.num_bytes = 0, 0

    @staticmethod
    def empty() -> "Counting":
        found = Storage.at(f"memory://{uuid.uuid4().hex}/run")
        assert isinstance(found, RemoteStorage)
        return Counting(found.fs, found.root, found.uri)

    def taken(self) -> tuple[int, int]:
        counted = self.requests, self.num_bytes
        self.requests, self.num_bytes = 0, 0
        return counted

    def read_bytes(self, name: str) -> bytes:
        return self._count(super().read_bytes(name))

    def read_with(self, name: str, read: Any) -> Any:
        def counting(file: Any) -> Any:
            found = read(file)
            return self._count(found) if isinstance(found, bytes) else found

        return super().read_with(name, counting)

    def list(self, name: str = "") -> list[str]:
        self.requests += 1
        return super().list(name)

    def exists(self, name: str) -> bool:
        self.requests += 1
        return super().exists(name)

    def _count(self, data: bytes) -> bytes:
        self.requests, self.num_bytes = self.requests + 1, self.num_bytes + len(data)
        return data
