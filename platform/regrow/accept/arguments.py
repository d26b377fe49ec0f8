"""The command line of `jobs.accept`: key=value, read here, as the parts for one machine know nothing of Hydra."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from regrow.accept.claims import Part
from regrow.config.plain import models
from regrow.errors import ConfigError

CLUSTER = "+cluster="
PREFIX = "accept."


@dataclass(frozen=True)
class Options:
    """What may be said; a field's help is the comment on its line."""

    out: Path = Path("runs/accept")  # folder that accept.json is written into
    only: tuple[str, ...] = ()  # names of claims, with commas, as accept.json has them; all where none is given
    parts: tuple[Part, ...] = ()  # of one_process, one_node, no_gpu, cluster, with commas; null: what this machine has
    gpus: int | None = None  # most GPUs to use; null: all
    model: str = "1_8b"  # of conf/model, that one GPU is timed with
    minutes: float = 10.0  # most that a part may take
    pretrain: tuple[str, ...] = field(default=(), repr=False)  # +cluster=NAME and any setting of jobs.pretrain with it


HELP = """\
What of regrow holds on this machine: python -m jobs.accept [accept.KEY=VALUE ...] [+cluster=NAME [KEY=VALUE ...]]

  python -m jobs.accept                                  one GPU, then all of this node; without, what a CPU can show
  python -m jobs.accept accept.only=certificate_premise  one claim
  python -m jobs.accept +cluster=h100x64                 a running Ray cluster, as jobs.pretrain would use it; any
                                                         setting of jobs.pretrain may follow

Each check runs in a process of its own with a deadline. A table says of each claim whether it was proved, refused or
not tested here, with what was measured, what is expected, and what to do; accept.json says the same to programs. A
refused claim is a result: the exit status is 0 unless a check itself broke. docs/acceptance.md has the claims.

"""


def parse(arguments: Sequence[str]) -> Options:
    """Raises ConfigError for what is no argument of this command."""
    options, rest = Options(), []
    has_cluster = any(argument.startswith(CLUSTER) for argument in arguments)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.removeprefix(PREFIX)
        if not equals:
            raise ConfigError(f"{argument!r} is no key=value; --help lists what there is")
        if key.startswith(PREFIX) and name in _names():
            options = _given(options, name, value)
        elif has_cluster and not key.startswith(PREFIX):
            rest.append(argument)
        else:
            raise ConfigError(f"unknown setting {key!r}{_near(key)}")
    if has_cluster and not options.parts:
        options = replace(options, parts=(Part.cluster,))
    if Part.cluster in options.parts and not has_cluster:
        raise ConfigError(f"accept.parts={Part.cluster} needs {CLUSTER}NAME, as jobs.pretrain takes it")
    return replace(options, pretrain=tuple(rest))


def help_text() -> str:
    source = Path(__file__).read_text().splitlines()
    lines = []
    for each in fields(Options):
        (line,) = [line for line in source if line.startswith(f"    {each.name}: ")]
        if each.name != "pretrain":
            default = ",".join(each.default) if isinstance(each.default, tuple) else each.default
            lines.append(f"  {PREFIX + each.name:<16} {line.partition('  # ')[2]} [{default if default else 'null'}]")
    return HELP + "\n".join(lines)


def _given(options: Options, name: str, value: str) -> Options:
    try:
        if name == "out":
            return replace(options, out=Path(value))
        if name == "parts":
            return replace(options, parts=tuple(Part(each) for each in value.split(",")))
        if name == "only":
            return replace(options, only=tuple(value.split(",")))
        if name == "gpus":
            return replace(options, gpus=None if value == "null" else int(value))
        if name == "minutes":
            return replace(options, minutes=max(1.0, float(value)))
        if value not in models():
            raise ValueError(f"one of {', '.join(models())}")
        return replace(options, model=value)
    except ValueError as error:
        known = f"; one of {', '.join(Part)}" if name == "parts" else ""
        raise ConfigError(f"{PREFIX}{name}={value}: {error}{known}") from error


def _names() -> list[str]:
    return [each.name for each in fields(Options) if each.name != "pretrain"]


def _near(key: str) -> str:
    known = [PREFIX + name for name in _names()]
    own = key if key.startswith(PREFIX) else PREFIX + key
    nearest = [] if "." in key and own != key else difflib.get_close_matches(own, known, n=1, cutoff=0.75)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; settings of jobs.pretrain go with {CLUSTER}NAME only, --help lists what there is"
