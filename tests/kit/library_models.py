"""Small models of libraries that people train with, as they are shipped, and a loss for each.

Nothing is downloaded: weights are drawn, and dropout, which would draw for each rank apart, is off.
They need what ``pip install 'zerofx[libraries]'`` brings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Trained:
    """A model, what draws a batch of it, and its loss."""

    model: nn.Module
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor]


MODELS: dict[str, Callable[[], Trained]] = {}
"""By ``library: model``, what builds it."""


def of(name: str) -> Trained:
    """Build a model with its weights drawn from a seed, in training mode, without dropout."""
    declare_operators()
    torch.manual_seed(0)
    trained = MODELS[name]()
    for module in trained.model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
    trained.model.train()
    return trained


@functools.cache
def declare_operators() -> torch.library.Library | None:
    """Declare the operators of torchvision that importing it needs, where its own are missing.

    They are in a library for one build of torch, and its wheel on PyPI is for the one with CUDA.
    Other libraries import torchvision; no model here computes with these operators.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return library
    return None


STEPS = 3


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do.

    With two, plain torch's own losses of mobilenet_v2 differ by 3% in the third step: sums have
    another order, batch norm makes zeros of some gradients, and Adam takes what is left of them for
    as much as any other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def losses_in_one_process(
    loss_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Callable[[torch.Generator], Batch],
    ranks: int,
    steps: int,
) -> list[list[float]]:
    """Train in plain torch with the mean of all ranks' gradients; return each rank's losses."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        for its, generator in zip(losses, generators, strict=True):
            loss = loss_of(*batch(generator))
            (loss / ranks).backward()
            its.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_compiled(
    loss_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Callable[[torch.Generator], Batch],
    steps: int,
    options: dict[str, Any],
) -> list[float]:
    """Train on this rank of the process group, compiled; return its losses."""

    def step(*values: Any) -> Tensor:
        loss = loss_of(*values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [compiled(*batch(generator)).item() for _ in range(steps)]


def losses_of(name: str, ranks: int) -> list[list[float]]:
    """Return each rank's losses of a model in plain torch, trained with AdamW."""
    loss_of, optimizer, batch = _trained(name)
    return losses_in_one_process(loss_of, optimizer, batch, ranks, STEPS)


def losses_on_a_rank(name: str, options: dict[str, Any]) -> list[float]:
    """Return this rank's losses of a model, compiled, trained with AdamW."""
    return losses_compiled(*_trained(name), STEPS, options)


