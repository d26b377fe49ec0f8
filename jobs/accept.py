"""What of regrow holds on this machine, or on a Ray cluster: `python -m jobs.accept [accept.KEY=VALUE ...]`.

Needs torch and a checkout, installed or not; neither Ray nor Hydra but with +cluster=NAME.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "platform"))

from regrow.accept.main import HELP, accept, parse
from regrow.errors import RegrowError
from regrow.program import output


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    try:
        return accept(parse(arguments), arguments)
    except BrokenPipeError:
        raise
    except (RegrowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # where no check runs; one that does is not tested
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    with output():
        sys.exit(main(sys.argv[1:]))
