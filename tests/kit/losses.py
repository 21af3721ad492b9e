"""Forms of losses: right over all ranks, or refused; a small language model to train on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zerofx

CLASSES, WIDTH, LENGTH = 11, 8, 6
ROWS = (3, 1, 2, 4)
"""Of a rank's batch."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def hidden(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return F.gelu(self.up(hidden))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


Batch = dict[str, torch.Tensor]


def batch_of(rank: int, micro_batch: int = 0, masks_all: bool = False) -> Batch:
    """Some rows, of which any number of tokens counts; of rank 1 none if it ``masks_all``."""
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    rows = ROWS[(rank + micro_batch) % len(ROWS)]
    tokens = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    counts = torch.rand(rows, LENGTH, generator=generator) < (0.2 + 0.2 * rank)
    counts[0, 0] = True
    if masks_all and rank == 1:
        counts[:] = False
    targets = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    return {
        "tokens": tokens,
        "labels": targets.masked_fill(~counts, -100),
        "targets": targets,
        "mask": counts.float(),
        "values": torch.randn(rows, LENGTH, CLASSES, generator=generator),
        "rewards": torch.randn(rows, generator=generator),
        "starts": torch.randint(LENGTH, (rows,), generator=generator),
    }


def joined(batches: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def flat(out, b):
    return out.flatten(0, 1), b["labels"].flatten()


def smoothed(out, b):
    """The count that transformers' LabelSmoother divides by."""
    padding = b["labels"] == -100
    each = by_token(out, b).masked_fill(padding, 0.0)
    return each.sum() / (padding.numel() - padding.long().sum())


def shifted(out, b):
    labels = F.pad(b["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(out.view(-1, CLASSES).float(), labels.view(-1), ignore_index=-100)


def by_token(out, b):
    return F.cross_entropy(out.transpose(1, 2), b["targets"], reduction="none")


def masked(out, b):
    return (by_token(out, b) * b["mask"]).sum() / b["mask"].sum()


def z_loss(out, b):
    z = out.logsumexp(-1).square()
    return F.cross_entropy(*flat(out, b)) + 1e-2 * (z * b["mask"]).sum() / b["mask"].sum()


def per_sequence(out, b):
    """The mean over sequences of their own means."""
    return ((by_token(out, b) * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)).mean()


def distilled(out, b):
    teacher = b["values"].softmax(-1)
    each = F.kl_div(out.log_softmax(-1), teacher, reduction="none").sum(-1)
    return 0.5 * masked(out, b) + 0.5 * (each * b["mask"]).sum() / b["mask"].sum()


def policy(out, b):
    log_probs = out.log_softmax(-1).gather(-1, b["targets"][..., None]).squeeze(-1)
    advantages = b["rewards"][:, None]
    return -(log_probs * advantages * b["mask"]).sum() / b["mask"].sum()


def clipped_policy(out, b):
    log_probs = out.log_softmax(-1).gather(-1, b["targets"].unsqueeze(-1))[..., 0]
    ratio = (log_probs - log_probs.detach() + 0.1 * b["rewards"][:, None]).exp()
    advantages = b["rewards"][:, None]
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    return -(surrogate * b["mask"]).sum() / b["mask"].sum()


def mask_made_of_ones(out, b):
    weights = torch.ones(b["labels"].shape).masked_fill(b["labels"] == -100, 0.0)
    return (by_token(out, b) * weights).sum() / weights.sum()


def cut_into_slices(out, b):
    """Rows one after the other, and what is left in one piece."""
    total, count = 0.0, 0.0
    for begin, end in ((0, 1), (1, None)):
        part = {name: value[begin:end] for name, value in b.items() if name != "parameters"}
        weighed = F.layer_norm(out[begin:end], (CLASSES,)) @ torch.eye(CLASSES)
        total = total + (by_token(weighed, part) * part["mask"]).sum()
        count = count + part["mask"].sum()
    return total / count


def sums_from_a_zero(out, b):
    total = torch.tensor(0.0)
    for part in (slice(0, 3), slice(3, 6)):
        total = total + (by_token(out, b)[:, part] * b["mask"][:, part]).sum()
    return total / b["mask"].sum()


def drawn_for_a_part(out, b):
    """Weights of ones that are drawn for each half of the batch, as drop path does."""
    total = 0.0
    for half in by_token(out, b).chunk(2):
        total = total + (half * (torch.rand(half.shape[0], 1) < 2)).sum()
    return total / torch.ones_like(b["mask"]).mul(b["mask"] < 2).sum()


def sorted_and_put_back(out, b):
    """Tokens sorted, as by their experts, and attention behind it."""
    order = b["targets"].flatten().argsort(stable=True)
    sorted_ = (out.flatten(0, 1)[order] * CLASS_WEIGHTS).tanh()
    back = sorted_[order.argsort()].view_as(out)[:, None]
    return masked(F.scaled_dot_product_attention(back, back, back)[:, 0], b)


def labels_moved(out, b):
    labels = torch.full(b["labels"].shape, -100)
    labels[:, :-1] = b["labels"][:, 1:]
    labels[:, -1] = b["targets"][:, 0]
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def preferences(out, b):
    """DPO's: half of a sequence against the other."""
    log_probs = out.log_softmax(-1).gather(-1, b["targets"][..., None]).squeeze(-1)
    return -F.logsigmoid(log_probs[:, :3].sum(1) - log_probs[:, 3:].sum(1)).mean()


def normalised_weights(out, b):
    weights = b["mask"] / b["mask"].mean()
    return (by_token(out, b) * weights).mean()


def multilabel(out, b):
    return F.multilabel_soft_margin_loss(out.mean(1), (b["values"][:, 0] > 0).float())


def span(out, b):
    """BERT's questions and answers: two cross entropies over positions."""
    starts, ends = out[..., 0], out[..., 1]
    both = F.cross_entropy(starts, b["starts"]) + F.cross_entropy(ends, b["starts"])
    return both / 2


def pooled(out, b):
    return F.cross_entropy(out[:, 0], b["targets"][:, 0])


def last_token(out, b):
    rows = torch.arange(out.shape[0])
    return F.cross_entropy(out[rows, b["starts"]], b["targets"][:, 0])


def focal(out, b):
    each = by_token(out, b)
    return ((1 - (-each).exp()).square() * each).mean()


def dice_of_each(out, b):
    p, t = out.sigmoid(), b["values"].sigmoid()
    return (1 - (2 * (p * t).sum((1, 2)) + 1) / (p.sum((1, 2)) + t.sum((1, 2)) + 1)).mean()


def mean_of_a_stack(out, b):
    return torch.stack([F.cross_entropy(*flat(out, b)), F.mse_loss(out, b["values"])]).mean()


def by_class(out, b):
    """The mean over classes of their own means."""
    hot = F.one_hot(b["targets"], CLASSES).float()
    losses = (by_token(out, b)[..., None] * hot).sum((0, 1))
    return (losses / hot.sum((0, 1)).clamp(min=1)).mean()


def pseudo_labels(out, b):
    """Of what the model is sure of, by its own labels, and by all of them."""
    sureness, labels = out.detach().softmax(-1).max(-1)
    each = F.cross_entropy(out.transpose(1, 2), labels, reduction="none")
    sure = sureness > 0.15
    return (each * sure).sum() / sure.sum() + F.cross_entropy(out.flatten(0, 1), labels.flatten())


def experts_in_order(out, b):
    """With a metric beside the loss: how many tokens each has, in order."""
    load = F.one_hot(b["targets"], CLASSES).sum((0, 1))
    return masked(out, b) + 0 * load[load.argsort()].float().detach()[0]


def one_hot(out, b):
    return torch.zeros(out.shape).scatter(2, b["targets"][..., None], 1.0)


def counts_of_two(out, b):
    """Tokens that a mask has weigh as much as those that it has not."""
    mask = b["mask"]
    return (by_token(out, b) / torch.where(mask == 1, mask.sum(), (1 - mask).sum())).sum()


def guarded(out, b):
    count = b["mask"].sum()
    return torch.where(count > 0, (by_token(out, b) * b["mask"]).sum() / count.clamp(min=1), 0.0)


def looked_up_by_label(out, b):
    weights = CLASS_WEIGHTS.index_select(0, b["targets"].flatten())
    return (by_token(out, b).flatten() * weights).mean()


def behind_a_token(out, b):
    token = torch.ones(CLASSES).expand(out.shape[0], 1, CLASSES)
    return F.cross_entropy(torch.cat([token, out], 1)[:, 1:].transpose(1, 2), b["labels"])


def joined_to_what_is_made(out, b):
    labels = torch.cat([b["labels"], torch.full(b["labels"].shape, -100)])
    return F.cross_entropy(torch.cat([out, out]).transpose(1, 2), labels)


CLASS_WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)

RIGHT: dict[str, Callable] = {
    "cross_entropy": lambda out, b: F.cross_entropy(*flat(out, b)),
    "cross_entropy_module": lambda out, b: nn.CrossEntropyLoss()(*flat(out, b)),
    "shifted_labels": shifted,
    "label_smoothing": lambda out, b: F.cross_entropy(*flat(out, b), label_smoothing=0.1),
    "class_weights": lambda out, b: F.cross_entropy(*flat(out, b), weight=CLASS_WEIGHTS),
    "weights_and_smoothing": lambda out, b: F.cross_entropy(
        *flat(out, b), weight=CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "class_probabilities": lambda out, b: F.cross_entropy(
        out.flatten(0, 1), b["values"].softmax(-1).flatten(0, 1)
    ),
    "dense_cross_entropy": lambda out, b: F.cross_entropy(out.transpose(1, 2), b["labels"]),
    "nll_loss": lambda out, b: F.nll_loss(out.log_softmax(-1).flatten(0, 1), flat(out, b)[1]),
    "masked": masked,
    "masked_and_clamped": lambda out, b: (
        (by_token(out, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "masked_with_epsilon": lambda out, b: (
        (by_token(out, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-3)
    ),
    "smoothed": smoothed,
    "inverse_count": lambda out, b: (by_token(out, b) * b["mask"]).sum() * (1 / b["mask"].sum()),
    "counted_labels": lambda out, b: (
        F.cross_entropy(*flat(out, b), reduction="sum") / (b["labels"] != -100).sum()
    ),
    "divided_first": lambda out, b: (by_token(out, b) * b["mask"] / b["mask"].sum()).sum(),
    "ratio_of_means": lambda out, b: (by_token(out, b) * b["mask"]).mean() / b["mask"].mean(),
    "normalised_weights": normalised_weights,
    "per_sequence": per_sequence,
    "z_loss": z_loss,
    "distilled": distilled,
    "policy": policy,
    "clipped_policy": clipped_policy,
    "preferences": preferences,
    "mse": lambda out, b: F.mse_loss(out, b["values"]),
    "weighted_mse": lambda out, b: F.mse_loss(
        out, b["values"], weight=b["mask"][..., None].expand_as(out)
    ),
    "branched": lambda out, b: torch.cond(
        b["mask"].sum() > 0, lambda out: out.square(), lambda out: out.abs(), (out,)
    ).mean(),
    "of_experts_in_order": experts_in_order,
    "weights_of_other_places": lambda out, b: (
        (out[:, :3].square() * torch.ones(3, 1)).sum(2).mean() * torch.tensor(3.0)
    ),
    "scattered_one_hot": lambda out, b: (
        -(one_hot(out, b) * out.log_softmax(-1)).sum(-1).mean(1).mean()
    ),
    "checkpointed": lambda out, b: checkpoint(
        lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()),
        *(out, b["labels"]),
        use_reentrant=False,
    ),
    "mse_by_hand": lambda out, b: (out - b["values"]).square().mean(),
    "mean_of_means": lambda out, b: (out - b["values"]).abs().mean(-1).mean(1).mean(0),
    "mean_over_rows_first": lambda out, b: (out - b["values"]).abs().mean(0).sum(),
    "smooth_l1": lambda out, b: F.smooth_l1_loss(out, b["values"]),
    "huber": lambda out, b: F.huber_loss(out, b["values"]),
    "l1": lambda out, b: F.l1_loss(out, b["values"]),
    "binary": lambda out, b: F.binary_cross_entropy_with_logits(out, b["values"].sigmoid()),
    "binary_of_probabilities": lambda out, b: F.binary_cross_entropy(
        out.sigmoid(), b["values"].sigmoid()
    ),
    "kl_batchmean": lambda out, b: F.kl_div(
        out.log_softmax(-1), b["values"].softmax(-1), reduction="batchmean"
    ),
    "poisson": lambda out, b: F.poisson_nll_loss(out, b["values"].abs()),
    "soft_margin": lambda out, b: F.soft_margin_loss(out, b["values"].sign()),
    "multilabel": multilabel,
    "triplet": lambda out, b: F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2]),
    "ranking": lambda out, b: F.margin_ranking_loss(
        out[:, 0, 0], out[:, 1, 0], b["rewards"].sign()
    ),
    "cosine": lambda out, b: F.cosine_embedding_loss(
        out[:, 0], b["values"][:, 0], b["rewards"].sign()
    ),
    "counts_of_two": counts_of_two,
    "at_least_one": lambda out, b: (
        (by_token(out, b) * b["mask"]).sum() / torch.maximum(b["mask"].sum(), torch.ones(()))
    ),
    "guarded": guarded,
    "looked_up_by_label": looked_up_by_label,
    "behind_a_token": behind_a_token,
    "joined_to_what_is_made": joined_to_what_is_made,
    "span": span,
    "pooled": pooled,
    "last_token": last_token,
    "focal": focal,
    "dice_of_each": dice_of_each,
    "mean_of_a_stack": mean_of_a_stack,
    "by_class": by_class,
    "pseudo_labels": pseudo_labels,
    "mask_made_of_ones": mask_made_of_ones,
    "labels_moved_into_a_constant": labels_moved,
    "cut_into_slices": cut_into_slices,
    "sums_from_a_zero": sums_from_a_zero,
    "drawn_for_a_part": drawn_for_a_part,
    "sorted_and_put_back": sorted_and_put_back,
    "pairs_of_halves": lambda out, b: -F.logsigmoid(out[:, :3] - out[:, 3:]).mean(),
    "with_weight_decay": lambda out, b: (
        F.cross_entropy(*flat(out, b)) + 1e-2 * sum(p.square().sum() for p in b["parameters"])
    ),
}


def balancing(out, b):
    """A mixture of experts' loss: a product of two means over the batch."""
    return F.cross_entropy(*flat(out, b)) + balance(out)


def balance(out):
    shares = out.softmax(-1).flatten(0, 1)
    chosen = F.one_hot(shares.argmax(-1), CLASSES).float()
    return (shares.mean(0) * chosen.mean(0)).sum()


def contrastive(out, b):
    z = F.normalize(out[:, 0], dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(z.shape[0]))


def as_long_as_the_batch(out, b):
    weights = torch.ones(out.shape[0])
    return (by_token(out, b).mean(1) * weights).sum() / weights.sum()


def mask_of_nothing(out, b):
    mask = torch.ones(b["labels"].shape)
    mask[:, :2] = 0
    return (by_token(out, b) * mask).sum() / mask.sum()


def means_of_slices(out, b):
    rows = out.shape[0]
    each = [
        F.cross_entropy(out[at : at + 1].flatten(0, 1), b["labels"][at : at + 1].flatten())
        for at in range(rows)
    ]
    return sum(each) / rows


def hardest_of_the_batch_sorted(out, b):
    each = by_token(out, b).flatten()
    return each[each.detach().argsort(descending=True)][: int(0.7 * each.shape[0])].mean()


def weighed_by_rank(out, b):
    each = by_token(out, b).flatten()
    ranked = each[each.detach().argsort(descending=True)]
    return (ranked * torch.linspace(1, 0, each.shape[0])).mean()


def load_of_experts(out, b):
    """Of as many experts as the batch has rows."""
    experts = out.shape[0]
    gates, chosen = out[..., :experts].softmax(-1).max(-1)
    load = torch.zeros(experts).index_add(0, chosen.flatten(), gates.flatten())
    return masked(out, b) + 0.01 * (load / chosen.numel()).square().sum()


def dice_of_all(out, b):
    p, t = out.sigmoid(), b["values"].sigmoid()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def hardest(out, b):
    each = by_token(out, b).mean(1)
    return each[each.detach().topk(2).indices].mean()


def looked_up(out, b):
    """A batch's items as each other's negatives."""
    scores = out[:, 0]
    return (scores[:, b["starts"]].logsumexp(1) - scores[:, 0]).mean()


def gathered(out, b):
    rows = out.shape[0]
    negatives = out[:, 0].gather(1, b["starts"].expand(rows, -1))
    return (negatives.logsumexp(1) - out[:, 0, 0]).mean()


def written(out, b):
    weights = b["mask"].clone()
    weights[1:] = 0.5
    return (by_token(out, b) * weights).sum() / weights.sum()


def put_together(out, b):
    means = torch.zeros(2)
    means[0] = masked(out, b)
    return masked(out, b) + means.square().sum()


def by_frequency(out, b):
    """Of as many classes as there are tokens in a batch of three rows, of which 18 are."""
    classes = out.shape[0] * LENGTH
    found = torch.zeros(classes).index_add(0, b["targets"].flatten(), torch.ones(classes))
    weights = 1 / (found[:CLASSES] + 1)
    return (by_token(out, b) * weights[b["targets"]]).mean()


REFUSED: dict[str, tuple[Callable, str]] = {
    "balancing": (balancing, "multiplies or divides sums over a batch"),
    "contrastive": (contrastive, "compares samples with one another"),
    "root_of_a_mean": (
        lambda out, b: F.mse_loss(out, b["values"]).sqrt(),
        "computes something that is not linear",
    ),
    "perplexity": (lambda out, b: F.cross_entropy(*flat(out, b)).exp(), "not linear"),
    "hardest": (lambda out, b: by_token(out, b).max(), "takes the max over the samples"),
    "divided_by_a_number": (
        lambda out, b: by_token(out, b).sum() / out.shape[0],
        "divides a sum over the batch by the number",
    ),
    "divided_by_a_count_and_the_length": (
        lambda out, b: masked(out, b) + by_token(out, b).sum() / (b["mask"].sum() + out.shape[0]),
        "adds the number 3 to a count of the batch or subtracts it",
    ),
    "divided_by_a_count_and_a_constant_of_the_length": (
        lambda out, b: (
            by_token(out, b).sum() / (b["mask"].sum() + torch.tensor(float(out.shape[0])))
        ),
        "adds a number that is made of the batch's length to a count",
    ),
    "variance": (lambda out, b: out[..., 0].var(), "takes the var over the samples"),
    "covariance": (
        lambda out, b: (out[:, 0].T @ out[:, 0]).square().sum(),
        "multiplies|not linear",
    ),
    "dice_of_all": (dice_of_all, "multiplies or divides sums over a batch"),
    "clamped": (lambda out, b: F.cross_entropy(*flat(out, b)).clamp(max=1.0), "not linear"),
    "scaled_by_its_count": (
        lambda out, b: F.cross_entropy(*flat(out, b)) * b["mask"].sum() / 9,
        "uses a count of the batch other than to divide",
    ),
    "looked_up_of_what_is_normalised_by_the_batch": (
        lambda out, b: masked(out / out.std(), b) + policy(out / out.std(), b),
        "takes the std over the samples|takes the var over the samples",
    ),
    "rms_of_the_batch": (lambda out, b: by_token(out, b).norm(), "over the samples"),
    "divided_by_a_number_before_the_sum": (
        lambda out, b: (by_token(out, b) / out.shape[0]).sum(),
        "divides a sum over the batch by the number 3",
    ),
    "hardest_by_their_places": (hardest, "takes samples that others decide on"),
    "hardest_of_the_sorted": (
        lambda out, b: by_token(out, b).flatten()[by_token(out, b).flatten().argsort()[:4]].mean(),
        "takes samples that others decide on",
    ),
    "negatives_rolled": (
        lambda out, b: F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2].roll(1, 0)),
        "mixes the samples",
    ),
    "negatives_flipped": (
        lambda out, b: F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2].flip(0)),
        "mixes the samples",
    ),
    "negatives_of_all_dimensions_rolled": (
        lambda out, b: (out - out.roll(1)).square().mean(),
        "mixes the samples",
    ),
    "distances": (
        lambda out, b: F.cross_entropy(
            -torch.cdist(out[:, 0], out[:, 1]), torch.arange(out.shape[0])
        ),
        "mixes the samples|compares samples",
    ),
    "kernel_of_distances": (
        lambda out, b: (-torch.cdist(out[:, 0], b["values"][:, 0]).square()).exp().mean(),
        "mixes the samples|compares samples",
    ),
    "neighbours": (
        lambda out, b: (out[1:] - out[:-1]).square().mean(),
        "compares samples with one another",
    ),
    "neighbours_behind_more": (
        lambda out, b: (
            (out[1:].softmax(-1) @ torch.ones(CLASSES, 2))
            .sub(F.layer_norm(out[:-1], (CLASSES,))[..., :2])
            .square()
            .mean()
        ),
        "compares samples with one another",
    ),
    "pairs_by_a_fused_loss": (
        lambda out, b: F.mse_loss(
            out[:, None, 0].expand(-1, out.shape[0], -1), out[None, :, 0].expand_as(out[:, :3])
        ),
        "compares samples with one another",
    ),
    "divided_by_a_number_and_masked": (
        lambda out, b: (by_token(out, b) / out.shape[0]).masked_fill(b["mask"] == 0, 0.0).sum(),
        "divides a sum over the batch by the number 3",
    ),
    "divided_by_a_number_and_stacked": (
        lambda out, b: torch.stack([by_token(out, b) / 3, by_token(out, b) / 3]).sum(),
        "divides a sum over the batch by the number 3",
    ),
    "divided_by_a_number_beside_what_a_count_divides": (
        lambda out, b: (
            by_token(out, b) * b["mask"] / b["mask"].sum() + by_token(out, b) / 3
        ).sum(),
        "divides a sum over the batch by the number 3",
    ),
    "weights_as_long_as_the_batch": (
        as_long_as_the_batch,
        "scales a sum over the batch by what is made as long as the batch, and not of it",
    ),
    "mask_of_nothing": (mask_of_nothing, "what is made as long as the batch, and not of it"),
    "divided_by_a_tensor_of_the_length": (
        lambda out, b: by_token(out, b).sum() / torch.full((), float(out.shape[0])),
        "by a number that is made of the batch's length",
    ),
    "multiplied_with_a_constant_of_the_length": (
        lambda out, b: by_token(out, b).sum() * torch.tensor(1 / out.shape[0]),
        "by a number that is made of the batch's length",
    ),
    "divided_by_a_constant_of_the_length": (
        lambda out, b: by_token(out, b).sum() / torch.tensor(float(out.shape[0])),
        "by a number that is made of the batch's length",
    ),
    "means_of_slices": (means_of_slices, "adds up means of slices of one batch"),
    "hardest_of_the_batch_sorted": (
        hardest_of_the_batch_sorted,
        "takes samples that others decide on",
    ),
    "weighed_by_rank": (weighed_by_rank, "takes samples that others decide on"),
    "load_of_experts": (load_of_experts, "adds up samples by their values"),
    "anchor": (lambda out, b: (out[1:] - out[:1]).square().mean(), "compares samples"),
    "negatives_looked_up": (looked_up, "compares samples with one another"),
    "negatives_gathered": (gathered, "compares samples with one another"),
    "spectrum": (lambda out, b: torch.fft.fft(out, dim=0).abs().mean(), "mixes the samples"),
    "written_to_some": (written, "writes to a part of the batch"),
    "put_together_of_means": (put_together, "not linear|other than to divide"),
    "weighted_by_frequencies": (by_frequency, "adds up samples by their values"),
}


