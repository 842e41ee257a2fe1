"""The connection to the agent, with a test in the agent's place."""

import socket
import threading

import pytest
from test_agent import LIMIT

from kvport_agent.frames import _LENGTH, MAX_SENT, Frames
from kvport_agent.link import Link, State
from kvport_agent.messages import message


@pytest.fixture
def pair():
    """Give a connection that is up, and the agent's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link = Link(None, None)
    link._frames, link.state, link.life = Frames(ours), State.UP, 1
    theirs.settimeout(LIMIT)
    yield link, theirs
    ours.close()
    theirs.close()


def match(hashes):
    return message("Query")(request="r", tokens=1, keys=bytes(32 * hashes))


def agent(sock):
    """Answer one call, once all of it is there."""

    def exactly(n):
        data = b""
        while len(data) < n:
            part = sock.recv(n - len(data))
            assert part
            data += part
        return data

    call = message("AgentCall").FromString(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))
    answer = message("AgentAnswer")(id=call.id)
    answer.match.tokens = len(call.match.keys) // 32
    frame = answer.SerializeToString()
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def test_a_call_that_the_socket_takes_in_pieces_is_answered(pair):
    link, theirs = pair
    thread = threading.Thread(target=agent, args=(theirs,))
    thread.start()
    answer = link.call(LIMIT, match=match(1 << 15))
    thread.join()
    assert answer is not None and answer.match.tokens == 1 << 15


def test_a_call_that_no_agent_takes_is_not_sent(pair):
    link, theirs = pair
    assert link.call(LIMIT, match=match(MAX_SENT // 32)) is None
    assert link.post(match=match(MAX_SENT // 32)) is None
    assert link.state is State.UP
    thread = threading.Thread(target=agent, args=(theirs,))
    thread.start()
    answer = link.call(LIMIT, match=match(3))
    thread.join()
    assert answer is not None and answer.match.tokens == 3
