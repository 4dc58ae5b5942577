"""The catalogue's table of models whose weights are sent."""

from scripts.release import certificates, render, works_with

RUNG = "certify: "


def test_each_row_names_a_test_that_exists_or_why_it_is_not_verified() -> None:
    climbed = {
        rung.name
        for certificate in certificates.load()
        for rung in certificate.rungs
        if rung.state == "passed" and not any(machine.fake_gpus for machine in certificate.machines)
    }
    for *_, verified in works_with.rows():
        what = verified.strip("`")
        if what.startswith(RUNG):
            assert what.removeprefix(RUNG) in climbed
        elif not what.startswith("not verified: "):
            file, _, name = what.partition("::")
            assert f"def {name}(" in works_with.DATA.with_name(file).read_text(encoding="utf-8")


def test_the_page_has_each_row() -> None:
    page = render.page([], {})
    rows = works_with.rows()
    assert any("Mixtral" in row[0] for row in rows)
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
