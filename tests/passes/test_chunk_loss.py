"""chunk_loss: head and loss in chunks of tokens, with the same sums and no large value."""

import functools
import logging
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.kit.covering import each_pair, nightly, only
from tests.kit.programs import assert_same_numerics, capture, execute, nodes_of, rewritten
from zerofx.ir import ops
from zerofx.ir.aliases import memory_of
from zerofx.ir.graph import is_backward
from zerofx.ir.interface import placeholders
from zerofx.ir.roles import bucket_of, parameter_of
from zerofx.passes.loss.rows import NotByTokensError, Rows, placed, step_of

aten = torch.ops.aten
CLASSES, WIDTH, BATCH, LENGTH = 29, 6, 3, 8
TOKENS = BATCH * LENGTH


class Model(nn.Module):
    def __init__(self, bias: bool = False, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, padding)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x))))


def flat(logits, y, **options):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1), **options)


def focal(logits, y, mask):
    each = flat(logits, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def gathered(logits, y, mask):
    picked = torch.log_softmax(logits.float(), -1).gather(-1, y[..., None]).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def distilled(logits, y, mask):
    teacher = torch.softmax(logits.detach() * 0.5, -1)
    return F.kl_div(F.log_softmax(logits, -1), teacher, reduction="batchmean")


FORMS = {
    "mean": lambda logits, y, mask: flat(logits, y),
    "sum": lambda logits, y, mask: flat(logits, y, reduction="sum") / TOKENS,
    "ignored": lambda logits, y, mask: flat(logits, y, ignore_index=1),
    "weighed": lambda logits, y, mask: flat(logits, y, weight=torch.linspace(0.5, 1, CLASSES)),
    "smoothed": lambda logits, y, mask: flat(logits, y, label_smoothing=0.1, ignore_index=1),
    "probabilities": lambda logits, y, mask: F.cross_entropy(
        logits.view(-1, CLASSES), torch.softmax(logits.detach().view(-1, CLASSES), -1)
    ),
    "masked": lambda logits, y, mask: (
        (flat(logits, y, reduction="none") * mask.view(-1)).sum() / mask.sum()
    ),
    "z loss": lambda logits, y, mask: (
        flat(logits, y) + 1e-2 * torch.logsumexp(logits, -1).square().mean()
    ),
    "softcap": lambda logits, y, mask: flat(30 * torch.tanh(logits / 30), y),
    "scaled": lambda logits, y, mask: flat(logits * 0.5, y) / 4,
    "shifted": lambda logits, y, mask: flat(logits[:, :-1], y[:, 1:]),
    "shifted softcap": lambda logits, y, mask: flat(torch.tanh(logits)[:, :-1], y[:, 1:]),
    "per sequence": lambda logits, y, mask: (
        (flat(logits, y, reduction="none").view(BATCH, LENGTH) * mask).sum(1) / mask.sum(1)
    ).mean(),
    "half of the classes": lambda logits, y, mask: F.cross_entropy(
        logits[..., :20].reshape(-1, 20), y.view(-1) % 20
    ),
    "focal": focal,
    "binary": lambda logits, y, mask: F.binary_cross_entropy_with_logits(
        logits, F.one_hot(y, CLASSES).float()
    ),
    "binary of each": lambda logits, y, mask: (
        F.binary_cross_entropy_with_logits(
            logits, torch.sigmoid(logits.detach()), reduction="none"
        ).mean(-1)
        * mask
    ).mean(),
    "variance": lambda logits, y, mask: flat(logits, y) + 0.1 * logits.var(-1).mean(),
    "gathered": gathered,
    "distilled": distilled,
}


@functools.cache
def language_step(form="mean", bias=False, tied=False, dtype=torch.float32, micro_batches=1):
    torch.manual_seed(0)
    model = Model(bias, tied).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y, mask):
        optimizer.zero_grad()
        for number in range(micro_batches):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            loss = FORMS[form](model(x[rows]), y[rows], mask[rows])
            loss.backward()
        optimizer.step()
        return loss

    shape = micro_batches * BATCH, LENGTH
    inputs = torch.randint(CLASSES, shape), torch.randint(CLASSES, shape), torch.rand(shape)
    return capture(step, *inputs, world_size=2)