def losses_with_own_fsdp2(name: str) -> list[float]:
    """Return this rank's losses of a model of torchtitan, sharded as its own trainer does it."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    trained, ranks = of(name), torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    fp32 = torch.float32
    apply_fsdp_to_decoder(trained.model, mesh, fp32, fp32, pp_enabled=False)
    for module in trained.model.modules():
        if isinstance(module, FSDPModule):  # gloo multiplies nothing while it adds
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = trained.loss(trained.model, *trained.batch(generator))
        (loss / ranks).backward()  # it adds gradients up
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trained(name: str) -> tuple[Callable[..., Tensor], torch.optim.Optimizer, Any]:
    trained = of(name)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-3)
    return functools.partial(trained.loss, trained.model), optimizer, trained.batch


def _add(name: str) -> Callable[[Callable[[], Trained]], Callable[[], Trained]]:
    def add(build: Callable[[], Trained]) -> Callable[[], Trained]:
        MODELS[name] = build
        return build

    return add


# Images ------------------------------------------------------------------------------------------


def _images(
    size: int, classes: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 3, size, size, generator=generator)
    return images, torch.randint(classes, (count,), generator=generator)


def _classified(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _timm(architecture: str, size: int = 64, **options: Any) -> Trained:
    import timm

    model = timm.create_model(architecture, num_classes=10, **options)
    return Trained(model, functools.partial(_images, size, 10, 4), _classified)


def _torchvision(architecture: str, size: int = 64, **options: Any) -> Trained:
    from torchvision import models

    model = getattr(models, architecture)(num_classes=10, **options)
    return Trained(model, functools.partial(_images, size, 10, 4), _classified)


for _architecture, _options in {
    "resnet10t": {},
    "convnext_atto": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "edgenext_xx_small": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (1, 1, 2),
        "num_heads": (1, 2, 4),
        "drop_path_rate": 0.0,
    },
    "mixer_s32_224": {"img_size": 64},
}.items():
    _add(f"timm: {_architecture}")(functools.partial(_timm, _architecture, **_options))

for _architecture, _options in {
    "resnet18": {},
    "mobilenet_v2": {"dropout": 0.0},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {"dropout": 0.0},
    "densenet121": {},
}.items():
    _add(f"torchvision: {_architecture}")(
        functools.partial(_torchvision, _architecture, **_options)
    )


@_add("torchvision: VisionTransformer")
def _torchvision_vit() -> Trained:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # it starts at zero
    return Trained(model, functools.partial(_images, 64, 10, 4), _classified)


@_add("torchvision: lraspp_mobilenet_v3_large")
def _segmentation() -> Trained:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(2, 3, 64, 64, generator=generator)
        return images, torch.randint(5, (2, 64, 64), generator=generator)

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images)["out"], labels)

    model = lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=5)
    return Trained(model, batch, loss)


# Diffusion ---------------------------------------------------------------------------------------


def _denoised(
    model: nn.Module, noised: Tensor, times: Tensor, noise: Tensor, *others: Any
) -> Tensor:
    return F.mse_loss(model(noised, times, *others).sample, noise)


def _noised(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    noised = torch.randn(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    return noised, torch.randint(1000, shape[:1], generator=generator), noise


@_add("diffusers: UNet2DModel")
def _unet() -> Trained:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    return Trained(model, functools.partial(_noised, (2, 3, 16, 16)), _denoised)


@_add("diffusers: UNet2DConditionModel")
def _conditional_unet() -> Trained:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=8,
    )

    def batch(generator: torch.Generator) -> Batch:
        prompt = torch.randn(2, 7, 24, generator=generator)
        return *_noised((2, 4, 16, 16), generator), prompt

    return Trained(model, batch, _denoised)


@_add("diffusers: AutoencoderKL")
def _autoencoder() -> Trained:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )

    def batch(generator: torch.Generator) -> Batch:
        return (torch.randn(2, 3, 16, 16, generator=generator),)

    def loss(model: Any, images: Tensor) -> Tensor:
        found = model.encode(images).latent_dist
        return F.mse_loss(model.decode(found.mode()).sample, images) + 1e-4 * found.kl().mean()

    return Trained(model, batch, loss)


@_add("diffusers: DiTTransformer2DModel")
def _dit() -> Trained:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=11,
    )

    def batch(generator: torch.Generator) -> Batch:
        classes = torch.randint(10, (2,), generator=generator)
        return *_noised((2, 4, 8, 8), generator), classes

    # In training it drops a tenth of the classes, by a draw.
    model.transformer_blocks[0].norm1.emb.class_embedder.dropout_prob = 0.0
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return Trained(model, batch, _denoised)


@_add("diffusers: SD3Transformer2DModel")
def _sd3() -> Trained:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
    )

    def batch(generator: torch.Generator) -> Batch:
        noised, times, noise = _noised((2, 4, 8, 8), generator)
        prompt = torch.randn(2, 7, 24, generator=generator)
        return noised, times, noise, prompt, torch.randn(2, 20, generator=generator)

    def loss(
        model: Any, noised: Tensor, times: Tensor, noise: Tensor, prompt: Tensor, pooled: Tensor
    ) -> Tensor:
        return F.mse_loss(model(noised, prompt, pooled, times).sample, noise)

    return Trained(model, batch, loss)


@_add("diffusers: FluxTransformer2DModel")
def _flux() -> Trained:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 4, 8),
    )
    places = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)), -1)

    def batch(generator: torch.Generator) -> Batch:
        noised, _, noise = _noised((2, 16, 4), generator)
        prompt = torch.randn(2, 7, 24, generator=generator)
        pooled = torch.randn(2, 20, generator=generator)
        return noised, torch.rand(2, generator=generator), noise, prompt, pooled

    def loss(
        model: Any, noised: Tensor, times: Tensor, noise: Tensor, prompt: Tensor, pooled: Tensor
    ) -> Tensor:
        found = model(
            hidden_states=noised,
            encoder_hidden_states=prompt,
            pooled_projections=pooled,
            timestep=times,
            img_ids=places.reshape(-1, 3),
            txt_ids=torch.zeros(7, 3),
        )
        return F.mse_loss(found.sample, noise)

    return Trained(model, batch, loss)


# Sentences ---------------------------------------------------------------------------------------


def _sentences() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling
    from transformers import BertConfig, BertModel

    class Encoder(nn.Module):
        """BERT as the library's own module runs it, without a folder to load it from."""

        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=99,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=48,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            found = self.bert(features["input_ids"], attention_mask=features["attention_mask"])
            return {**features, "token_embeddings": found.last_hidden_state}

    return SentenceTransformer(
        modules=[Encoder(), Pooling(24), Dense(24, 16), Normalize()], device="cpu"
    )


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(99, (4, 9), generator=generator)
    lengths = torch.randint(3, 10, (4, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(9) < lengths).long()}


