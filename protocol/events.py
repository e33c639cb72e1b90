"""Events on a PUB socket: hints that something changed. Whoever misses one learns it from the next heartbeat."""

from __future__ import annotations

from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from protocol.channel import bind_socket
from protocol.codec import Limits, Message, decode, encode
from protocol.messages import Event
from shared.errors import ProtocolError
from shared.log import log

_LIMITS = Limits(header_bytes=1 << 16, message_bytes=1 << 16, columns=0)


class EventPublisher:
    """The broker's side."""

    def __init__(self, bind: str) -> None:
        """Raises ConfigError where the address cannot be bound."""
        # A plain socket: publishing never blocks, so it needs no event loop.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self.address = bind_socket(self._socket, bind)

    def publish(self, event: Event) -> None:
        """Send to whoever listens; never waits for them, and drops the event for one that is too slow."""
        self._socket.send_multipart(encode(Message(event)))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=500)


async def subscribe(address: str) -> AsyncIterator[Event]:
    """The events published at `address` from now on. Frames that are no event are skipped."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.MAXMSGSIZE, _LIMITS.message_bytes)
    socket.subscribe(b"")
    socket.connect(address)
    try:
        while True:
            frames = await socket.recv_multipart(copy=False)
            try:
                message = decode(frames, _LIMITS)
            except ProtocolError as error:
                log.warning("refused an event", address=address, error=str(error))
                continue
            if isinstance(message.body, Event):
                yield message.body
    finally:
        socket.close(linger=0)
