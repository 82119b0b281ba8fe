"""The optimizer example of the package's README runs, and does what its text says."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "mcore-parallel" / "README.md"


def test_example(capsys):
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
        if "build_optimizer" in code
    )
    namespace: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), namespace)
    first, last = (float(number) for number in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert first == 5.66
    assert last < 0.7 * first
