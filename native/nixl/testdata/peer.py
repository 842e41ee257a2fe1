"""A peer for TestPython: what peerMain is, with the Python package of NIXL's wheel."""

import sys
import threading

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

data = (np.arange(8 << 20) % 251).astype(np.uint8)
agent = nixl_agent("python", nixl_agent_config(backends=["UCX"]))
registered = agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
print("PEER", agent.get_agent_metadata().hex(), data.ctypes.data, data.nbytes, flush=True)
peer = agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
peer = peer.decode() if isinstance(peer, bytes) else peer

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.0005):
    for messages in agent.get_new_notifs().values():
        for message in messages:
            agent.send_notif(peer, b"got " + message)
agent.remove_remote_agent(peer)
agent.deregister_memory(registered)
