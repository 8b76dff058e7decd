"""Bugs put in on purpose: that they still fit the code, and that looking for them can tell."""

import sys

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster import mutating
from kvconnect.testing.cluster.mutations import MUTATIONS, Edit, Mutation

VERSION = ("kvconnect.cli.main", "--version")
BROKEN = Edit("kvconnect/cli/main.py", "import typer\n", "import typer, nothing_of_that_name\n")
HARMLESS = Edit("kvconnect/cli/main.py", "import typer\n", "import typer  # nothing else\n")


def test_every_mutation_fits_the_code_and_changes_it():
    assert mutating.stale(MUTATIONS) == []
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 8
    for mutation in MUTATIONS:
        for edit in mutation.edits:
            before = (mutating.ROOT / edit.file).read_text()
            assert compile(edit.edited(mutating.ROOT), edit.file, "exec")
            assert edit.edited(mutating.ROOT) != before


def test_text_that_has_moved_on_is_an_error():
    for old in ("no such text", "class "):
        gone = Mutation("gone", "", (Edit("kvconnect/errors.py", old, "x"),), VERSION, "")
        (words,) = mutating.stale([gone, MUTATIONS[0]])
        assert words.startswith("gone: kvconnect/errors.py has ")
    with pytest.raises(ConfigError, match="has 0 times, not once"):
        mutating.caught(Mutation("gone", "", (Edit("none.py", "a", "b"),), VERSION, ""))


def test_a_folder_without_tests_is_no_checkout(tmp_path):
    with pytest.raises(ConfigError, match="is no checkout"), mutating.copied(tmp_path):
        pass


def test_one_mutation_is_caught():
    mutation = next(m for m in MUTATIONS if m.name == "nvme-checksum-skipped")
    verdict = mutating.caught(mutation)
    assert verdict.failed
    assert verdict.shows(mutation.shows), verdict.output[-3000:]
    assert "index in ()" not in (mutating.ROOT / mutation.edits[0].file).read_text()


@pytest.mark.parametrize(
    ("edit", "shows", "code", "words"),
    [
        (BROKEN, "ModuleNotFoundError", 0, "caught"),
        (BROKEN, "FAILED bytes", 1, "MISSED"),
        (HARMLESS, "kvconnect", 1, "MISSED"),
    ],
    ids=["by its rule", "by another rule", "not at all"],
)
def test_the_table_says_what_was_caught_and_by_what(monkeypatch, capsys, edit, shows, code, words):
    mutation = Mutation("broken", "It does not start.", (edit,), VERSION, shows)
    monkeypatch.setattr(mutating, "MUTATIONS", (mutation,))
    monkeypatch.setattr(sys, "argv", ["mutate-cluster"])
    assert mutating.main() == code
    assert words in capsys.readouterr().out


def test_a_check_that_fails_anyway_shows_nothing(monkeypatch, capsys):
    mutation = Mutation("any", "", (HARMLESS,), ("no_such_module",), "No module")
    monkeypatch.setattr(mutating, "MUTATIONS", (mutation,))
    monkeypatch.setattr(sys, "argv", ["mutate-cluster", "--only", "any"])
    assert mutating.main() == 1
    assert "fails without it: no_such_module" in capsys.readouterr().out
