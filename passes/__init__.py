"""The rewrites that turn a captured training step into a ZeRO program, one file per pass.

Installed as ``zerofx.passes``; the top-level folder ``passes`` is the same files.
"""

if __name__ != "zerofx.passes":
    raise ImportError(
        f"this package is zerofx.passes and was imported as {__name__!r}, which would register "
        "every pass a second time. Write `import zerofx.passes`."
    )