# What users say.


def balanced_by_rank(out, b):
    """By a count that the user gives, of which the part for each rank has its own too."""
    count = zerofx.local_count(b["mask"].sum())
    by_rank = zerofx.per_rank(balance(out) + (out.square().sum(-1) * b["mask"]).sum() / count)
    return masked(out, b) + (by_token(out, b) * b["mask"]).sum() / count + by_rank


def balanced_by_two(out, b):
    """The same in one process that has the rows of two ranks."""
    by_rank = [
        balance(part) + (part.square().sum(-1) * mask).sum() / mask.sum()
        for part, mask in zip(out.split(ROWS[:2]), b["mask"].split(ROWS[:2]), strict=True)
    ]
    return 2 * masked(out, b) + sum(by_rank) / 2


BY_RANK = {form.__name__: form for form in (balanced_by_rank, balanced_by_two)}


def given_locally(out, b):
    total = F.cross_entropy(*flat(out, b), reduction="sum")
    return total / zerofx.local_count((b["labels"] != -100).sum())


LABELS_OF_TWO = sum((batch_of(rank)["labels"] != -100).sum().item() for rank in range(2))


def given_globally(out, b):
    total = F.cross_entropy(*flat(out, b), reduction="sum")
    return total / zerofx.global_count(LABELS_OF_TWO)


