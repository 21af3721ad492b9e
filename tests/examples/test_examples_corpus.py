"""The examples' corpus: its files, its batches over ranks, and the labels of its lines."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path

import pytest
import torch

_PATH = Path(__file__).parents[2] / "examples" / "corpus.py"
_spec = importlib.util.spec_from_file_location("examples_corpus", _PATH)
corpus = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = corpus
_spec.loader.exec_module(corpus)


def labels_of(source: str) -> list[tuple[str, str]]:
    lines = corpus.label_lines(textwrap.dedent(source).lstrip("\n"))
    return [(line, corpus.LABELS[label]) for line, label in lines]


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_files_are_sorted_and_leave_out_tests_and_installed_packages(tmp_path):
    root = write_package(
        tmp_path,
        {
            "b.py": "b",
            "a.py": "a",
            "_sysconfigdata_linux.py": "x",
            "notes.txt": "x",
            "json/decoder.py": "d",
            "json/tests/test_json.py": "x",
            "test/test_a.py": "x",
            "site-packages/pip.py": "x",
        },
    )
    files = corpus.source_files(root)
    assert [str(path.relative_to(root)) for path in files] == ["a.py", "b.py", "json/decoder.py"]


def test_files_of_a_root_below_a_folder_named_test_are_kept(tmp_path):
    root = write_package(tmp_path / "test" / "stdlib", {"a.py": "a"})
    assert corpus.source_files(root) == [root / "a.py"]


def test_size_cap_ends_the_list_of_files(tmp_path):
    root = write_package(tmp_path, {"a.py": "1234", "b.py": "1234", "c.py": "1234"})
    files = corpus.source_files(root, size_cap_bytes=9)
    assert [path.name for path in files] == ["a.py", "b.py"]


def test_a_root_without_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python source under"):
        corpus.source_files(tmp_path)


def test_the_standard_library_is_enough_text_and_within_the_cap():
    files = corpus.source_files()
    total_bytes = sum(path.stat().st_size for path in files)
    assert 3_000_000 < total_bytes <= corpus.SIZE_CAP_BYTES
    assert files == corpus.source_files()


def test_no_file_trains_and_validates():
    files = [Path(f"{i}.py") for i in range(25)]
    train, validation = corpus.split_files(files)
    assert validation == [files[9], files[19]]
    assert set(train) | set(validation) == set(files)
    assert not set(train) & set(validation)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_text_batches_of_all_ranks_are_one_global_batch(world_size):
    data = torch.arange(200, dtype=torch.uint8)
    whole = corpus.text_batches(data, batch=12, seq=16, seed=3)
    parts = [
        corpus.text_batches(data, batch=12, seq=16, rank=r, world_size=world_size, seed=3)
        for r in range(world_size)
    ]
    for expected, *pieces in itertools.islice(zip(whole, *parts, strict=True), 3):
        assert expected.shape == (12, 17)
        assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_training_goes_on_with_the_batch_that_comes_next(world_size):
    data = torch.arange(200, dtype=torch.uint8)
    whole = list(itertools.islice(corpus.text_batches(data, batch=12, seq=16, seed=3), 5))
    parts = [
        corpus.text_batches(data, batch=12, seq=16, rank=r, world_size=world_size, seed=3, start=3)
        for r in range(world_size)
    ]
    for expected in whole[3:]:
        assert torch.equal(torch.cat([next(part) for part in parts]), expected)


def test_text_batches_are_consecutive_bytes_and_reach_both_ends():
    data = torch.arange(10, dtype=torch.uint8)
    batches = list(itertools.islice(corpus.text_batches(data, batch=4, seq=7), 20))
    windows = torch.cat(batches)
    assert torch.equal(windows.diff(dim=1), torch.ones(80, 7, dtype=torch.long))
    assert windows[:, 0].unique().tolist() == [0, 1, 2]


def test_another_seed_draws_other_batches():
    data = torch.arange(200, dtype=torch.uint8)
    first, second = (next(corpus.text_batches(data, batch=8, seq=8, seed=s)) for s in (0, 1))
    assert not torch.equal(first, second)


def test_a_batch_that_does_not_divide_over_ranks_is_refused():
    batches = corpus.text_batches(torch.zeros(99, dtype=torch.uint8), batch=8, seq=4, world_size=3)
    with pytest.raises(ValueError, match="a batch of 8 does not divide over 3 ranks"):
        next(batches)


def test_text_shorter_than_a_window_is_refused():
    batches = corpus.text_batches(torch.zeros(8, dtype=torch.uint8), batch=1, seq=8)
    with pytest.raises(ValueError, match="8 bytes of text hold no window of 9 bytes"):
        next(batches)


def test_labels_docstrings_comments_and_code():
    source = '''
        """Module.

        # not a comment, but the docstring's text
        """
        # a comment
        import os  # not a comment alone

        class A:
            """One line."""

            def f(self):
                """
                >>> x = 1
                """
                return os
    '''
    assert labels_of(source) == [
        ('"""Module.', "docstring"),
        ("# not a comment, but the docstring's text", "docstring"),
        ('"""', "docstring"),
        ("# a comment", "comment"),
        ("import os  # not a comment alone", "code"),
        ("class A:", "code"),
        ('"""One line."""', "docstring"),
        ("def f(self):", "code"),
        ('"""', "docstring"),
        (">>> x = 1", "docstring"),
        ('"""', "docstring"),
        ("return os", "code"),
    ]


