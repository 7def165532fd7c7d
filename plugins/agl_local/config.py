"""The table ``[plugins.local]``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt

# What programs commonly need to find files, libraries and certificates, and nothing that holds
# secrets; proxies are left out because their addresses often carry passwords.
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)


@frozen(kw_only=True)
class LocalConfig:
    """Agents as processes of this machine."""

    max_active: int = field(default=8, validator=ge(1))
    """Rollouts at once."""
    state_dir: str = ".agl"
    """Where attempts, their output and their exit codes are kept; one controller at a time."""
    command: tuple[str, ...] | None = None
    """The agent, where a rollout's config names none."""
    work_dir: str | None = None
    """Where agents run; null: an empty directory of each attempt's own, removed after it."""
    env_allow: tuple[str, ...] = _ENVIRONMENT
    """Variables of the controller that agents get; never its keys."""
    grace_seconds: float = field(default=10.0, validator=ge(0))
    """Between SIGTERM and SIGKILL."""
    retry_seconds: float = field(default=1.0, validator=ge(0))
    """Before the first retry; doubled for each further one, up to 30."""
    infra_retries: int = field(default=3, validator=ge(0))
    """Further attempts after ones that ended through no fault of the agent (a reboot, say)."""
    log_tail_bytes: int = field(default=16384, validator=gt(0))
    """How much of a failed attempt's output becomes a ``log`` event."""
    keep: bool = False
    """Move the files of released rollouts to ``state_dir/kept``, to look into them."""
