"""Sources on a page: a block of code that JupyterLab colors, plain text elsewhere."""

from pathlib import Path

import workbook


def test_a_source_is_a_block_of_code_and_its_name_is_no_markup():
    def local():
        return 7

    shown = workbook.show_source(local)
    assert repr(shown).endswith("    def local():\n        return 7")
    assert "&lt;locals&gt;.local</code>" in shown._repr_markdown_()
    assert "\n\n~~~~python\n    def local():" in shown._repr_markdown_()


def test_numbers_are_those_of_the_lines_in_the_file():
    def local():
        return 7

    shown = workbook.show_source(local, numbered=True).text.splitlines()
    lines = Path(__file__).read_text().splitlines()
    assert shown == [f"{n:4}  {lines[n - 1]}" for n in (int(line.split()[0]) for line in shown)]
    assert "return 7" in shown[-1]
