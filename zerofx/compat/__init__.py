"""The only importer of torch's private modules: one module for each part of torch.

A name is for torch 2.11 to 2.15, and goes when torch has a public way, unless it says otherwise.
"""

from zerofx.compat.aot import (
    checkpointed_nodes,
    draws_randomly,
    forget_checkpoints,
    graph_module,
    is_kept_by_policy,
    is_traced,
    list_operators,
    scalar_hint,
    size_hint,
    tag_backward_nodes,
    trace_program,
    trace_to_aten,
)
from zerofx.compat.dynamo import (
    code_being_compiled,
    explain_refusal,
    forget_unless_in_use,
    gradient_assignments,
    guard_identity,
    locals_being_compiled,
    modified_sources,
    owners_looked_into,
    pass_through_dynamo,
    recompile_limit,
    source_name,
    why_not_compiled,
)
from zerofx.compat.inductor import (
    CompiledForAnyLength,
    compile_with_inductor,
    is_higher_order,
    mark_emptied,
    ready_to_run,
)
from zerofx.compat.scalars import (
    DATA_DEPENDENT_ERRORS,
    SYMBOLIC_SCALARS,
    DispatchMode,
    ScalarEnvironment,
    expression,
    guard_sources,
    python_source,
    record_scalar_call,
    set_source_line,
    trace_operations,
    traced_node,
)
from zerofx.compat.tensors import (
    agreement_store,
    fake_tensors,
    has_global_optimizer_hooks,
    is_fake,
    is_held_elsewhere,
    is_memory_shared,
    is_storage_held,
    place_in_file,
    real_tensors,
    storage_key,
    timeout_s,
    without_dispatch_modes,
    without_function_modes,
    without_torch_function,
    world_store,
)
from zerofx.compat.tracing import (
    forward_call_context,
    whole_step_tracing,
)
