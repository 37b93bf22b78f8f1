import pytest


@pytest.fixture(scope="session")
def nccl_shares():
    """Skip where NCCL refuses two ranks on one GPU; tried once, in processes of its own."""
    from labkit.runtime import nccl_sharing

    if why := nccl_sharing.why_not("cuda:0"):
        pytest.skip(f"needs NCCL with two ranks on a GPU: {why}")
