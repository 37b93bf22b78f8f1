import functools

import pytest


@functools.cache
def why_not_shared():
    """Why NCCL refuses two ranks on one GPU; tried once, in processes of its own."""
    from labkit.runtime import nccl_sharing

    return nccl_sharing.why_not("cuda:0")


@pytest.fixture(autouse=True)
def _nccl_where_it_shares(request):
    """Skip a test over NCCL whose ranks share a GPU where NCCL takes one rank per GPU."""
    given = getattr(request.node, "callspec", None)
    if given is None or given.params.get("transport") != "nccl":
        return
    devices = given.params["devices"].split(",")
    if len(set(devices)) < len(devices) and (why := why_not_shared()):
        pytest.skip(f"needs NCCL with two ranks on a GPU: {why}")