def _sentence_loss(name: str, labels: Callable[[torch.Generator], Tensor | None]) -> Trained:
    from sentence_transformers import losses

    criterion = getattr(losses, name)(_sentences())

    def batch(generator: torch.Generator) -> Batch:
        return [_tokens(generator), _tokens(generator)], labels(generator)

    def loss(criterion: nn.Module, features: list[dict[str, Tensor]], labels: Any) -> Tensor:
        return criterion(map(dict, features), labels)

    return Trained(criterion, batch, loss)


for _name, _labels in {
    "CosineSimilarityLoss": lambda generator: torch.rand(4, generator=generator),
    "MultipleNegativesRankingLoss": lambda generator: None,
}.items():
    _add(f"sentence-transformers: {_name}")(functools.partial(_sentence_loss, _name, _labels))


# Text --------------------------------------------------------------------------------------------


def _text(vocabulary: int, length: int, generator: torch.Generator) -> Batch:
    return (torch.randint(vocabulary, (2, length), generator=generator),)


@_add("x-transformers: AutoregressiveWrapper")
def _x_decoder() -> Trained:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(
        dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, use_rmsnorm=True
    )
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=layers)
    )
    return Trained(model, functools.partial(_text, 99, 16), lambda model, ids: model(ids))


@_add("x-transformers: ALiBi, gated, scaled")
def _x_variants() -> Trained:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(
        dim=32,
        depth=2,
        heads=2,
        attn_dim_head=16,
        alibi_pos_bias=True,
        ff_glu=True,
        attn_qk_norm=True,
        attn_kv_heads=1,
        sandwich_norm=True,
    )
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=layers)
    )
    return Trained(model, functools.partial(_text, 99, 16), lambda model, ids: model(ids))


@_add("x-transformers: XTransformer")
def _x_both() -> Trained:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32,
        enc_num_tokens=99,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=12,
        dec_num_tokens=77,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=12,
    )

    def batch(generator: torch.Generator) -> Batch:
        return *_text(99, 12, generator), *_text(77, 12, generator)

    return Trained(model, batch, lambda model, source, target: model(source, target))


@_add("x-transformers: ViTransformerWrapper")
def _x_vit() -> Trained:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2, attn_dim_head=16)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers)
    return Trained(model, functools.partial(_images, 32, 10, 4), _classified)


def _torchtitan(package: str, configs: str, **options: Any) -> Trained:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = importlib.import_module(f"torchtitan.models.{package}")
    config = getattr(module, configs)["debugmodel"](attn_backend="flex", **options)
    config.layers = config.layers[:2]
    for layer in config.layers:  # flex_attention has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(2048, (2, 33), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_loss(model(ids), labels) / labels.numel()

    return Trained(model, batch, loss)


_add("torchtitan: llama3")(functools.partial(_torchtitan, "llama3", "llama3_configs"))
_add("torchtitan: qwen3")(functools.partial(_torchtitan, "qwen3", "qwen3_configs"))
_add("torchtitan: deepseek_v3")(
    functools.partial(_torchtitan, "deepseek_v3", "deepseekv3_configs", moe_comm_backend="standard")
)
