"""CURVE keys of every socket: who may talk to the broker and the broadcaster, and how to tell that they are those.

Keys come from the environment (containers) or from a folder of files with mode 0600. Where there are none, sockets are
open and may be bound to this host alone. See docs/security.md.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from shared.errors import ConfigError
from shared.log import log

SERVER_FILE, CLIENT_FILE, TRUSTED_FILE = "server.json", "client.json", "trusted.json"
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
_domains = itertools.count()
_authenticators: dict[int, ThreadAuthenticator] = {}


@dataclass(frozen=True, slots=True)
class Keys:
    """What this process has of keys, as Z85 text of 40 characters.

    server_public: of the run's broker and broadcaster, which are known by one pair; server_secret: only where they run.
    client_secret: this process's own. trusted: public keys of clients that a server lets in, with their names.
    """

    server_public: str | None = None
    server_secret: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)
    trusted: dict[str, str] = field(default_factory=dict)

    @property
    def client_public(self) -> str | None:
        """The public key that belongs to `client_secret`."""
        return None if self.client_secret is None else public_key(self.client_secret)


def keys_folder() -> Path:
    """Where the files are: $STRETTO_KEYS, by default ~/.config/stretto/keys."""
    return Path(os.environ.get("STRETTO_KEYS", "~/.config/stretto/keys")).expanduser()


def find_keys() -> Keys | None:
    """The keys in the environment or, where it names none, in the folder; None where there are none at all.

    Raises ConfigError where a key is not one, or a file may be read by others; no message holds a secret.
    """
    keys = _from_environment() or _from_folder(keys_folder())
    if keys is None:
        return None
    own = keys.client_public
    trusted = keys.trusted if own is None else {own: "this one"} | keys.trusted
    public = keys.server_public or (public_key(keys.server_secret) if keys.server_secret else None)
    return Keys(public, keys.server_secret, keys.client_secret, trusted)


def _from_environment() -> Keys | None:
    names = ("SERVER_PUBLIC", "SERVER_SECRET", "CLIENT_SECRET")
    found = {name: os.environ.get(f"STRETTO_{name}") for name in names}
    trusted = [key.strip() for key in os.environ.get("STRETTO_TRUSTED", "").split(",") if key.strip()]
    for name, key in [*found.items(), *(("TRUSTED", key) for key in trusted)]:
        if key is not None:
            _require_key(key, f"STRETTO_{name}")
    if not any(found.values()):
        return None
    return Keys(
        server_public=found["SERVER_PUBLIC"],
        server_secret=found["SERVER_SECRET"],
        client_secret=found["CLIENT_SECRET"],
        trusted={key: f"STRETTO_TRUSTED {i}" for i, key in enumerate(trusted, 1)},
    )


def _from_folder(folder: Path) -> Keys | None:
    server, client, trusted = (_read(folder / name) for name in (SERVER_FILE, CLIENT_FILE, TRUSTED_FILE))
    if not server and not client:
        return None
    for name, part in ((SERVER_FILE, server), (CLIENT_FILE, client)):
        for key in part.values():
            _require_key(key, str(folder / name))
    for key in trusted.values():
        _require_key(key, str(folder / TRUSTED_FILE))
    by_key = {key: name for name, key in trusted.items()}
    return Keys(server.get("public"), server.get("secret"), client.get("secret"), by_key)


def _read(file: Path) -> dict[str, str]:
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"{file} may be read by others: chmod 600 {file}")
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise ConfigError(f"{file} cannot be read as a file of keys: make new ones with `stretto keys new`") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} cannot be read as a file of keys: make new ones with `stretto keys new`")
    return found


def _require_key(key: Any, where: str) -> None:
    try:
        valid = isinstance(key, str) and len(z85.decode(key)) == 32
    except (KeyError, ValueError, UnicodeError):
        valid = False
    if not valid:
        raise ConfigError(f"{where} holds something that is no key: keys are 40 characters, as `stretto keys` shows")


def public_key(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode()).decode()


def new_keys(folder: Path, *, server_public: str | None = None) -> Keys:
    """Make the keys that the folder lacks: of server and client or, for a host of clients, of the client alone.

    server_public: the public key of the server on another host. Raises ConfigError.
    """
    if server_public is not None:
        _require_key(server_public, "the server's public key")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / SERVER_FILE).exists():
        public, secret = (key.decode() for key in zmq.curve_keypair())
        pair = {"public": public, "secret": secret} if server_public is None else {"public": server_public}
        _write(folder / SERVER_FILE, pair)
    elif server_public not in (None, _read(folder / SERVER_FILE).get("public")):
        raise ConfigError(f"{folder / SERVER_FILE} holds another server's key: remove it first")
    if not (folder / CLIENT_FILE).exists():
        public, secret = (key.decode() for key in zmq.curve_keypair())
        _write(folder / CLIENT_FILE, {"public": public, "secret": secret})
    found = _from_folder(folder)
    assert found is not None
    return found


def trust(folder: Path, name: str, key: str) -> None:
    """Let the client with this public key in, also to servers that run already. Raises ConfigError."""
    _require_key(key, "the client's public key")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(folder / TRUSTED_FILE, _read(folder / TRUSTED_FILE) | {name: key})


def _write(file: Path, content: dict[str, str]) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as writing:
        json.dump(content, writing, indent=1)
    aside.rename(file)


def secure_client(socket: zmq.Socket[Any]) -> None:
    """Give a socket that connects this process's keys, if there are any. Raises ConfigError where one is missing."""
    keys = find_keys()
    if keys is None:
        return
    if keys.server_public is None or keys.client_secret is None:
        missing = "the server's public key" if keys.server_public is None else "a key of its own"
        raise ConfigError(f"this process has keys but lacks {missing}: see `stretto keys` and docs/security.md")
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()
    socket.curve_publickey = public_key(keys.client_secret).encode()


class Guard:
    """Lets clients in by their keys. refused: how many were not, as `unknown_key`."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key (Z85) is let in; called in a thread of its own for each connection."""
        name = key.decode()
        try:
            keys = find_keys()
        except ConfigError as error:
            log.error("cannot read the keys of clients", error=str(error))
            keys = None
        admitted = keys is not None and name in keys.trusted
        if not admitted:
            self.refused["unknown_key"] += 1
            log.warning("refused a client whose key is not trusted", key=name)
        return admitted


def secure_server(socket: zmq.Socket[Any], bind: str) -> Guard | None:
    """Have a socket that will be bound let in trusted clients alone; None where there are no keys.

    Raises ConfigError where there are none and others than this host could connect.
    """
    keys = find_keys()
    if keys is None:
        if not bind.startswith(_LOOPBACK) and os.environ.get("STRETTO_INSECURE") != "1":
            raise ConfigError(
                f"{bind} can be reached from other hosts and there are no keys: make them with `stretto keys new`, or "
                "allow it on a network that you trust with --insecure (STRETTO_INSECURE=1)"
            )
        return None
    if keys.server_secret is None:
        raise ConfigError("this process has keys but lacks the server's secret one: see docs/security.md")
    guard, domain = Guard(), f"stretto-{next(_domains)}"
    _authenticator(socket.context).configure_curve_callback(domain, guard)
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret.encode()
    socket.zap_domain = domain.encode()
    return guard


def _authenticator(context: zmq.Context[Any]) -> ThreadAuthenticator:
    """The one thread of a context that decides who is let in."""
    if context.underlying not in _authenticators:
        _authenticators[context.underlying] = authenticator = ThreadAuthenticator(context)
        authenticator.start()
    return _authenticators[context.underlying]
