"""docs/configuration.md says what the schema says."""

import os
import re
import shlex
from collections import defaultdict
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from regrow.config import schema
from regrow.config.store import pretrain_config
from regrow.record.run_folder import identity
from support.reference import PAGE, ROOT, read_schema, render

SOURCE = Path(schema.__file__).read_text()


def test_the_reference_is_up_to_date() -> None:
    page = render(read_schema(SOURCE), ROOT / "conf")
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "GOLDEN=write python -m pytest tests/unit/test_reference.py writes it anew"


def test_every_setting_of_every_job_is_in_the_reference_with_its_help_and_default() -> None:
    page = PAGE.read_text()
    jobs = [
        each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, schema.PretrainConfig)
    ]
    assert len(jobs) > 2
    for job in jobs:
        for group in fields(job):
            made = getattr(job(), group.name)
            assert is_dataclass(made)
            part = page.partition(f"### `{group.name}`\n")[2].partition("\n### ")[0]
            for setting in fields(made):
                (line,) = [line for line in part.splitlines() if line.startswith(f"| `{setting.name}` |")]
                _, _, _, default, text, _ = line.replace("\\|", "/").split("|")
                assert text.strip(), line
                value = getattr(made, setting.name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    assert float(default.strip().strip("`")) == value
                elif value in (None, True, False):
                    assert default.strip() == f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"


def test_the_choices_of_a_group_are_told_with_their_comments(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "short.yaml").write_text(
        "# @package _global_\n# A short one,\n# to try.\nsteps: 1\n# not this\n"
    )
    page = render(read_schema(SOURCE), tmp_path)
    assert "| `train=` | what |\n| --- | --- |\n| `short` | A short one, to try. |\n" in page
    assert "## Sites" not in page


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class RunConfig:\n    '''Which.'''\n    name: str = 'x'\n", r"RunConfig\.name has no comment"),
        ("class RunConfig:\n    name: str = 'x'  # its name\n", "RunConfig has no docstring"),
    ],
)
def test_a_setting_without_help_is_refused(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_schema(source)


def examples(page: str) -> list[list[str]]:
    """The arguments of each indented command that trains."""
    text = re.sub(r"\\+\n *", "", (ROOT / page).read_text())  # as one line
    found = re.findall(r"^ +(?:python|torchrun \S+ \d+) -m jobs\.pretrain(?:_torchrun)?\b(.*)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r" #.*|  .*", "", each)) for each in found]


def test_commands_of_the_documents_that_make_other_models_make_other_runs() -> None:
    """Before, most of them were of run.name=debug, and refused where one of them had run."""
    pages = ["README.md", "conf/pretrain.yaml", "jobs/pretrain_torchrun.py"]
    pages += [str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")]
    runs = defaultdict(set)
    for page in pages:
        for arguments in examples(page):
            config = pretrain_config(arguments)
            runs[config.run.name].add(str(identity(config)))
    assert {"debug", "mine", "three", "llama150m", "llama8b", "llama8b-torchrun", "mixed"} <= runs.keys()
    assert [name for name, identities in runs.items() if len(identities) > 1] == []
