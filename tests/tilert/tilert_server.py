"""TileRT's real decode server on a machine without a GPU.

The receive server, the wire protocol, NIXL, the conversion of KV and the HTTP server are TileRT's own. What is stood in
for is only where memory is: allocations and registrations for CUDA become host memory, and waiting for the device
nothing. ``--engine stub`` is TileRT's main program with its stub engine; ``--engine kv`` runs the same server around an
engine that answers from the KV that it was given (tilert_planes.py), one token every KV_ENGINE_PACE_S.
"""

import os
import sys
import time

import torch


def _on_host(function):
    def call(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        return function(*args, **kwargs)

    return call


def memory_is_here(transport):
    """Allocations and registrations for CUDA become host memory, and waiting for the device nothing."""
    torch.zeros = _on_host(torch.zeros)
    torch.Tensor.to = _on_host(torch.Tensor.to)
    torch.cuda.synchronize = lambda *args, **kwargs: None
    register = transport.NixlTransport.register
    transport.NixlTransport.register = lambda self, ptr, nbytes, dev_id, location=None, host=False: register(
        self, ptr, nbytes, dev_id, None, True
    )


def _bytes(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


def _kv_engine(pace_s):
    import tilert_planes as kv
    from tilert.pd_vllm.engine_iface import StubEngine

    class KVEngine(StubEngine):
        """Ends as TileRT's CUDA engines do: the id that ends an answer is only sent if it is the first."""

        def inject(self, req):
            layers = [
                (_bytes(latent.to(torch.float8_e4m3fn)), _bytes(rotary.contiguous()))
                for _, latent, rotary in req.layers
            ]
            self.injected = kv.digest(layers)

        def supports_logprobs(self):
            return False

        def supports_penalties(self):
            return False

        def decode(self, first_token_id, max_tokens, sampling, on_token=None, cancel_event=None, grammar_session=None):
            tokens, finish = [first_token_id], "length"
            on_token(first_token_id)
            if first_token_id == kv.EOS:
                self.last_stats = {"finish_reason": "stop"}
                return []
            for token in kv.chain(self.injected, max_tokens - 1):
                time.sleep(pace_s)
                if cancel_event.is_set():
                    finish = "cancelled"
                    break
                if token == kv.EOS:
                    finish = "stop"
                    break
                tokens.append(token)
                on_token(token)
            self.last_stats = {"finish_reason": finish}
            return tokens

    return KVEngine()


def _serve_kv(words):
    import uvicorn
    from tilert.pd_vllm import decode_server
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.receive_server import ReceiveServer

    args = decode_server.build_parser().parse_args([*words, "--engine", "stub"])
    profile = base.get_profile(args.model)
    profile.configure(args.kv_cache_dtype)
    received = ReceiveServer(profile, max_seq_len=args.max_seq_len, ctrl_port=args.ctrl_port, transport=args.transport)
    app = decode_server.build_app(received, _kv_engine(float(os.environ.get("KV_ENGINE_PACE_S", "0"))))
    uvicorn.run(app, host="127.0.0.1", port=args.http_port, log_level="warning")


def main():
    words = sys.argv[1:]
    from tilert.pd_vllm import decode_server, transport

    memory_is_here(transport)
    at = words.index("--engine")
    if words[at + 1] == "kv":
        _serve_kv(words[:at] + words[at + 2 :])
    else:
        decode_server.main()


if __name__ == "__main__":
    main()
