"""Sources on a page: a block of code that JupyterLab colours, plain text elsewhere."""

import workbook


def test_a_source_is_a_block_of_code_and_its_name_is_no_markup():
    def local():
        return 7

    shown = workbook.show_source(local)
    assert repr(shown).endswith("    def local():\n        return 7")
    assert "&lt;locals&gt;.local</code>" in shown._repr_markdown_()
    assert "\n\n~~~~python\n    def local():" in shown._repr_markdown_()
