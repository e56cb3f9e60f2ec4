"""MooncakeConnector on a machine without an accelerator; imported by vLLM alone (``kv_connector_module_path``).

Its worker asks torch for the index of an accelerator, which a CPU build of torch refuses; and its bootstrap server
listens on all addresses, which a test should not.
"""

import torch

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

_Server = mooncake_connector.MooncakeBootstrapServer
mooncake_connector.MooncakeBootstrapServer = lambda host, port: _Server("127.0.0.1", port)


class MooncakeCpuConnector(mooncake_connector.MooncakeConnector):
    """vLLM's own, under a name that the module path leads to."""
