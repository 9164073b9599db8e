"""Checks of the Python environment that must pass before anything is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from engine.errors import KvtideError


def refuse_foreign_kernels() -> None:
    """Raise KvtideError when Hugging Face's distribution `kernels` is installed beside ours.

    Both install a top-level package of that name, and pip lets the later one overwrite files of the earlier one in
    silence, so nothing that we would import from it can be trusted.
    """
    try:
        found = version("kernels")
    except PackageNotFoundError:
        return
    raise KvtideError(
        f"the distribution 'kernels' {found} is installed; it and kvtide use the same import name. "
        "Run: pip uninstall -y kernels && pip install --force-reinstall --no-deps kvtide"
    )
