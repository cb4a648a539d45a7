"""Let fairseq 0.12.2 be imported on Python 3.11 and later. Standard library only: Python may run this file at startup.

fairseq gives dataclass fields such defaults as ``CommonConfig()``. Python 3.11 takes a default whose class has no hash
for a mutable one and refuses it, before any --user-dir is read. Here ``dataclasses.dataclass`` leaves fairseq's own
dataclasses hashable by identity, on which fairseq relies.

The commands dsq-train, dsq-preprocess and dsq-generate need no set-up. For the unmodified ``fairseq-train --user-dir
fairseq_plugin``, run once ``python -m fairseq_plugin.startup install``: it writes one .pth file into this environment's
site-packages, by which every later Python applies the change when (and only when) fairseq is imported. ``uninstall``
removes it.
"""

import dataclasses
import functools
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

#: the name of the .pth file, and of this file when Python runs it at startup
HOOK = "dsq_fairseq_startup"

_dataclass = dataclasses.dataclass


@functools.wraps(_dataclass)
def _hashable_dataclass(cls=None, /, **options):
    """``dataclasses.dataclass``, but a class of fairseq's family keeps the hash of ``object``."""
    if cls is None:
        return functools.partial(_hashable_dataclass, **options)
    dataclass = _dataclass(cls, **options)
    if dataclass.__hash__ is None and any(base.__module__.partition(".")[0] == "fairseq" for base in dataclass.__mro__):
        dataclass.__hash__ = object.__hash__
    return dataclass


class _FairseqImport:
    """An import finder that finds no module, but applies the change at the first import of fairseq."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "fairseq":
            apply()
        return None


def apply() -> None:
    """Make fairseq importable in this process."""
    dataclasses.dataclass = _hashable_dataclass  # type: ignore[assignment]
    if _FairseqImport in sys.meta_path:
        sys.meta_path.remove(_FairseqImport)  # type: ignore[arg-type]


def install(site_packages: Path) -> Path:
    """Write the .pth file into ``site_packages``."""
    path = str(Path(__file__).resolve())
    run = f"exec(compile(open({path!r}).read(), {path!r}, 'exec'), {{'__name__': {HOOK!r}}})"
    hook = site_packages / f"{HOOK}.pth"
    hook.write_text(f"import os; os.path.exists({path!r}) and {run}\n")  # a .pth runs lines that begin with import
    return hook


def uninstall(site_packages: Path) -> Path:
    """Remove the file that ``install`` wrote."""
    hook = site_packages / f"{HOOK}.pth"
    hook.unlink(missing_ok=True)
    return hook


def main() -> None:
    """``python -m fairseq_plugin.startup install|uninstall``."""
    actions = {"install": install, "uninstall": uninstall}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        raise SystemExit("usage: python -m fairseq_plugin.startup install|uninstall")
    import sysconfig  # not at every start of Python

    hook = actions[sys.argv[1]](Path(sysconfig.get_path("purelib")))
    print(f"{sys.argv[1]}ed {hook}")


if __name__ == "__main__":
    main()
elif __name__ == HOOK:
    sys.meta_path.insert(0, _FairseqImport)  # type: ignore[arg-type]
