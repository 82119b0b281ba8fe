"""The Python examples of this package's pages run, one after the other as a reader would."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["packages/mcore-models/README.md", "docs/adding-a-model.md"])
def test_examples_run(page):
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    names = {}
    for indent, block in blocks:
        code = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
        exec(compile(code, page, "exec"), names)
    if "back" in names:
        assert all(
            (names["back"][key] == value).all()
            for key, value in names["theirs"].transformer.named_parameters(prefix="transformer")
        )
        assert len(names["new"]) == 8