def test_any_other_multi_line_string_is_code():
    source = '''
        usage = """
        # looks like a comment
        """
        f(f"""
        # {usage}
        """)
        """A string statement
        that documents nothing."""
    '''
    assert {label for _, label in labels_of(source)} == {"code"}


def test_a_line_shared_with_code_is_code():
    source = '''
        def f(): "short"
        def g():
            """first
            last"""; return 1
        def h():
            """alone"""  # noqa
    '''
    assert labels_of(source) == [
        ('def f(): "short"', "code"),
        ("def g():", "code"),
        ('"""first', "docstring"),
        ('last"""; return 1', "code"),
        ("def h():", "code"),
        ('"""alone"""  # noqa', "docstring"),
    ]


def test_columns_after_characters_beyond_ascii_are_found():
    # ast counts columns in UTF-8 bytes, tokenize in characters.
    source = 'def f(é="ü"): "ß"\ndef g():\n    "é"; "not a docstring"\n    "ééé"\n'
    assert {label for _, label in labels_of(source)} == {"code"}
    assert labels_of('def f():\n    "é" "ü"\n') == [("def f():", "code"), ('"é" "ü"', "docstring")]


def test_a_docstring_in_pieces_keeps_its_label_and_its_comments_theirs():
    source = """
        def f():
            (
                "one "
                # between
                "two"
            )
    """
    assert labels_of(source) == [
        ("def f():", "code"),
        ("(", "code"),
        ('"one "', "docstring"),
        ("# between", "comment"),
        ('"two"', "docstring"),
        (")", "code"),
    ]


def test_form_feeds_and_backslashes_do_not_shift_lines():
    source = "x = 1 + \\\n    2\n\x0c\n# after a form feed\ny = '\u2028'  # one line\n# last\n"
    assert labels_of(source) == [
        ("x = 1 + \\", "code"),
        ("2", "code"),
        ("# after a form feed", "comment"),
        ("y = '\u2028'  # one line", "code"),
        ("# last", "comment"),
    ]


def test_labelled_lines_are_distinct(tmp_path):
    root = write_package(tmp_path, {"a.py": "# c\nx\n", "b.py": '"d"\nx\n# c\n# e\n'})
    lines = corpus.labelled_lines([root / "a.py", root / "b.py"])
    assert lines == {corpus.CODE: ["x"], corpus.COMMENT: ["# c", "# e"], corpus.DOCSTRING: ['"d"']}


def test_every_comment_of_the_standard_library_starts_with_a_hash():
    lines = corpus.labelled_lines(corpus.source_files()[:40])
    assert all(line.startswith("#") for line in lines[corpus.COMMENT])
    assert min(len(of_label) for of_label in lines.values()) > 500


def test_lines_are_encoded_as_bytes_cut_and_padded():
    encoded = corpus.encode_lines(["é", "abcdef"], 4)
    first = corpus.FIRST_BYTE_ID
    assert encoded["input_ids"].tolist() == [
        [corpus.START_ID, 0xC3 + first, 0xA9 + first, corpus.PAD_ID],
        [corpus.START_ID, ord("a") + first, ord("b") + first, ord("c") + first],
    ]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert int(encoded["input_ids"].max()) < corpus.LINE_VOCABULARY


def test_line_batches_of_all_ranks_are_one_global_batch_of_right_labels():
    lines = {label: [f"{name} {i}" for i in range(9)] for label, name in enumerate(corpus.LABELS)}
    whole = corpus.line_batches(lines, batch=12, length=20, seed=5)
    parts = [
        corpus.line_batches(lines, batch=12, length=20, rank=r, world_size=2, seed=5)
        for r in range(2)
    ]
    first_letters = {ord(name[0]) + corpus.FIRST_BYTE_ID for name in corpus.LABELS}
    assert len(first_letters) == 2
    seen = set()
    for expected, *pieces in itertools.islice(zip(whole, *parts, strict=True), 5):
        for key, value in expected.items():
            assert torch.equal(torch.cat([piece[key] for piece in pieces]), value)
        for ids, mask, label in zip(*expected.values(), strict=True):
            text = bytes((ids[1 : mask.sum()] - corpus.FIRST_BYTE_ID).tolist()).decode()
            assert text in lines[int(label)]
            seen.add(int(label))
    assert seen == {0, 1, 2}
