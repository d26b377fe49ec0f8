"""What can happen to a run: every event is documented, said in words, and read whichever version wrote it."""

import ast
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from regrow.record import events as module
from regrow.record.events import (
    CAUSE_WORDS,
    EVENTS,
    FAILURES,
    GRACEFUL,
    Cause,
    Event,
    Failure,
    Unknown,
    cause_words,
    from_row,
)
from regrow.record.log import encode

DOCUMENT = Path(__file__).parents[2] / "docs" / "file-formats.md"
GIVEN = {"str": "abc", "int": 3, "float": 2.5, "bool": True, "list": [], "dict": {}}


def filled(kind: type[Event]) -> Event:
    """An event with a value in every field."""
    names = {each.name: getattr(each.type, "__name__", None) or str(each.type) for each in fields(kind)}
    given = {name: GIVEN[re.split(r"\W", of_type)[0]] for name, of_type in names.items() if name != "more"}
    return kind(**given | {"time": 7.0})  # type: ignore[arg-type]


def test_a_rollback_says_nothing_as_it_is_written_past_all_that_shows_events() -> None:
    """The group's own sentence has the step that it begins from."""
    assert filled(EVENTS["rollback"]).sentence() is None


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_comes_back_from_its_line_and_has_words(name: str) -> None:
    made = filled(EVENTS[name])
    row = json.loads(encode(made.to_row()))
    assert list(row)[:2] == ["time", "event"]
    assert row["event"] == name
    assert from_row(row) == made
    assert made.title
    sentence = made.sentence()
    assert sentence is None or ("\n" not in sentence and "None" not in sentence)


@pytest.mark.parametrize("name", EVENTS)
def test_what_a_newer_version_says_is_kept(name: str) -> None:
    row = filled(EVENTS[name]).to_row() | {"of_a_newer_version": [1]}
    found = from_row(row)
    assert type(found) is EVENTS[name]
    assert found.more == {"of_a_newer_version": [1]}
    assert found.to_row() == row


def test_a_line_that_is_no_event_of_ours_is_unknown_and_loses_nothing() -> None:
    for row in ({"time": 1.0, "event": "parade", "x": 1}, {"time": 2.0, "event": "drain", "node": "n"}):
        found = from_row(row)
        assert isinstance(found, Unknown)
        assert found.to_row() == row
        assert found.sentence() is None
    assert from_row({"time": 1.0, "event": "gpu_error"}).title == "gpu error"


def test_a_field_that_is_null_has_its_default() -> None:
    found = from_row({"time": 1.0, "event": "failure", "detail": None, "gpus": None})
    assert found == Failure(time=1.0)


def test_causes_have_one_wording_wherever_they_are_shown() -> None:
    assert set(CAUSE_WORDS) == set(Cause)
    assert len(set(CAUSE_WORDS.values())) == len(Cause)
    assert cause_words("grow") == cause_words(Cause.grow) == "grew"
    assert cause_words("a_later_one") == "a later one"
    assert json.dumps({Cause.grow: Cause.drain}) == '{"grow": "drain"}'
    assert not set(FAILURES) & set(GRACEFUL)
    assert "a worker died: pid 7" in str(Failure(cause=Cause.worker_died, detail="pid 7").sentence())


def test_the_documentation_has_every_event_with_every_field() -> None:
    text = DOCUMENT.read_text().partition("## events.jsonl")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \| (.+)$", text, re.MULTILINE))
    assert set(rows) == set(EVENTS)
    for name, kind in EVENTS.items():
        words = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", rows[name]))))
        assert {each.name for each in fields(kind)} - {"time", "more"} <= words, name


def test_every_field_has_a_comment_that_says_what_it_is() -> None:
    lines = inspect.getsource(module).splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and "Cause" not in node.name for base in node.bases
        ):
            assert ast.get_docstring(node)
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign):
                    assert "  # " in lines[statement.lineno - 1], (node.name, ast.unparse(statement))
