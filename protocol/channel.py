"""Requests and answers over ZeroMQ: `Client` (DEALER) and `Server` (ROUTER). Correlation is by id, never by order.

A request is sent again with the same id until it is answered or its deadline passes, at once when the connection was
lost and is there again; the server remembers recent ids, so a repeated request gets the same answer and is carried out
once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import Limits, Message, decode, encode, message_id
from protocol.keys import Guard, find_keys, secure_client, secure_server
from protocol.messages import Body, Refused
from shared.errors import ConfigError, ProtocolError, Unreachable
from shared.group import Columns
from shared.log import log

Answer = TypeVar("Answer", bound=Body)
Reply = Body | tuple[Body, Columns]
Handler = Callable[[Message], Awaitable[Reply]]

RETRY_S = 5.0
"""Time without an answer, beyond what the server may wait on purpose, after which a request is sent again."""
REMEMBERED_ANSWERS = 4096
REMEMBERED_BYTES = 64 << 20
MAX_RUNNING = 16_384
MAX_RUNNING_BYTES = 1 << 30
"""Requests that are worked on at once, and the bytes of all: beyond that a server reads no more until some are done."""
MAX_RUNNING_OF_A_PEER = 2048
MAX_REFUSED = 100
REFUSED_WITHIN_S = 60.0
"""A peer of whom so many messages break the rules in that time is cut off for as long."""
REMEMBERED_PEERS = 4096
BATCH = 64
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Client:
    """Asks one server. Use within one event loop; any number of requests may be under way at once.

    connections: how often a connection was made; the server may be another one each time. refused: answers that broke
    the rules.
    """

    def __init__(self, address: str, *, peer: str = "broker", limits: Limits = Limits()) -> None:
        self.address = address
        self._peer = peer
        self._limits = limits
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _harden(self._socket, limits)
        secure_client(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKES)
        self._refusal: ConfigError | None = None
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address!r} is not an address to connect to ({error.strerror})") from None
        self.connections = 0
        self.refused = 0
        self._waiting: dict[bytes, asyncio.Future[Message | None]] = {}
        self._background: list[asyncio.Task[None]] = []

    async def request(
        self,
        body: Body,
        answer: type[Answer],
        columns: Columns | None = None,
        *,
        deadline_s: float = 30.0,
        wait_s: float = 0.0,
    ) -> tuple[Answer, Columns]:
        """The answer to `body`, and its columns.

        wait_s: how long the server may hold the request on purpose (a long poll).
        Raises ProtocolError where the server refused, Unreachable where no answer came in wait_s + deadline_s,
        ConfigError where it does not let this process in.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._socket.closed:
            raise Unreachable(f"{self._peer} {self.address} is not asked any more: its client was closed")
        if not self._background:
            parts = (self._read(), self._watch())
            self._background = [asyncio.create_task(part, name=f"answers of {self._peer}") for part in parts]
        message = Message(body, columns or {})
        reply = await self._ask(message, wait_s, deadline_s)
        if isinstance(reply.body, Refused):
            raise ProtocolError(reply.body.code, reply.body.detail)
        if not isinstance(reply.body, answer):
            raise ProtocolError("unknown_type", f"{body.type} was answered with {reply.body.type}")
        return reply.body, reply.columns

    async def _ask(self, message: Message, wait_s: float, deadline_s: float) -> Message:
        """Send a message, as often as it takes, until it is answered."""
        frames = encode(message)
        end, tries = time.monotonic() + wait_s + deadline_s, 0
        try:
            while (left := end - time.monotonic()) > 0:
                tries += 1
                future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
                self._waiting[message.id] = future
                try:
                    # A send waits while the socket's queue is full because the peer is away.
                    async with asyncio.timeout(min(left, wait_s + RETRY_S)):
                        await self._socket.send_multipart(frames, copy=False)
                        reply = await future
                except TimeoutError:
                    continue
                if reply is not None:
                    return reply
        finally:
            self._waiting.pop(message.id, None)
        raise Unreachable(
            f"{self._peer} {self.address} gave no answer to {message.body.type} in {wait_s + deadline_s:.0f} s "
            f"({tries} tries): check that it runs and can be reached from here"
        )

    async def _read(self) -> None:
        async for frames in received(self._socket):
            try:
                message = decode(frames, self._limits)
            except ProtocolError as error:
                self.refused += 1
                log.warning("refused an answer", peer=self._peer, error=str(error))
                continue
            self._settle(message.id, message)

    def _settle(self, message_id: bytes, reply: Message | None) -> None:
        """A request has its answer; None: it must be sent again."""
        future = self._waiting.get(message_id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _watch(self) -> None:
        """Have everything asked again when a lost connection is there again: the server may be another one by now."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._take_refusal(event)
                continue
            self.connections += 1
            if self.connections > 1:
                for message_id in self._waiting:
                    self._settle(message_id, None)

    def _take_refusal(self, event: Any) -> None:
        """End all requests where the server will never let this process in; a handshake may fail otherwise, too."""
        match event["event"], event["value"]:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400:
                keys = find_keys()
                own = None if keys is None else keys.client_public
                reason = f"does not trust the key of this host: run `stretto keys trust NAME '{own}'` there"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                reason = "has keys and this process has none, or the other way round: see `stretto keys list` on both"
            case _:
                return
        self._refusal = ConfigError(f"the {self._peer} {self.address} {reason} (docs/security.md)")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._refusal)

    async def close(self) -> None:
        """Close the socket; requests under way end with their deadline."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)


class Server:
    """Answers requests with what `handle` returns for each; a ProtocolError it raises becomes a refusal.

    refused: number of refused messages by code.
    """

    def __init__(self, bind: str, handle: Handler, *, limits: Limits = Limits()) -> None:
        """Raises ConfigError where the address cannot be bound, with what to do."""
        self._handle = handle
        self._limits = limits
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        _harden(self._socket, limits)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.RCVHWM, 64)
        self.address, self._guard = bind_socket(self._socket, bind)
        self.refused: Counter[str] = Counter() if self._guard is None else self._guard.refused
        self._peers: OrderedDict[str | bytes, Peer] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._running_bytes = 0
        self._asked_by: dict[bytes, bytes] = {}
        self._answers: OrderedDict[bytes, list[bytes | memoryview]] = OrderedDict()
        self._answers_bytes = 0

    @classmethod
    def again(cls, before: str | None, bind: str, handle: Handler) -> Server:
        """A server where it listened before it was started again, if the address can be had; or else at `bind`."""
        if before is not None:
            try:
                return cls(before, handle)
            except ConfigError as error:
                log.warning("cannot listen where it did before", error=str(error))
        return cls(bind, handle)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for sender, *frames in received(self._socket):
                    await self._accept(sender, frames, tasks)
                    while len(self._running) >= MAX_RUNNING or self._running_bytes >= MAX_RUNNING_BYTES:
                        await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._socket.close(linger=500)

    async def _accept(self, sender: zmq.Frame, frames: list[zmq.Frame], tasks: asyncio.TaskGroup) -> None:
        route, peer = sender.bytes, self._peer(sender)
        if peer.is_cut_off(time.monotonic()):
            self.refused["cut_off"] += 1
            return
        try:
            message = decode(frames, self._limits)
            is_new = message.id not in self._running and message.id not in self._answers
            if is_new and peer.running >= MAX_RUNNING_OF_A_PEER:
                raise ProtocolError("too_many", f"{MAX_RUNNING_OF_A_PEER} requests of one peer at once are enough")
        except ProtocolError as error:
            peer.refuse(time.monotonic())
            await self._refuse(route, message_id(frames), error)
            return
        self._asked_by[message.id] = route
        if message.id in self._answers:
            await self._answer(message.id, self._answers[message.id])
        elif is_new:
            size = _size(frames) if message.columns else 0
            peer.running += 1
            self._running_bytes += size
            task = tasks.create_task(self._process(message, peer, size), name=message.body.type)
            self._running[message.id] = task

    def _peer(self, sender: zmq.Frame) -> Peer:
        """Who sent a message: known by its key where there are keys, or else by its connection."""
        name: str | bytes = sender.bytes if self._guard is None else str(sender.get("User-Id"))
        peer = self._peers.setdefault(name, Peer())
        self._peers.move_to_end(name)
        if len(self._peers) > REMEMBERED_PEERS:
            self._peers.popitem(last=False)
        return peer

    async def _process(self, message: Message, peer: Peer, size: int) -> None:
        try:
            reply = await self._handle(message)
            body, columns = reply if isinstance(reply, tuple) else (reply, {})
        except ProtocolError as error:
            self.refused[error.code] += 1
            body, columns = Refused(code=error.code, detail=error.detail), {}
        finally:
            self._running.pop(message.id, None)
            self._running_bytes -= size
            peer.running -= 1
        frames = encode(Message(body, columns, message.id))
        if not message.body.only_reads:
            self._remember(message.id, frames)
        await self._answer(message.id, frames)

    async def _refuse(self, route: bytes, message_id: bytes | None, error: ProtocolError) -> None:
        self.refused[error.code] += 1
        if message_id is not None:
            refusal = Message(Refused(code=error.code, detail=error.detail), {}, message_id)
            await self._socket.send_multipart([route, *encode(refusal)])

    async def _answer(self, message_id: bytes, frames: list[bytes | memoryview]) -> None:
        route = self._asked_by.pop(message_id, None)
        if route is not None:
            await self._socket.send_multipart([route, *frames], copy=False)

    def _remember(self, message_id: bytes, frames: list[bytes | memoryview]) -> None:
        self._answers[message_id] = frames
        self._answers_bytes += _size(frames)
        while len(self._answers) > REMEMBERED_ANSWERS or self._answers_bytes > REMEMBERED_BYTES:
            _, oldest = self._answers.popitem(last=False)
            self._answers_bytes -= _size(oldest)


