"""Dynamo's patches hold while one of our functions is compiled, and no longer."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch._dynamo
import torch._dynamo.callback
from torch._dynamo.variables.optimizer import OptimizerVariable

from zerofx.compat import tracing


def test_what_was_patched_is_put_back_if_a_later_patch_fails():
    look_up = next(
        name for name in ("tp_getattro_impl", "var_getattr") if hasattr(OptimizerVariable, name)
    )
    own = getattr(OptimizerVariable, look_up)
    handler = torch._dynamo.callback.callback_handler
    failing = mock.MagicMock()
    failing.__enter__.side_effect = ImportError("no such name")
    backend = SimpleNamespace()
    with (
        mock.patch.object(tracing, "_backward_past_modes", lambda: failing),
        pytest.raises(ImportError),
        tracing.whole_step_tracing(backend, {}),
    ):
        try:
            handler.start_callbacks[-1](None)
        finally:
            assert getattr(OptimizerVariable, look_up) is not own
            assert torch._dynamo.config.trace_autograd_ops
    assert getattr(OptimizerVariable, look_up) is own
    assert not torch._dynamo.config.trace_autograd_ops