def in_chunks(captured, number=3):
    return rewritten(captured, until="chunk_loss", chunk_loss=number)


def in_one(captured):
    return rewritten(captured, until="normalize")


def most_elements(captured) -> int:
    """Of a value that is computed of the batch."""
    values = [n.meta.get("val") for n in captured.graph.nodes if n.op == "call_function"]
    table = {tuple(node.meta["val"].shape) for node in placeholders(captured.graph, "parameter")}
    table |= {shape[::-1] for shape in table}
    return max(
        v.numel() for v in values if isinstance(v, torch.Tensor) and tuple(v.shape) not in table
    )


@pytest.mark.parametrize("form", only(("mean", "masked", "z loss"), FORMS))
def test_every_form_computes_the_same_and_nothing_of_all_tokens(form):
    captured = language_step(form)
    after = in_chunks(captured)
    assert most_elements(in_one(captured)) >= (TOKENS - BATCH) * 20
    assert most_elements(after) <= (TOKENS // 3) * CLASSES
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)


@pytest.mark.parametrize(
    ("form", "number"),
    each_pair(
        ("ignored", "shifted"),
        (2, 5, TOKENS, 1000),
        default=[("ignored", 5), ("shifted", TOKENS)],
    ),
)
def test_any_number_of_chunks(form, number):
    captured = language_step(form, bias=True)
    after = in_chunks(captured, number)
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)


def test_a_tied_head_and_micro_batches():
    captured = language_step("mean", tied=True, micro_batches=2)
    after = in_chunks(captured)
    assert len(nodes_of(after, aten._log_softmax.default)) == 6
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)


