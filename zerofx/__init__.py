"""ZeRO as a compiler: ``torch.compile(step, backend="zero")``.

The backend registers itself; importing this package is only needed for the functions below.
"""

from zerofx.errors import GraphError, StepError
from zerofx.explain import explain
from zerofx.runtime.whole import full_params, unshard

__all__ = ["GraphError", "StepError", "explain", "full_params", "unshard"]
__version__ = "0.1.0"
