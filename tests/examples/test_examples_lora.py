"""``examples/finetune_lora.py``, small, as its users start it."""

from __future__ import annotations

import re

import pytest

from tests.kit.torchrun import ROOT, torchrun

SMALL = "--steps=6 --base-steps=6 --layers=1 --width=32 --seq=16 --target-loss=9".split()


@pytest.mark.nightly
def test_adapters_are_trained_saved_loaded_and_merged(tmp_path):
    example = ROOT / "examples" / "finetune_lora.py"
    out = torchrun(example, *SMALL, f"--out={tmp_path}")
    before, after = re.search(r"on prose ([\d.]+), with adapters ([\d.]+)", out).groups()
    assert float(after) < float(before)
    assert f"loaded beside the base: {after}; merged into it: {after}" in out
    adapters = sum(file.stat().st_size for file in (tmp_path / "finetune_lora/adapters").iterdir())
    assert f"{adapters / 1e6:.2f} MB of adapters" in out
