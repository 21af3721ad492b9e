"""ZeRO as a compiler: ``torch.compile(step, backend="zero")``.

The backend registers itself; importing this package is only needed for the functions below.
"""

from zerofx.versions import __version__, check_torch_version

check_torch_version()  # first: other versions lack names that the modules below import

from zerofx.checkpoint import (  # noqa: E402
    CheckpointError,
    MismatchError,
    Saving,
    export_safetensors,
    latest,
    load,
    load_safetensors,
    resume,
    save,
)
from zerofx.deferred.block import deferred_init, materialize  # noqa: E402
from zerofx.errors import GraphError, StepError  # noqa: E402
from zerofx.inspecting import explain, named_ranges, profile  # noqa: E402
from zerofx.losses import global_count, local_count, per_rank  # noqa: E402
from zerofx.planning.plan import Plan, plan  # noqa: E402
from zerofx.runtime.access import full_params, unshard  # noqa: E402
from zerofx.uneven import no_data  # noqa: E402

__all__ = [
    "CheckpointError",
    "GraphError",
    "MismatchError",
    "Plan",
    "Saving",
    "StepError",
    "__version__",
    "deferred_init",
    "explain",
    "export_safetensors",
    "full_params",
    "global_count",
    "latest",
    "load",
    "load_safetensors",
    "local_count",
    "materialize",
    "named_ranges",
    "no_data",
    "per_rank",
    "plan",
    "profile",
    "resume",
    "save",
    "unshard",
]