def given_and_moved(out, b):
    total = F.cross_entropy(*flat(out, b), reduction="sum")
    return total / zerofx.local_count((b["labels"] != -100).sum()).to(torch.float32)


def given_globally_and_bounded(out, b):
    total = F.cross_entropy(*flat(out, b), reduction="sum")
    number = torch.tensor(LABELS_OF_TWO)  # a constant of the traced program
    return total / zerofx.global_count(number).clamp(min=1)


def given_both_ways(out, b):
    total = F.cross_entropy(*flat(out, b), reduction="sum")
    mine = zerofx.local_count((b["labels"] != -100).sum())
    return total / (mine + zerofx.global_count(LABELS_OF_TWO))


def given_globally_for_a_mean(out, b):
    count = (b["labels"] != -100).sum()
    return F.cross_entropy(*flat(out, b)) * count / zerofx.global_count(LABELS_OF_TWO)


def given_locally_for_weights(out, b):
    total = (by_token(out, b) * b["mask"] / b["mask"].mean()).sum()
    return total / zerofx.local_count(b["mask"].numel())


GIVEN = (
    *(given_locally, given_globally, given_and_moved, given_globally_and_bounded),
    given_globally_for_a_mean,
)

RIGHT |= {given.__name__: given for given in (*GIVEN, given_locally_for_weights)}


