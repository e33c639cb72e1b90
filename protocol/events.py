"""Events on a PUB socket: hints that something changed. Whoever misses one learns it from the next heartbeat."""

from __future__ import annotations

from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from protocol.channel import bind_socket
from protocol.codec import Limits, Message, decode, encode
from protocol.keys import secure_client
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
        self.address, _ = bind_socket(self._socket, bind)

    def publish(self, event: Event) -> None:
        """Send to whoever listens; never waits for them, and drops the event for one that is too slow."""
        self._socket.send_multipart(encode(Message(event)))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=500)


class EventSubscriber:
    """A member's side: the events of one publisher, which may be another one later. refused: those that were none."""

    def __init__(self) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _LIMITS.message_bytes)
        secure_client(self._socket)
        self._socket.subscribe(b"")
        self._address: str | None = None
        self.refused = 0

    def connect(self, address: str) -> None:
        """Listen to the publisher at `address`, and to no other any more."""
        if address == self._address:
            return
        if self._address is not None:
            self._socket.disconnect(self._address)
        self._socket.connect(address)
        self._address = address

    async def events(self) -> AsyncIterator[Event]:
        """The events from now on. Frames that are no event are skipped."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message = decode(frames, _LIMITS)
            except ProtocolError as error:
                self.refused += 1
                log.warning("refused an event", address=self._address, error=str(error))
                continue
            if isinstance(message.body, Event):
                yield message.body
            else:
                self.refused += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
