"""The public names of the packages, listed once, in __init__.pyi, which editors also read."""

import labkit
import workbook


def test_every_public_name_is_there():
    assert len(labkit.__all__) > 20
    for package in (labkit, workbook):
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert not set(labkit.__all__) & set(workbook.__all__)