@dataclass(slots=True)
class Peer:
    """What a server remembers of who asks: requests that are under way, and how many broke the rules of late."""

    running: int = 0
    refused: int = 0
    since: float = 0.0

    def refuse(self, now: float) -> None:
        """A message of it was refused."""
        if now - self.since > REFUSED_WITHIN_S:
            self.refused, self.since = 0, now
        self.refused += 1

    def is_cut_off(self, now: float) -> bool:
        """Whether nothing that it sends is read."""
        return self.refused > MAX_REFUSED and now - self.since <= REFUSED_WITHIN_S


async def received(socket: zmq.asyncio.Socket) -> AsyncIterator[list[zmq.Frame]]:
    """The messages that arrive, for ever.

    Those that are there already are read at once, without the event loop's help; other tasks get their turn after each
    batch of them.
    """
    there: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    while True:
        yield await socket.recv_multipart(copy=False)
        for _ in range(BATCH):
            try:
                yield there.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
        else:
            await asyncio.sleep(0)


def bind_socket(socket: zmq.Socket[Any], bind: str) -> tuple[str, Guard | None]:
    """Bind; returns the address as bound, with its port, and who watches the door where there are keys.

    Raises ConfigError where the address cannot be had, or would be open to other hosts without keys.
    """
    try:
        guard = secure_server(socket, bind)
        socket.bind(bind)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        remedy = "stop the other program or choose another port (0 takes a free one)"
        reason = "is in use" if error.errno == zmq.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise ConfigError(f"the address {bind} {reason}: {remedy}") from None
    except ConfigError:
        socket.close(linger=0)
        raise
    return socket.getsockopt_string(zmq.LAST_ENDPOINT), guard


def _harden(socket: zmq.asyncio.Socket, limits: Limits) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes)  # a larger one ends the connection
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)


def _size(frames: list[Any]) -> int:
    return sum(len(frame) for frame in frames)
