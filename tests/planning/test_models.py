"""``plan --model``: what a model takes of which there is only a configuration."""

from __future__ import annotations

import json

import pytest

import zerofx.__main__ as command_line
from tests.kit.covering import nightly, only
from zerofx import deferred_init
from zerofx.errors import CommandError
from zerofx.planning import models
from zerofx.planning.models import model_of, shipped

transformers = pytest.importorskip("transformers")

ELEMENTS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "example-gpt": 1_822_080,
    "example-llama": 820_352,
}


@pytest.mark.parametrize("name", only(("llama-3-8b", "example-gpt"), ELEMENTS))
def test_a_shipped_model_has_as_many_parameters_as_its_maker_says(name):
    with deferred_init():
        model = model_of(name)
    assert sum(each.numel() for each in model.parameters()) == ELEMENTS[name]


def test_all_that_is_shipped_is_counted():
    assert sorted(ELEMENTS) == shipped()


@pytest.fixture
def config(tmp_path):
    """``config(**fields)``: the path of a small Llama's configuration, with these fields."""

    def of(**fields):
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
        kind = {"model_type": "llama", "max_position_embeddings": 64}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**kind, **sizes, **heads, **fields}))
        return path

    return of


@pytest.mark.slow(reason="a step of transformers is traced, and four programs are made of it")
def test_a_configuration_is_planned(config, capsys):
    words = ["--model", str(config()), "--sweep", "ranks=2,4", "--tokens", "8"]
    assert command_line.main(["plan", *words]) == 0
    first, second, *_ = (out := capsys.readouterr().out).splitlines()
    for default in ("AdamW", "float32", "bfloat16 autocast", "clipped at 1.0", "8 tokens"):
        assert default in first
    assert second.startswith("training_step on 2, 4 rank(s): 12 parameters, 2992 elements")
    assert "4        3" in out


def test_a_folder_has_one(config):
    path = config(num_hidden_layers=3)
    with deferred_init():
        model = model_of(str(path.parent))
    assert len(model.model.layers) == 3


@pytest.mark.parametrize(
    "name, words",
    [
        ("lama3-8b", "no owner/name of the hub. Name one that comes with .*nearest is llama-3-8b"),
        ("nowhere/config.json", "it is no file"),
        ("", "it is no file"),
    ],
)
def test_a_model_that_is_not_there(name, words, capsys):
    assert command_line.main(["plan", "--model", name, "--ranks", "2"]) == 1
    with pytest.raises(CommandError, match=words):
        model_of(name)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="'owner/qwen3-9b' cannot be had: .*is qwen3-8b"):
        model_of("owner/qwen3-9b")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "JSON"),
        ("[]", "cannot be had"),
        ("{}", "model_type"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        nightly('{"model_type": "clip"}', "of which no training step can be made"),
        ('{"model_type": "llama", "hidden_size": 7}', "hidden"),
        ('{"model_type": "llama", "hidden_size": -8, "num_attention_heads": 2}', "of which"),
    ],
)
def test_a_configuration_that_cannot_be_read(text, words, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CommandError, match=words), deferred_init():
        model_of(str(path))


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(CommandError, match="cannot be had: .*config.json"):
        model_of(str(tmp_path))


@pytest.mark.parametrize("tokens", (65, 1, 0, -3))
def test_a_sequence_that_the_model_does_not_take(config, tokens):
    with pytest.raises(CommandError, match=f"--tokens is {tokens}, .* from 2 to 64"):
        models.call_of_model(str(config()), tokens)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(CommandError, match=r"pip install 'zerofx\[huggingface\]'"):
        model_of("llama-3-8b")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "qwen3-8b", "--ranks", "2", "train.py"], "and not both"),
        (["--model", "qwen3-8b"], "needs --ranks N or --sweep"),
        (["--ranks", "2", "--sweep", "ranks=2", "train.py"], "and not both"),
        (["--tokens", "8", "--ranks", "2", "train.py"], "--tokens is the length"),
        (["--model", "qwen3-8b", "--sweep", "ranks=8,12", "--mesh", "1x8"], "leave 12 out"),
        (["--model", "qwen3-8b", "--ranks", "8", "--mesh", "3x8"], "multiply to the ranks"),
    ],
)
def test_arguments_that_do_not_go_together(words, message, capsys):
    assert command_line.main(["plan", *words]) == 1
    assert message in capsys.readouterr().err
