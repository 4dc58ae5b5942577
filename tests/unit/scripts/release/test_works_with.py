"""The catalogue's table of models whose weights are sent."""

from scripts.release import render, works_with


def test_each_row_names_a_test_that_exists_or_why_it_is_not_verified() -> None:
    for *_, verified in works_with.rows():
        if not verified.startswith("not verified: "):
            file, _, name = verified.strip("`").partition("::")
            assert f"def {name}(" in works_with.DATA.with_name(file).read_text(encoding="utf-8")


def test_the_page_has_each_row() -> None:
    page = render.page([], {})
    rows = works_with.rows()
    assert any("Mixtral" in row[0] for row in rows)
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
