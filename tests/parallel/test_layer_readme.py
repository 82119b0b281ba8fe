"""The layer example of the package's README prints the same on one rank and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "mcore-parallel" / "README.md"


def test_example(tmp_path):
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL) if "dist." in c)
    script = tmp_path / "example.py"
    script.write_text(code)
    one = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True).stdout
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **address, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert re.fullmatch(r"-?\d+\.\d{4}\n", one)
    assert outputs == [one, one]


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
