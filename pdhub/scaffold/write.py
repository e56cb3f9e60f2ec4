"""Write a plugin package from the templates beside this module.

``templates/common`` and ``templates/KIND`` are laid over each other. ``PACKAGE`` in a path and ``@WORD@`` in a file
are replaced; the suffix ``.tmpl`` keeps tools from taking the templates for code.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from pdhub import __version__
from pdhub.api.errors import ConfigError
from pdhub.scaffold.names import Names, check_name

KINDS = ("engine", "transport", "policy")


def write(kind: str, name: str, directory: Path) -> Path:
    """Write ``directory/pdhub-NAME`` and return it.

    Args:
        kind: one of :data:`KINDS`.
        name: as YAML's ``type:`` will say.
        directory: made if it is missing.

    Raises:
        ConfigError: an impossible or taken name, or the target exists. Nothing is left behind.
    """
    names = check_name(kind, name)
    target = directory.expanduser() / names.distribution
    if target.exists():
        raise ConfigError(f"{target} exists already", hint="remove it, or give another name or --dir")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{names.distribution}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {target.parent}: {error.strerror}", hint="give another --dir") from None
    try:
        for part in ("common", kind):
            _copy(files("pdhub.scaffold") / "templates" / part, staging, _words(kind, names))
        staging.chmod(0o755)
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def _words(kind: str, names: Names) -> dict[str, str]:
    major, minor = (int(part) for part in __version__.split(".")[:2])
    return {
        "KIND": kind,
        "NAME": names.name,
        "DISTRIBUTION": names.distribution,
        "PACKAGE": names.package,
        "CLASS": names.camel,
        "VERSION": __version__,
        "NEXT": f"{major}.{minor + 1}" if major == 0 else f"{major + 1}",
    }


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    for item in source.iterdir():
        place = target / item.name.replace("PACKAGE", words["PACKAGE"]).removesuffix(".tmpl")
        if item.is_dir():
            place.mkdir(exist_ok=True)
            _copy(item, place, words)
        elif item.name.endswith(".tmpl"):
            text = item.read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(f"@{word}@", value)
            place.write_text(text, encoding="utf-8")
