"""A line that cannot be traced is told first, with the reason and a remedy; torch's words after."""

from __future__ import annotations

import copy
import datetime
import json
import logging
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.data import DataLoader, TensorDataset

from zerofx.capture.refusals import WHOLE, explained

LOCK = threading.Lock()
SEEN: list = []


def prints(model, optimizer, x, loss):
    print(loss)


def reads_a_number(model, optimizer, x, loss):
    SEEN.append(loss.item())


def makes_a_number(model, optimizer, x, loss):
    return range(int(loss))


def makes_a_list(model, optimizer, x, loss):
    return loss.tolist()


def decides(model, optimizer, x, loss):
    if loss > 0:
        SEEN.clear()


def looks_for_nan(model, optimizer, x, loss):
    if torch.isnan(loss).any():
        raise ValueError("not a number")


def repeats(model, optimizer, x, loss):
    while loss > 1:
        loss = loss / 2


def chooses_rows(model, optimizer, x, loss):
    return x[x > 0].sum()


def aligns(model, optimizer, x, loss):
    nn.functional.ctc_loss(x.log_softmax(-1)[:, None], torch.ones(1, 2).int(), (4,), (2,))


def counts(model, optimizer, x, loss):
    torch.bincount(x.argmax(-1), minlength=4)


NORM = nn.BatchNorm1d(4, momentum=None)


def averages(model, optimizer, x, loss):
    NORM(x)


def locks(model, optimizer, x, loss):
    with LOCK:
        return loss


def debugs(model, optimizer, x, loss):
    breakpoint()


def writes(model, optimizer, x, loss):
    with open("log", "a") as log:
        log.write("loss")


def evaluates_text(model, optimizer, x, loss):
    return eval("loss")


def loads_data(model, optimizer, x, loss):
    for (batch,) in DataLoader(TensorDataset(x), batch_size=2):
        loss = loss + batch.sum()


def schedules(model, optimizer, x, loss):
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()


def saves(model, optimizer, x, loss):
    torch.save(model.state_dict(), "model.pt")


def adds_a_hook(model, optimizer, x, loss):
    model.register_full_backward_hook(lambda *_: None)


def copies(model, optimizer, x, loss):
    copy.deepcopy(model)


def warns(model, optimizer, x, loss):
    warnings.warn("look", stacklevel=1)


def gets_a_logger(model, optimizer, x, loss):
    logging.getLogger("mine").info("loss")


def reads_the_clock(model, optimizer, x, loss):
    SEEN.append(time.time())


def reads_the_date(model, optimizer, x, loss):
    SEEN.append(datetime.datetime.now())


def makes_a_generator(model, optimizer, x, loss):
    return torch.randn(1, generator=torch.Generator())


def shows_progress(model, optimizer, x, loss):
    from tqdm import tqdm

    for _ in tqdm(range(2)):
        pass


def reduces(model, optimizer, x, loss):
    torch.distributed.all_reduce(loss)


def gathers(model, optimizer, x, loss):
    torch.cat(torch.distributed.nn.functional.all_gather(model(x)))


def perturbs(model, optimizer, x, loss):
    torch.zeros_like(x, requires_grad=True)


def steps_with_a_closure(model, optimizer, x, loss):
    torch.optim.LBFGS(model.parameters()).step(lambda: model(x).sum())


def dumps(model, optimizer, x, loss):
    json.dumps({"loss": 1})


CAUSES = {
    prints: ("It prints", "after the call"),
    reads_a_number: ("reads a tensor's value", "Return the value from the step"),
    makes_a_number: ("reads a tensor's value", "stays a tensor"),
    makes_a_list: ("reads a tensor's value", "Return the value from the step"),
    decides: ("decides by a tensor's value", "torch.where"),
    looks_for_nan: ("decides by a tensor's value", "after the call"),
    repeats: ("decides by a tensor's value", "torch.where"),
    chooses_rows: ("size of its result depends", "multiply by the mask"),
    aligns: ("CTC", "another loss"),
    counts: ("torch.bincount", "F.one_hot"),
    averages: ("momentum=None", "as a number"),
    locks: ("takes a lock", "before the first call"),
    debugs: ("debugger", "without torch.compile"),
    writes: ("opens a file", "out of the step"),
    evaluates_text: ("runs text as code", "before the call"),
    loads_data: ("data loader", "around the step"),
    schedules: ("learning rate scheduler", "scheduler.step() after the compiled step"),
    saves: ("saves or loads", "zerofx.save"),
    adds_a_hook: ("adds a hook", "Add it once"),
    copies: ("copy.deepcopy", "before the first call"),
    warns: ("It warns", "filterwarnings"),
    gets_a_logger: ("logger", "when the module is imported"),
    reads_the_clock: ("reads the clock", "around the call"),
    reads_the_date: ("reads the clock", "around the call"),
    makes_a_generator: ("random generator", "manual_seed"),
    shows_progress: ("reports progress", "after the call"),
    reduces: ("communicates between ranks", "averaged without it"),
    gathers: ("torch.distributed.nn.functional", "all_gather_tensor_autograd(features, 0"),
    perturbs: ("requires a gradient", "zeros_like(x).requires_grad_()"),
    steps_with_a_closure: ("closure", "LBFGS is not supported"),
    dumps: ("format of files", "out of the step"),
}


def refusal(does) -> str:
    torch._dynamo.reset()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        does(model, optimizer, x, loss)
        loss.backward()
        optimizer.step()

    options = {"lowering": "eager", "stage": 0}
    with pytest.raises(Unsupported) as told:
        torch.compile(step, backend="zero", options=options)(torch.randn(4, 4))
    return str(told.value)


@pytest.mark.parametrize("does", CAUSES, ids=lambda does: does.__name__)
def test_the_line_the_reason_and_the_remedy_come_first(does):
    message = refusal(does)
    head, _, torchs = message.partition("\n\nWhat torch says of it:\n")
    first, place, *others = head.splitlines()
    assert first == f"{WHOLE}:"
    assert place.lstrip().startswith(__file__) and f"in {does.__name__}: " in place
    reason, remedy = CAUSES[does]
    assert reason in others[-1] and remedy in others[-1]
    assert "issue" not in head and "Explanation" in torchs


def test_a_line_of_a_library_is_told_with_the_users():
    head = refusal(loads_data).partition("What torch says")[0]
    assert "in loads_data: for (batch,) in DataLoader" in head
    assert "site-packages" in head.splitlines()[2]


def test_other_causes_are_told_with_torchs_reason_and_advice():
    said = "Something new\n  Explanation: nobody knows `print`s\n  Hint: call torch.save\n"
    message = explained(said, " Its optimizer is wrapped.")
    assert "Move it out of the step" in message and "Its optimizer is wrapped." in message
    assert message.endswith(said) and explained(message, "") == message
