"""Makes the keys of a deployment and prints them as two Secrets. It keeps nothing.

    python deploy/k8s/keys.py | kubectl create -n stretto -f -

Without Stretto at hand: docker run --rm -i --entrypoint python IMAGE - < deploy/k8s/keys.py
"""

from __future__ import annotations

import json

import zmq


def main() -> None:
    """The server's key, for broker, broadcaster and critics alone, and that of the clients, for all."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    _, client_secret = (key.decode() for key in zmq.curve_keypair())
    values = {
        "stretto-server": {"STRETTO_SERVER_SECRET": server_secret},
        "stretto-client": {"STRETTO_SERVER_PUBLIC": server_public, "STRETTO_CLIENT_SECRET": client_secret},
    }
    secrets = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "stringData": data}
        for name, data in values.items()
    ]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": secrets}, indent=1))


if __name__ == "__main__":
    main()
