"""Make the package's description, which setup.cfg cannot: the README without what leads nowhere."""

import re
from pathlib import Path

from setuptools import setup

# Outside of the repository, the README's pictures and links to files would lead nowhere.
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", readme)
readme = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)
security = Path(__file__).with_name("SECURITY.md").read_text(encoding="utf-8")
setup(long_description=readme + "\n" + security[security.index("## How to report") :])
