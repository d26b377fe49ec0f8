"""The token by which a Ray cluster lets one in."""

import os
from pathlib import Path


def use_token() -> None:
    """Use a token that is there, as Ray does where it starts or joins a cluster, unless RAY_AUTH_MODE says otherwise.

    A Ray that `ray.init` starts has one. To be called before ray is first imported, which is when it looks at the mode.
    """
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
