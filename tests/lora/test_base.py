"""The digest of a base model: the same for a copy, another for other weights of the same shape."""

from __future__ import annotations

import shutil
from pathlib import Path

from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import write_tiny
from lora.base import fingerprint


def test_a_copy_has_the_same_digest_and_another_seed_does_not(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a", seed=0)
    write_tiny(tmp_path / "b", seed=1)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    digests = [fingerprint(Checkpoint.open(tmp_path / name)) for name in ("a", "b", "moved")]
    assert digests[0] == digests[2] != digests[1]
    assert len(digests[0]) == 64
