"""Where a run's figures go: a CSV file, and W&B."""

import logging
import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from lightning.pytorch.loggers import CSVLogger, Logger

from dfl_lightning.errors import UserError

log = logging.getLogger(__name__)


def default_loggers(name: str, root: str = "runs") -> list[Logger]:
    """A CSV logger under ``root/name/version``, and a W&B logger beside it.

    W&B goes where WANDB_MODE says (``online``, ``offline``, ``disabled``); where it is not set, offline unless there is
    an API key, so that a run never waits for an account.

    Args:
        name: of the run; runs of the same name get versions.
        root: the folder of all runs.
    """
    csv = CSVLogger(root, name)
    mode = os.environ.get("WANDB_MODE") or None
    if mode == "disabled":
        return [csv]
    if mode not in (None, "online", "offline"):
        raise UserError(f"WANDB_MODE is {mode}, but it must be online, offline or disabled; change or unset it.")
    if mode == "online" and not _has_api_key():
        raise UserError("WANDB_MODE is online, but W&B has no API key here; run `wandb login`, or unset it.")
    from lightning.pytorch.loggers import WandbLogger
    from wandb import Settings

    if mode is None and not _has_api_key():
        mode = "offline"
        log.info(
            "W&B has no API key here, so it records offline; `wandb sync %s/wandb/offline-*` uploads the run.",
            csv.log_dir,
        )
    Path(csv.log_dir).mkdir(parents=True, exist_ok=True)
    wandb = WandbLogger(
        name=f"{name}/{Path(csv.log_dir).name}",
        project="dfl_lightning",
        save_dir=csv.log_dir,
        mode=mode,  # not offline=True, which would set WANDB_MODE for the whole process
        settings=Settings(silent=True, console="off"),
    )
    wandb._wandb_init.pop("anonymous", None)  # which the logger always passes and W&B always warns about
    return [csv, wandb]


def _has_api_key() -> bool:
    """Whether `wandb login` or WANDB_API_KEY left a key here; asks neither the person nor the network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host or "") is not None
    except (OSError, NetrcParseError):
        return False
