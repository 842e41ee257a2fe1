import runpy

from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, NixlConnectorProtocol

KV_CONNECTOR_PROTOCOLS["KvportConnector"] = NixlConnectorProtocol

if __name__ == "__main__":
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