def train(form: str, batches: list[list[Batch]], options: dict | None, clips: bool = False):
    """Return losses, and parameters, of one call for each list of micro-batches."""
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_of = RIGHT.get(form) or BY_RANK.get(form) or REFUSED[form][0]

    def step(micro_batches):
        optimizer.zero_grad()
        total = 0.0
        for batch in micro_batches:
            batch["parameters"] = list(model.parameters()) if form == "with_weight_decay" else []
            loss = loss_of(model(batch["tokens"]), batch) / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
        if clips:
            clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return total

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    losses = [step(micro_batches).item() for micro_batches in batches]
    with zerofx.full_params(model):
        return losses, [p.detach().clone() for p in model.parameters()]


def train_on_rank(
    form, options, micro_batches=1, clips=False, masks_all=False, calls=2, is_resized=False
):
    given = _given([dist.get_rank()], micro_batches, masks_all, calls, is_resized)
    return train(form, given, {"loss": "global", **options}, clips)


def train_alone(
    form, world_size, micro_batches=1, clips=False, masks_all=False, calls=2, is_resized=False
):
    given = _given(range(world_size), micro_batches, masks_all, calls, is_resized)
    return train(form, [[joined(batches)] for batches in given], None, clips)


def _given(ranks, micro_batches, masks_all, calls, is_resized) -> list[list[Batch]]:
    """Return each call's batches; they have the rows of the first's unless ``is_resized``."""
    further = 3 if is_resized else len(ROWS)
    return [
        [
            batch_of(rank, m + further * call, masks_all)
            for rank in ranks
            for m in range(micro_batches)
        ]
        for call in range(calls)
    ]


def check(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
