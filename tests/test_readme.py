import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_the_code_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code.partition("# after")[2], names)
    assert names["accuracy"].shape == (8, 1)


def test_the_code_of_the_quick_start_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["answers"].shape == (16, 10)
    assert names["report"].model is names["model"]
