import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code.partition("# after")[2], names)
    assert names["accuracy"].shape == (8, 1)
