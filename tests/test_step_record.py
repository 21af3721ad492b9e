"""Records survive their files, and what is no record of this version is refused with words."""

import json

import pytest

from tests.records import MIB, empty, large, node, nothing, small
from zerofx.errors import CommandError
from zerofx.report.timeline.record import Busy, StepRecord, read


@pytest.mark.parametrize("record", (small, empty, nothing, lambda: small("größe </script>")))
def test_a_record_is_what_its_file_says(record, tmp_path):
    path = tmp_path / "00.timeline.json"
    path.write_text(record().to_json(), encoding="utf-8")
    assert read(path) == record()


def test_kinds_add_up_to_the_total():
    record = small()
    assert list(record.alive()) == [
        "parameters", "gathered parameters", "activations", "temporaries",
    ]  # fmt: skip
    assert record.total() == [size * MIB for size in (6, 6, 14, 16, 2)]
    assert record.alive("host") == {} and record.total("host") == [0] * 5


def test_what_is_in_memory_comes_largest_first():
    sizes = [(piece.kind, piece.nbytes // MIB) for piece in small().alive_at(3)]
    assert sizes == [("activations", 8), ("temporaries", 6), ("parameters", 2)]


def test_only_lanes_with_work_are_listed():
    assert small().lanes == ("compute", "waiting", "link")
    assert nothing().lanes == ("compute",)


def test_a_step_ends_with_its_last_lane():
    late = Busy(4, "files", 3e-3, 5e-3, 1)
    record = small(spans=(*small().spans, late))
    assert (small().end_s, record.end_s, record.step_s) == (3e-3, 5e-3, 3e-3)


def test_many_parameters_are_cut_short():
    record = small(parameters=("a", "b", "c", "d", "e"))
    about = node("n", 0.0, bucket=4, parameters=(0, 1, 2, 3, 4))
    assert record.for_whom(about) == "bucket 4: a, b, c and 2 more"
    assert record.for_whom(node("n", 0.0, bucket=4)) == "bucket 4"
    assert record.for_whom(node("n", 0.0)) == ""


def test_a_string_is_stored_once():
    text = large(2000).to_json()
    assert text.count("y = f(x)") == 97
    assert len(text) < 250_000


def damaged(**changes) -> str:
    document = json.loads(small().to_json())
    document.update(changes)
    return json.dumps(document)


def with_column(table: str, column: str, row: int, value: object) -> str:
    document = json.loads(small().to_json())
    document[table][column][row] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "is no zerofx timeline"),
        ('{"format": "something else"}', "is no zerofx timeline"),
        (damaged(version=2), "is of version 2, and this zerofx reads version 1"),
        (damaged(version=None), "is of version None"),
        (damaged(nodes={}), "is damaged (KeyError"),
        (damaged(texts=[]), "0 is no position among 0"),
        (damaged(memory=[]), "is damaged (TypeError"),
        (damaged(compute_s="long"), "is damaged (ValueError: 'long' is no time"),
        (with_column("spans", "node", 0, 5), "5 is no position among 5"),
        (with_column("spans", "end_s", 0, -1.0), "-1.0 is no time"),
        (with_column("spans", "end_s", 0, float("nan")), "nan is no time"),
        (with_column("spans", "lane", 0, 0), "no lane is called 'gather_w'"),
        (with_column("memory", "end", 0, 99), "99 is no position among 5"),
        (with_column("memory", "kind", 0, 0), "no memory of the device is called 'gather_w'"),
        (with_column("nodes", "parameters", 0, [7]), "7 is no position among 1"),
        (with_column("nodes", "waits_for", 0, -2), "-2 is no position among 5"),
        (with_column("nodes", "name", 0, -1), "-1 is no position among"),
    ],
)
def test_what_is_no_record_is_refused_with_the_remedy(text, words, tmp_path):
    path = tmp_path / "09_prefetch.timeline.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError) as refused:
        read(path)
    assert str(refused.value).startswith(str(path)) and words in str(refused.value)
    assert "Dump the program again" in str(refused.value)


def test_a_column_that_is_too_short_is_refused():
    document = json.loads(small().to_json())
    document["nodes"]["name"].pop()
    with pytest.raises(CommandError, match="is damaged"):
        StepRecord.from_json(json.dumps(document))


def test_what_is_not_text_is_refused(tmp_path):
    path = tmp_path / "00.timeline.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommandError, match="is not text"):
        read(path)