@pytest.mark.parametrize("padding", only((3,), (None, 3)))
def test_a_tied_embedding_adds_its_rows_to_the_gradient_of_the_head(padding):
    torch.manual_seed(0)
    model = Model(tied=True, padding=padding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = flat(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    tokens = torch.randint(CLASSES, (BATCH, LENGTH))
    captured = capture(step, torch.where(tokens < 9, 3, tokens), tokens, world_size=2)
    after = in_chunks(captured)
    (rows,) = nodes_of(after, aten.index_put_.default)
    assert not nodes_of(after, aten.embedding_dense_backward.default)
    written = {node.target for node in memory_of(rows.args[0])}
    assert aten.addmm_.default in written and aten.empty.memory_format in written
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)


def test_gradients_of_narrow_weights_are_summed_in_float32():
    after = in_chunks(language_step("mean", dtype=torch.bfloat16))
    sums = [n for n in after.graph.nodes if n.target in (aten.add_.Tensor, aten.addmm_.default)]
    assert sums and {node.meta["val"].dtype for node in sums} == {torch.float32}
    assert {tuple(node.meta["val"].shape) for node in sums} == {(CLASSES, WIDTH)}


def test_sums_of_weights_have_the_memory_of_the_first():
    after = in_chunks(language_step("mean"))
    assert len(nodes_of(after, aten.addmm_.default)) == 3
    assert len(nodes_of(after, aten.empty.memory_format)) == 1


def test_chunks_are_part_of_backward():
    after = in_chunks(language_step("mean"))
    heads = [n for n in after.graph.nodes if "_chunk" in n.name]
    assert len(heads) > 20 and all(map(is_backward, heads))


@pytest.mark.parametrize("number", only((6,), (2, 6)))
def test_a_head_is_gathered_once_and_its_gradient_reduced_once(number):
    options = {"stage": 3, "bucket": False}
    captured = language_step("mean")
    one = rewritten(captured, chunk_loss=0, **options)
    some = rewritten(captured, chunk_loss=number, **options)
    for kind in (ops.all_gather_start, ops.reduce_scatter_start):
        assert len(nodes_of(some, kind)) <= len(nodes_of(one, kind))
    (head,) = (info.index for info in captured.table if info.name == "head.weight")
    for kind in (ops.all_gather_start, ops.reduce_scatter_start):
        assert [parameter_of(node) for node in nodes_of(some, kind)].count(head) == 1


@pytest.mark.parametrize("stage", only((3,), (0, 1, 3)))
def test_ranks_communicate_alike_whether_in_chunks_or_not(stage):
    """Ranks with few tokens may have no chunks; a gradient of parameters alone tells."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = flat(model(x), y) + 0.1 * model.body.weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    inputs = torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH))
    captured = capture(step, *inputs, world_size=2)
    programs = (rewritten(captured, chunk_loss=n, stage=stage, bucket_bytes=100) for n in (0, 3))
    one, some = (
        [
            (node.target, parameter_of(node), bucket_of(node), node.meta["val"].shape)
            for node in program.graph.nodes
            if ops.is_collective(node)
        ]
        for program in programs
    )
    assert one == some


def refusal(step, caplog, *inputs) -> str:
    with caplog.at_level(logging.WARNING, "zerofx"):
        in_chunks(capture(step, *inputs, world_size=2))
    (record,) = [r for r in caplog.records if "chunk_loss" in r.getMessage()]
    return record.getMessage()


def trained(loss_of):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        results = loss_of(model(x), y)
        loss, *others = results if isinstance(results, tuple) else (results,)
        loss.backward()
        optimizer.step()
        return loss, *others

    return step


def transposed(logits, y):
    return F.cross_entropy(logits.transpose(1, 2), y)


def permuted(logits, y):
    return F.cross_entropy(logits.permute(0, 2, 1), y)


def returned(logits, y):
    return flat(logits, y), logits


def root(logits, y):
    return flat(logits, y, reduction="none").square().mean().sqrt()


def dropped(logits, y):
    return flat(F.dropout(logits), y)


def mixed(logits, y):
    return flat(torch.cumsum(logits, 1), y)


REFUSED = {
    transposed: r"it puts tokens behind something else.*flatten\(0, 1\)",
    permuted: r"it puts tokens behind something else.*flatten\(0, 1\)",
    returned: "the step returns what has tokens x vocabulary elements",
    root: "a token's gradient depends on all tokens",
    dropped: "(bernoulli|dropout).*(draws random|is not known)",
    mixed: "cumsum is not known to compute each token by itself",
}


@pytest.mark.parametrize("loss_of", only((transposed, returned, root, mixed), REFUSED))
def test_why_not_is_said_with_the_line(loss_of, caplog):
    inputs = torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH))
    message = refusal(trained(loss_of), caplog, *inputs)
    assert message.startswith("chunk_loss=3: no loss is computed in chunks: ")
    assert re.search(REFUSED[loss_of], message), message
    assert "test_chunk_loss.py:" in message


def test_a_model_without_a_head_is_told_so(caplog):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    assert "no matrix product makes more" in refusal(step, caplog, torch.randn(4, 6))


def test_a_head_with_a_bias_of_two_dimensions_stays_whole(caplog):
    weight, bias = nn.Parameter(torch.randn(6, 20)), nn.Parameter(torch.randn(1, 20))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(torch.addmm(bias, x, weight), y).backward()
        optimizer.step()

    message = refusal(step, caplog, torch.randn(4, 6), torch.randint(20, (4,)))
    assert "a matrix product is of other dimensions" in message


def test_numbers_of_tokens_that_vary_are_told_so(caplog):
    x, y = (torch.randint(CLASSES, (BATCH, LENGTH)) for _ in range(2))
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0)
    message = refusal(trained(lambda logits, y: flat(logits, y)), caplog, x, y)
    assert "the number of tokens varies from call to call" in message


def test_values_of_single_tokens_may_be_read_by_others():
    def loss_of(logits, y):
        each = flat(logits, y, reduction="none")
        return each.mean(), each, logits.argmax(-1)

    inputs = torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH))
    captured = capture(trained(loss_of), *inputs, world_size=2)
    after = in_chunks(captured)
    assert most_elements(after) <= (TOKENS // 3) * CLASSES
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)


@functools.cache
def many_classes(length):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1200, 4), nn.Linear(4, 1200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    inputs = torch.randint(1200, (BATCH, length)), torch.randint(1200, (BATCH, length))
    return capture(step, *inputs, world_size=2)


@pytest.mark.parametrize(
    "length, options, chunks",
    [
        (100, {"bucket_bytes": 1 << 10}, 3),  # of 128 tokens at most
        nightly(10, {"bucket_bytes": 1 << 10}, 1),
        (100, {"bucket_bytes": 1 << 23}, 0),
        (100, {"bucket_bytes": 1 << 23, "chunk_loss": 1}, 3),
        (100, {"bucket_bytes": 1 << 10, "chunk_loss": 0}, 0),
        (100, {"bucket_bytes": 1 << 23, "chunk_loss": 4}, 4),
    ],
)
def test_how_many_chunks_there_are(length, options, chunks):
    after = rewritten(many_classes(length), **options, stage=0)
    assert len([n for n in after.graph.nodes if n.name.startswith("_log_softmax_chunk")]) == chunks


def attack(loss_of, *more, number=3, dtype=torch.float32):
    """Return whether a step computes the same in chunks, and whether it is in any."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y, mask, *more):
        optimizer.zero_grad()
        loss = loss_of(model, x, y, mask, *more)
        loss.backward()
        optimizer.step()
        return loss

    shape = BATCH, LENGTH
    inputs = torch.randint(CLASSES, shape), torch.randint(CLASSES, shape), torch.rand(shape)
    captured = capture(step, *inputs, *more, world_size=2)
    after = in_chunks(captured, number)
    assert_same_numerics(execute(in_one(captured)), execute(after), bitwise=False)
    return any("_chunk" in node.name for node in after.graph.nodes)


def each_of(model, x, y):
    return flat(model(x), y, reduction="none").view(BATCH, LENGTH)


def shaken(model, x, y, mask):
    logits = model(x)
    logits.register_hook(lambda gradient: gradient + 0.01)
    return flat(logits[:, :-1], y[:, 1:])


def weighed_by_teacher(model, x, y, mask):
    with torch.no_grad():
        weight = model(x).flatten(0, 1).amax(-1, keepdim=True).sigmoid()
    target = F.one_hot(y.flatten(), CLASSES).float()
    logits = model(x).flatten(0, 1)
    return F.binary_cross_entropy_with_logits(logits, target, weight=weight)


def of_bits(model, x, y, mask):
    logits = model(x)
    return flat(logits, y) + 1e-9 * logits.detach().view(torch.int32).float().mean()


def infinite_weight(model, x, y, mask):
    weight = torch.ones(CLASSES).index_fill(0, torch.tensor([0]), float("inf"))
    return flat(model(x), y.masked_fill(y == 0, -100), weight=weight)


ATTACKS = {
    "tokens transposed": lambda model, x, y, mask: (each_of(model, x, y).t() * mask.t()).sum(),
    "a matrix permuted by nothing": lambda model, x, y, mask: flat(
        model(x)[:, :CLASSES].flatten(0, 1).permute(0, 1), y[:, :CLASSES]
    ),
    "and dimensions named": lambda model, x, y, mask: (
        each_of(model, x, y).transpose(0, 1) * mask.t()
    ).sum(),
    "gradients shaken before a cut": shaken,
    "weighed by a teacher": weighed_by_teacher,
    "bits": of_bits,
    "an infinite weight": infinite_weight,
    "a square": lambda model, x, y, mask: (
        flat(logits := model(x), y)
        + 1e-3 * (logits.detach().flatten(0, 1).t() @ logits.detach().flatten(0, 1)).mean()
    ),
    "twice": lambda model, x, y, mask: flat(model(x), y) + 0.1 * flat(model(x.flip(1)), y),
    "targets of its own": lambda model, x, y, mask: flat(
        logits := model(x), logits.detach().argmax(-1)
    ),
    "nothing is left": lambda model, x, y, mask: flat(logits := model(x), y) + logits[:, :0].sum(),
    "copies": lambda model, x, y, mask: flat(
        model(x).reshape(-1, 1, CLASSES).expand(-1, 2, -1).reshape(-1, 2, CLASSES)[:, 0], y
    ),
    "a sum of one dimension": lambda model, x, y, mask: (
        each_of(model, x, y).sum(0) * mask[0]
    ).sum(),
}


@pytest.mark.parametrize(
    "form",
    only(("tokens transposed", "gradients shaken before a cut", "weighed by a teacher"), ATTACKS),
)
def test_what_looks_like_single_tokens_is_right_or_left_whole(form):
    attack(ATTACKS[form])


@pytest.mark.parametrize(
    "loss_of",
    (
        nightly(lambda model, x, y, mask, k: flat(model(x) * k, y)),
        nightly(
            lambda model, x, y, mask, k: F.cross_entropy(
                model(x)[..., : k + 5].flatten(0, 1), y.flatten() % (k + 5)
            )
        ),
        lambda model, x, y, mask, k: flat(model(x)[:, :k], y[:, :k]),
        nightly(lambda model, x, y, mask, k: flat(model(x), y, ignore_index=k)),
    ),
)
def test_numbers_that_vary_are_no_obstacle_or_a_reason(loss_of):
    def with_number(model, x, y, mask, k):
        return loss_of(model, x, y, mask, k.shape[0])

    number = torch.zeros(4)
    torch._dynamo.mark_dynamic(number, 0)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y, k):
        optimizer.zero_grad()
        with_number(model, x, y, None, k).backward()
        optimizer.step()

    x, y = (torch.randint(CLASSES, (BATCH, LENGTH)) for _ in range(2))
    rewritten(capture(step, x, y, number, world_size=2), chunk_loss=3, stage=3)


