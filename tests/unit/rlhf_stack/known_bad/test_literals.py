"""rlhf_stack.known_bad.literals: no match is lost by searching only texts with a literal of the pattern."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack import known_bad
from rlhf_stack.known_bad.literals import UNKNOWN, can_match, literals

LOGS = [log.read_text(encoding="utf-8") for log in sorted(Path(__file__).with_name("logs").glob("*.log"))]
PATTERNS = [pattern for row in known_bad.load() for pattern in row.symptoms]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("some text", {"some text"}),
        (r"\d+ drivers? \(", {" driver"}),
        ("a|bcd", {"a", "bcd"}),
        ("(?:ab|cd)e(?:xyz|uvw)", {"xyz", "uvw"}),
        ("(?:abcd){2,}e", {"abcd"}),
        ("(?:abcd)*e", {"e"}),
        ("(?:abcd)?e", {"e"}),
        ("(?<!abcd)e(?!fgh)", {"e"}),
        ("e(?=fgh)", {"e"}),
        ("(?i)abc", UNKNOWN),
        ("(?i:abc)d", {"d"}),
        (r"\w+", UNKNOWN),
        (r"abc|\d", UNKNOWN),
        (r"[A-Z]\.$", {"."}),
    ],
)
def test_a_match_contains_one_of_the_literals(pattern: str, expected: set[str]) -> None:
    assert literals(re.compile(pattern, re.MULTILINE)) == expected


def test_every_match_of_the_corpus_contains_a_literal_of_its_pattern() -> None:
    """Each pattern of the database matches in it, so each set of literals is tested."""
    for pattern in PATTERNS:
        matches = [match[0] for log in LOGS for match in pattern.finditer(log)]
        assert matches, pattern.pattern
        assert all(can_match(pattern, match) for match in matches), pattern.pattern


@given(st.data())
def test_no_text_made_from_a_pattern_loses_it(data: st.DataObject) -> None:
    """Alternatives and repeats that no log has are tried too."""
    pattern = data.draw(st.sampled_from(PATTERNS))
    text = data.draw(st.from_regex(pattern))
    assert can_match(pattern, text)


def test_few_patterns_are_searched_in_every_log() -> None:
    assert sum(literals(pattern) == UNKNOWN for pattern in PATTERNS) < 10
