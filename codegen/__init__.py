"""Optimizer updates as programs: traced from the optimizer's own Python step.

Installed as ``zerofx.codegen``; the top-level folder ``codegen`` is the same files.
"""

if __name__ != "zerofx.codegen":
    raise ImportError(
        f"this package is zerofx.codegen and was imported as {__name__!r}, which would load it "
        "a second time with errors and caches of its own. Write `import zerofx.codegen`."
    )
