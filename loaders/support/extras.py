"""An error that names the extra to install, for each module that an extra brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def requires_extra(what: str, extra: str, /) -> Iterator[None]:
    """Name the extra to install in the error of a failed import in the `with` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "twinfeed"):
            raise
        raise not_installed_error(what, module, extra) from error


def not_installed_error(what: str, module: str, extra: str, /) -> ModuleNotFoundError:
    """Return the error for a module that is not installed; it names the extra to install."""
    problem = f'{what} needs {module}: pip install "twinfeed[{extra}]"'
    return ModuleNotFoundError(problem, name=module)
