"""The text every example trains on: Python's own standard library, found on every machine.

Files are split into training and validation, never lines or windows, so that no held-out
text has been seen.  Every batch is drawn whole from a seeded generator and then cut by
rank: the ranks' batches, concatenated, are the same at any world size.
"""

from __future__ import annotations

import ast
import io
import itertools
import random
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

# Packages that Linux distributions do not split off into separate downloads.
PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "urllib",
    "xml",
)
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
SIZE_CAP_BYTES = 8_000_000
FILES_PER_VALIDATION_FILE = 10

LABELS = ("code", "comment", "docstring")
CODE, COMMENT, DOCSTRING = range(3)
LAYOUT_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

# Byte b of a line is id b + 2: 0 pads, 1 starts the line (BERT's [CLS]).
PAD_ID, START_ID, FIRST_BYTE_ID = 0, 1, 2
LINE_VOCABULARY = 256 + FIRST_BYTE_ID


def source_files(root: Path | None = None, *, size_cap_bytes: int = SIZE_CAP_BYTES) -> list[Path]:
    """Return the corpus's files: the top level of ``root``, then ``PACKAGES``, each sorted.

    Files are taken in that order until the next would pass the cap.  ``root`` is the
    standard library unless given.

    Raises: FileNotFoundError if there is no Python source under ``root``.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    candidates = sorted(root.glob("*.py"))
    for package in PACKAGES:
        candidates += sorted((root / package).rglob("*.py"))

    files, total_bytes = [], 0
    for path in candidates:
        # _sysconfigdata*.py lists how this machine's Python was built.
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]) or path.name.startswith(
            "_sysconfigdata"
        ):
            continue
        total_bytes += path.stat().st_size
        if total_bytes > size_cap_bytes:
            break
        files.append(path)
    if not files:
        raise FileNotFoundError(
            f"no Python source under {root} within {size_cap_bytes} bytes; "
            "install a Python whose standard library is not zipped"
        )
    return files


def split_files(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return training and validation files: every tenth file validates."""
    last = FILES_PER_VALIDATION_FILE - 1
    train = [path for i, path in enumerate(files) if i % FILES_PER_VALIDATION_FILE != last]
    validation = [path for i, path in enumerate(files) if i % FILES_PER_VALIDATION_FILE == last]
    return train, validation


def read_bytes(files: Sequence[Path]) -> torch.Tensor:
    """Return the files' bytes, concatenated.  Shapes: u8[bytes]."""
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def rank_rows(batch: int, rank: int, world_size: int) -> slice:
    """Return the rows of a global batch that ``rank`` trains on.

    Raises: ValueError if the batch does not divide: gradients are averaged over ranks, so
    ranks of unequal batches would not equal one process on the whole batch.
    """
    if batch % world_size:
        raise ValueError(
            f"a batch of {batch} does not divide over {world_size} ranks; "
            f"use a multiple of {world_size}"
        )
    rows = batch // world_size
    return slice(rank * rows, (rank + 1) * rows)


def text_batches(
    data: torch.Tensor,
    *,
    batch: int,
    seq: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    start: int = 0,
) -> Iterator[torch.Tensor]:
    """Yield, forever, this rank's windows of ``seq + 1`` consecutive bytes.

    The first ``start`` batches, which a training that is resumed has seen, are left out.

    Shapes: i64[batch / world_size, seq + 1]; inputs are ``[:, :-1]``, targets ``[:, 1:]``.
    Raises: ValueError if the batch does not divide or ``data`` is shorter than a window.
    """
    rows = rank_rows(batch, rank, world_size)
    if data.numel() <= seq:
        raise ValueError(f"{data.numel()} bytes of text hold no window of {seq + 1} bytes")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq + 1)
    for number in itertools.count():
        offsets = torch.randint(data.numel() - seq, (batch,), generator=generator)
        if number >= start:
            yield data[offsets[rows, None] + window].long()


def label_lines(source: str) -> list[tuple[str, int]]:
    """Return every line of a Python file that is not blank, stripped, with its label.

    A line is a comment if a comment is all it holds, and a docstring if nothing but a
    docstring is on it (a comment may follow).  All else is code: the inside of any other
    multi-line string too, even where it looks like a comment.

    Raises: SyntaxError or tokenize.TokenError if ``source`` is not valid Python.
    """
    # Not splitlines(), which also cuts at form feeds, where Python's tokenizer does not.
    lines = source.split("\n")
    docstrings = [_token_range(node, lines) for node in _docstring_nodes(ast.parse(source))]

    labels = [CODE] * (len(lines) + 1)
    for (first_row, _), (last_row, _) in docstrings:
        labels[first_row : last_row + 1] = [DOCSTRING] * (last_row + 1 - first_row)

    docstring_ends, docstring_end = dict(docstrings), (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring_end = docstring_ends.get(token.start, docstring_end)
        first_row, last_row = token.start[0], token.end[0]
        if token.type == tokenize.COMMENT:
            if not token.line[: token.start[1]].strip():
                labels[first_row] = COMMENT
        elif token.type not in LAYOUT_TOKENS and token.start >= docstring_end:
            labels[first_row : last_row + 1] = [CODE] * (last_row + 1 - first_row)

    return [
        (line.strip(), label) for line, label in zip(lines, labels[1:], strict=True) if line.strip()
    ]


def _docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].value


def _token_range(node: ast.expr, lines: Sequence[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a node's start and end as ``tokenize`` counts: ``ast`` counts UTF-8 bytes."""

    def characters(row: int, offset_bytes: int) -> int:
        return len(lines[row - 1].encode()[:offset_bytes].decode())

    start = (node.lineno, characters(node.lineno, node.col_offset))
    end = (node.end_lineno, characters(node.end_lineno, node.end_col_offset))
    return start, end


def labelled_lines(files: Sequence[Path]) -> dict[int, list[str]]:
    """Return each label's distinct lines, in order of first appearance.

    Distinct, because accuracy on held-out lines that occur a thousand times (``\"\"\"``,
    ``return None``) would measure memory.
    """
    lines: dict[int, dict[str, None]] = {label: {} for label in range(len(LABELS))}
    for path in files:
        with tokenize.open(path) as file:
            source = file.read()
        for line, label in label_lines(source):
            lines[label][line] = None
    return {label: list(distinct) for label, distinct in lines.items()}


def encode_lines(lines: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    """Return byte-level ids of lines, cut or padded to ``length``, and their attention mask.

    Shapes: ``input_ids`` and ``attention_mask`` are i64[lines, length].
    """
    input_ids = torch.full((len(lines), length), PAD_ID)
    for row, line in zip(input_ids, lines, strict=True):
        encoded = line.encode()[: length - 1]
        row[0] = START_ID
        row[1 : len(encoded) + 1] = torch.tensor(list(encoded)) + FIRST_BYTE_ID
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD_ID).long()}


def line_batches(
    lines: dict[int, list[str]],
    *,
    batch: int,
    length: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield, forever, this rank's labelled lines, each label equally likely.

    Shapes: ``encode_lines``'s with batch / world_size lines, and ``labels`` i64[lines].
    Raises: ValueError if the batch does not divide.
    """
    rows = rank_rows(batch, rank, world_size)
    generator = random.Random(seed)
    while True:
        labels = generator.choices(range(len(LABELS)), k=batch)
        chosen = [generator.choice(lines[label]) for label in labels]
        encoded = encode_lines(chosen[rows], length)
        yield encoded | {"labels": torch.tensor(labels[rows])}
