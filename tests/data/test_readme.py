"""The examples of the package's README run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "mcore-data" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, capsys):
    namespace: dict[str, object] = {}
    exec(compile(EXAMPLES[number], f"{README}[{number}]", "exec"), namespace)
    if number == 0:
        assert capsys.readouterr().out.count("(4, 32)") == 2
    else:
        assert [spec.name for spec in namespace["mcore_tokenizers"]()] == ["MyTokenizer"]
