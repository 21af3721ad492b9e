"""Make ``backend="zero"`` known to torch when the package is run from its checkout.

Plans are made with fixed figures, in the ranks that tests spawn too: nothing is measured, and a
program is the same in every run.  Every program is captured and compiled, whatever earlier tests
have kept.
"""

import logging
import os

import pytest
import torch._dynamo
import torch.distributed as dist

from tests.kit.ranks import forget
from tests.kit.tiers import (  # noqa: F401  # hooks
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_runtest_call,
    pytest_runtest_protocol,
)

os.environ.setdefault("ZEROFX_HARDWARE", "latency_s=2.5e-4 bytes_per_s=1e9")
os.environ.setdefault("ZEROFX_PROGRAM_CACHE", "0")


@pytest.fixture(autouse=True, scope="module")
def nothing_to_collect():
    yield
    assert not dist.is_initialized(), "this file leaves a process group to all later ones"
    forget()


if "zero" not in torch._dynamo.list_backends():
    import zerofx.backend

    torch._dynamo.register_backend(zerofx.backend.zero, name="zero")

torch_trace = logging.getLogger("torch.__trace")


def add_handler(handler: logging.Handler) -> None:
    """Leave out pytest's, which it gives to all loggers that do not propagate.

    Any handler of this one tells torch to trace every compilation, with graphs and stacks: 9% of a
    short training's time.
    """
    if not type(handler).__module__.startswith("_pytest."):
        logging.Logger.addHandler(torch_trace, handler)


torch_trace.addHandler = add_handler  # type: ignore[method-assign]
