"""The only module that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from pdhub.api.errors import ConfigError
from pdhub.config.overlay import Assignment, from_environment


class Settings(BaseSettings):
    """Switches of the process itself, each ``PDHUB_<NAME>``; configuration values have ``__`` in the name."""

    model_config = SettingsConfigDict(env_prefix="PDHUB_", extra="ignore", frozen=True)

    strict_plugins: bool = Field(False, description="Any broken plugin is fatal, named by the configuration or not.")
    debug: bool = Field(False, description="Show tracebacks of errors.")
    log_level: str = Field("info", description="debug, info, warning or error; `--log-level` wins.")
    cache_dir: Path | None = Field(
        None, description="Where converted models are kept; default is `pdhub` in the user's cache directory."
    )


def settings() -> Settings:
    """Read now. Raises ConfigError for a value of the wrong type."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = f"PDHUB_{str(first['loc'][0]).upper()}"
        hint = "use 1 or 0 for switches, or unset it"
        raise ConfigError(f"environment variable {name}: {first['msg']}", hint=hint) from None


def environment() -> list[Assignment]:
    """Configuration values of the environment, as :func:`pdhub.config.overlay.from_environment` reads them."""
    return from_environment(os.environ)


def secret(name: str | None) -> str | None:
    """An API key by the name of its variable; None if no name is given.

    Raises:
        ConfigError: the variable is named but not set, so that no call goes out without its key.
    """
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"environment variable {name}, named by api_key_env, is not set", hint=f"export {name}=…")
    return value


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child, with ``extra`` over it."""
    return {**os.environ, **(extra or {})}


def importing_environment() -> dict[str, str]:
    """For a Python child that must find the modules that this process finds."""
    return child_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})


def cache_dir() -> Path:
    """Directory for converted models; not created here."""
    chosen = settings().cache_dir
    if chosen is not None:
        return chosen.expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdhub"