def test_a_dimension_by_name_is_not_taken_for_all():
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.zeros(TOKENS, CLASSES)
    node = graph.call_function(aten.sum.dim_IntList, (source,), {"dim": [1]})
    node.meta["val"] = torch.zeros(TOKENS)
    with pytest.raises(NotByTokensError, match="by name"):
        step_of(node, {source: Rows(0, 1)}, TOKENS)


def test_means_of_half_precision_do_not_overflow():
    captured = language_step("binary", dtype=torch.float16)
    after = in_chunks(captured)
    sums = [n for n in after.graph.nodes if n.name.startswith("binary_cross") and not n.kwargs]
    totals = nodes_of(after, aten.sum.default)
    assert sums and {node.meta["val"].dtype for node in totals} == {torch.float32}


def test_what_fails_leaves_the_program_as_it_was(monkeypatch, caplog):
    captured = language_step("scaled", bias=True)
    whole = execute(in_one(captured))

    def fail(*_arguments):
        raise IndexError("no such dimension")

    monkeypatch.setattr("zerofx.passes.loss.chunk_loss._Chunked._add", fail)
    with caplog.at_level(logging.WARNING, "zerofx"):
        after = in_chunks(captured)
    assert "no such dimension. Please report it." in caplog.text
    assert not any("_chunk" in node.name for node in after.graph.nodes)
    assert_same_numerics(whole, execute(after), bitwise=True)


@pytest.mark.parametrize(
    "shape, tokens, expected",
    [
        ((4, 6, 5), 24, Rows(0, 1)),
        ((24, 5), 24, Rows(0, 1)),
        ((24,), 24, Rows(0, 0)),
        ((24, 1), 24, Rows(0, 1)),
        ((1, 24, 5), 24, Rows(0, 1)),
    ],
)
def test_where_tokens_are_in_a_shape(shape, tokens, expected):
    assert placed(shape, tokens) == expected
