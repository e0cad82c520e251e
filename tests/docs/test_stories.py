"""Each story, copied from its page alone into an empty folder, works as the page prints it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from programs.pasting import all_alike
from support import ROOT
from support.programs import ADDRESS, PYTHON, QUIET, free_port

EXAMPLES, STORIES = ROOT / "examples", ROOT / "docs" / "stories"
PAGES = sorted(path.stem for path in STORIES.glob("*.md"))
ELSEWHERE = {"quickstart.py"}  # of the README
pytestmark = pytest.mark.frameworks

RUN = re.compile(r"^```sh\n(.*?)^```\n+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```\{literalinclude\} \.\./\.\./examples/(\S+)$", re.MULTILINE)


def text(page: str) -> str:
    return (STORIES / f"{page}.md").read_text()


def run(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the commands of a page as a shell runs them in a folder."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    launcher = f"-m torch.distributed.run --local-addr {ADDRESS} --master-addr {ADDRESS}"
    for name, options in {"python": "", "torchrun": f"{launcher} --master-port $PORT"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {PYTHON} {options} "$@"\n')
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", commands],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=folder,
        env=os.environ
        | {"PATH": f"{tools}:{os.environ['PATH']}", "PORT": free_port()}
        | {"PYTHONUNBUFFERED": "1"}
        | QUIET,
    )


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_story_prints_output_of_its_page(page: str, tmp_path: Path) -> None:
    for name in SHOWN.findall(text(page)):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    found = RUN.findall(text(page))
    assert found
    for commands, printed in found:
        done = run(commands, tmp_path)
        assert all_alike(done.stdout, printed), f"{commands}{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_story_opens_with_three_sentences(page: str) -> None:
    opening = text(page).split("\n\n")[1]
    assert len(re.findall(r"[.?](?:\s|$)", opening)) == 3, opening


def test_gallery_has_every_story_and_stories_every_program() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert [page for page in PAGES if f"stories/{page}" not in gallery] == []
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert {name for page in PAGES for name in SHOWN.findall(text(page))} == programs - ELSEWHERE


@pytest.mark.long
def test_readme_quickstart_prints_its_output(tmp_path: Path) -> None:
    done = run(f"python {EXAMPLES / 'quickstart.py'}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same record ids and bytes in 400 batches") == 4
    assert (tmp_path / "quickstart-data" / "quickstart.png").stat().st_size > 10_000


def test_story_refuses_checkpoint_of_another_user(tmp_path: Path) -> None:
    theirs = Path("/usr")
    if os.getuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 65534, -1)
    done = run(f"python {EXAMPLES / 'captions.py'} --out {theirs}", tmp_path)
    assert done.returncode == 1
    assert "another user: name a folder of your own by --out" in done.stderr
