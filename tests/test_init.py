"""The public names of the package, listed once, in __init__.pyi, which editors also read."""

import labkit


def test_every_public_name_is_there():
    assert len(labkit.__all__) > 20
    missing = [name for name in labkit.__all__ if not hasattr(labkit, name)]
    assert missing == []
