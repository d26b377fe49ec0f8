"""Which tests `make check` leaves to `make test`, by what they took: `python tests/support/durations.py FILE`.

FILE is pytest's `--junitxml` of tests/unit and tests/golden, on a machine with nothing else to do.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
LIST = TESTS / "slow.txt"
SLOW_S = 0.5  # of all cases of a function together
QUICK = ("tests.unit", "tests.golden")  # what `make check` chooses from
PROMISED = {"tests/unit/test_control_schedules.py::test_ten_thousand_random_schedules_keep_the_promises"}  # there, too


def slow_tests() -> frozenset[str]:
    """`tests/unit/test_NAME.py::test_FUNCTION` of each."""
    return frozenset(LIST.read_text().split())


def measured(results: Path) -> list[str]:
    """Those of a run that took long."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        within, function = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        if within.startswith(QUICK):
            *folders, module, group = within.split(".") if ".Test" in within else [*within.split("."), ""]
            name = "::".join(filter(None, [f"{'/'.join(folders)}/{module}.py", group, function]))
            seconds[name] += float(case.attrib["time"])  # type: ignore[assignment]
    return sorted(name for name, took in seconds.items() if took >= SLOW_S and name not in PROMISED)


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]))
    LIST.write_text("\n".join(found) + "\n")
    print(f"{len(found)} functions of {SLOW_S} s and more are in {LIST.relative_to(TESTS.parent)}")
