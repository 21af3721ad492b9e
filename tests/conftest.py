"""Make ``backend="zero"`` known to torch when the package is run from its checkout."""

import torch._dynamo

if "zero" not in torch._dynamo.list_backends():
    import zerofx.backend

    torch._dynamo.register_backend(zerofx.backend.zero, name="zero")
