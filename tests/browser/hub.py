"""A real JupyterHub on loopback with its proxy, whose single-user servers are JupyterLab with the panel."""

from __future__ import annotations

import shutil
import socket
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import final

import pytest
from playwright.sync_api import Page

from tests.browser.lab import SHOWN, START_S, Server

PROXY = "configurable-http-proxy"
USER = "ada"


def needs_hub() -> None:
    """Skip the test if JupyterHub or its proxy is missing."""
    if find_spec("jupyterhub") is None:
        pytest.skip("no JupyterHub: pip install jupyterhub")
    if shutil.which(PROXY) is None:
        pytest.skip(f"no proxy of JupyterHub on the PATH: npm install {PROXY}")


@final
class Hub(Server):
    """A JupyterHub: anyone may log in, and gets a server of the account that runs the hub.

    Args:
        folder: of its own.
    """

    def __init__(self, folder: Path) -> None:
        public, internal, of_proxy = _free_addresses(3)
        settings = {
            "JupyterHub.bind_url": public,
            "JupyterHub.hub_bind_url": internal,
            "JupyterHub.db_url": f"sqlite:///{folder / 'hub.sqlite'}",
            "JupyterHub.cookie_secret_file": str(folder / "cookie_secret"),
            "JupyterHub.authenticator_class": "dummy",
            "JupyterHub.spawner_class": "simple",
            "ConfigurableHTTPProxy.api_url": of_proxy,
            "ConfigurableHTTPProxy.pid_file": str(folder / "proxy.pid"),
            "Authenticator.allow_all": True,
            "Spawner.cmd": [sys.executable, "-m", "jupyterhub.singleuser"],
            "Spawner.args": list(SHOWN),
            "Spawner.default_url": "/lab",
            "Spawner.start_timeout": START_S,
            "Spawner.http_timeout": START_S,
            "Spawner.notebook_dir": str(folder / "notebooks"),
            "SimpleLocalProcessSpawner.home_dir_template": str(folder / "home"),
        }
        lines = ["import os", "c.Spawner.environment = dict(os.environ)"]
        lines += [f"c.{name} = {value!r}" for name, value in settings.items()]
        folder.mkdir(parents=True)
        config = folder / "jupyterhub_config.py"
        config.write_text("\n".join(lines))
        self._public = public
        super().__init__(folder, [sys.executable, "-m", "jupyterhub", "--config", str(config)])
        self.start()
        self.token = ""  # a browser that has logged in has cookies

    def address(self) -> str | None:
        try:
            urllib.request.urlopen(f"{self._public}/hub/health", timeout=30).close()
        except (urllib.error.URLError, ConnectionError):
            return None
        return f"{self._public}/user/{USER}/"

    def log_in(self, page: Page, user: str = USER) -> None:
        """Log in on the hub's page, and wait until it has started the user's server."""
        page.goto(f"{self._public}/hub/login")
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password").fill("any")
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(f"{self._public}/user/{user}/lab**", timeout=1000 * START_S)

    def home(self, page: Page) -> None:
        """Show the hub's page that starts and stops the server of the user who has logged in."""
        page.goto(f"{self._public}/hub/home")


def _free_addresses(number: int) -> list[str]:
    """Of loopback, with ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return [f"http://127.0.0.1:{port}" for port in ports]
