"""What wheels and source distributions contain: they leave out what git ignores."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in ROOT.rglob("*.py")}
    assert len(folders) > 10
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_git_ignores_no_file_of_the_project() -> None:
    """A line of .gitignore without a slash at its start matches folders everywhere, so also rooms of the package."""
    top = Path(__file__).parents[2]
    if not (top / ".git").exists():
        pytest.skip("the project is not in a git repository")
    command = ["git", "-C", str(top), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    ignored = ["git", "-C", str(top), "check-ignore", "--no-index", "build/any", "dist/any"]
    assert subprocess.run(ignored, capture_output=True, check=False).returncode == 0, (
        "this test can see what git ignores"
    )
