"""The claims of claims.toml, which has all that acceptance looks at, in the order of looking."""

import tomllib
from pathlib import Path

from regrow.accept.claims import Check, Claim, Part

_FILE = tomllib.loads(Path(__file__).with_name("claims.toml").read_text())

CHECKS: tuple[Check, ...] = tuple(
    Check(
        function=f"regrow.accept.{each['function']}",
        part=Part(each["part"]),
        deadline_s=each["deadline_s"],
        claims=tuple(
            Claim(name, claim, expected, advice.format(**_FILE["advice"]))
            for name, claim, expected, advice in each["claims"]
        ),
        num_gpus=each.get("num_gpus", 0),
        memory_gib=each.get("memory_gib", 0.0),
    )
    for each in _FILE["check"]
)
NEXT: str = _FILE["next"]["text"]  # what no check here shows, and what would
